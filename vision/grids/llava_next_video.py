"""LLaVA-NeXT-Video: images as in LLaVA-NeXT, videos as one pooled grid per frame without separators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mmspec.interfaces import VisualGrid
from mmspec.vision.grids.llava_next import LlavaNextLayout


class LlavaNextVideoLayout(LlavaNextLayout):
    """`LlavaNextVideoForConditionalGeneration`. All videos of a call have the same number of frames."""

    model_types: tuple[str, ...] = ("llava_next_video",)
    vision_args: tuple[str, ...] = ("image_sizes", "pixel_values_videos")

    def grids(self, input_ids: Tensor, vision: Mapping[str, Any]) -> tuple[VisualGrid, ...]:
        """Base and tile grids of images, then a grid per frame of videos; empty if the token numbers do not match."""
        side = self.base_side // self.model.config.spatial_pool_stride  # pooling drops incomplete blocks
        return self.media_grids(input_ids, vision, side)
