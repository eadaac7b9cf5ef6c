"""LLaVA 1.5, ViP-LLaVA, PaliGemma 1 and 2: one square grid of visual tokens per image."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any

from torch import Tensor

from mmspec.interfaces import VisualGrid
from mmspec.vision.grids.layout import VisualLayout


class LlavaLayout(VisualLayout):
    """LLaVA-1.5, VipLLaVA and PaliGemma. Each image is a run of placeholders; images may be adjacent."""

    model_types: tuple[str, ...] = ("llava", "vipllava", "paligemma")

    def grids(self, input_ids: Tensor, vision: Mapping[str, Any]) -> tuple[VisualGrid, ...]:
        """Square grids of the vision tower's patches; empty if a run of placeholders is no multiple of a square."""
        config = self.model.config.vision_config
        side = config.image_size // config.patch_size
        grids: list[VisualGrid] = []
        for row, start, length in self.placeholder_runs(input_ids, self.model.config.image_token_id):
            tokens_per_image = side * side if length % (side * side) == 0 else length
            edge = isqrt(tokens_per_image)
            if edge * edge != tokens_per_image:
                return ()
            for offset in range(0, length, tokens_per_image):
                grids.append(VisualGrid(row, start + offset, edge, edge, media_index=len(grids)))
        return tuple(grids)
