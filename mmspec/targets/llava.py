"""LLaVA 1.5: one square grid of visual tokens per picture."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any

from torch import Tensor

from mmspec.interfaces import VisualGrid
from mmspec.targets.base import ModelAdapter
from mmspec.targets.vision_attention import AttentionCapture, capture_attention


class LlavaAdapter(ModelAdapter):
    """`LlavaForConditionalGeneration`. Each picture is a run of placeholders; pictures may follow each other."""

    model_type = "llava"
    vision_args = ("image_sizes",)

    def attention_capture(self) -> AttentionCapture | None:
        """Hears the layer that the projector is given."""
        config = self.model.config
        first = config.vision_feature_select_strategy == "default"
        return capture_attention(self.model.model.vision_tower, config.vision_feature_layer, first)

    def grids(self, input_ids: Tensor, vision: Mapping[str, Any]) -> tuple[VisualGrid, ...]:
        """Square grids of the vision tower's patches; none if its size does not divide the placeholders."""
        config = self.model.config.vision_config
        side = config.image_size // config.patch_size
        found: list[VisualGrid] = []
        for row, start, length in self.placeholder_runs(input_ids, self.model.config.image_token_id):
            per_picture = side * side if length % (side * side) == 0 else length
            if isqrt(per_picture) ** 2 != per_picture:
                return ()
            edge = isqrt(per_picture)
            for offset in range(0, length, per_picture):
                found.append(VisualGrid(row, start + offset, edge, edge, media_index=len(found)))
        return tuple(found)
