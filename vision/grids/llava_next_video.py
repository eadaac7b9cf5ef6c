"""LLaVA-NeXT-Video: images as in LLaVA-NeXT, videos as one pooled grid per frame without separators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mmspec.interfaces import VisualGrid
from mmspec.vision.grids.llava_next import LlavaNextLayout, clip_spans, frame_grids


class LlavaNextVideoLayout(LlavaNextLayout):
    """`LlavaNextVideoForConditionalGeneration`. All videos of a call have the same number of frames."""

    model_types: tuple[str, ...] = ("llava_next_video",)
    vision_args: tuple[str, ...] = ("image_sizes", "pixel_values_videos")

    def grids(self, input_ids: Tensor, vision: Mapping[str, Any]) -> tuple[VisualGrid, ...]:
        """Base and tile grids of images, then a grid per frame of videos; empty if the token numbers do not match."""
        config = self.model.config
        grids = self.image_grids(input_ids, vision)
        base_side = config.vision_config.image_size // config.vision_config.patch_size
        side = base_side // config.spatial_pool_stride  # pooling drops incomplete blocks
        pixel_values = vision.get("pixel_values_videos")
        runs = self.placeholder_runs(input_ids, config.video_token_id)
        spans = clip_spans(runs, pixel_values, side * side)
        if grids is None or spans is None:
            return ()
        num_images = 1 + max((grid.media_index for grid in grids), default=-1)
        for media_index, (row, start, num_frames) in enumerate(spans, num_images):
            grids += frame_grids(row, start, num_frames, side, media_index)
        return tuple(grids)
