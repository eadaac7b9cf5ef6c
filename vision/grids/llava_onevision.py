"""LLaVA-OneVision: images as in LLaVA-NeXT (several images: base grids only), videos as pooled frames."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mmspec.interfaces import VisualGrid
from mmspec.vision.grids.llava_next import LlavaNextLayout


class LlavaOnevisionLayout(LlavaNextLayout):
    """`LlavaOnevisionForConditionalGeneration`."""

    model_types: tuple[str, ...] = ("llava_onevision",)
    vision_args: tuple[str, ...] = ("image_sizes", "pixel_values_videos")

    def grids(self, input_ids: Tensor, vision: Mapping[str, Any]) -> tuple[VisualGrid, ...]:
        """Base and tile grids of images, one grid per frame and a newline token for videos."""
        side = -(-self.base_side // 2)
        return self.media_grids(input_ids, vision, side, end_tokens=1)
