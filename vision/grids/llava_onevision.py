"""LLaVA-OneVision: images as in LLaVA-NeXT (several images: base grids only), videos as pooled frames."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mmspec.interfaces import VisualGrid
from mmspec.vision.grids.llava_next import LlavaNextLayout, clip_spans, frame_grids


class LlavaOnevisionLayout(LlavaNextLayout):
    """`LlavaOnevisionForConditionalGeneration`."""

    model_types: tuple[str, ...] = ("llava_onevision",)
    vision_args: tuple[str, ...] = ("image_sizes", "pixel_values_videos")

    def grids(self, input_ids: Tensor, vision: Mapping[str, Any]) -> tuple[VisualGrid, ...]:
        """Base and tile grids of images, one grid per frame and a newline token for videos."""
        config = self.model.config
        grids = self.image_grids(input_ids, vision)
        base_side = config.vision_config.image_size // config.vision_config.patch_size
        side = -(-base_side // 2)
        pixel_values = vision.get("pixel_values_videos")
        runs = self.placeholder_runs(input_ids, config.video_token_id)
        spans = clip_spans(runs, pixel_values, side * side, end_tokens=1)
        if grids is None or spans is None:
            return ()
        num_images = 1 + max((grid.media_index for grid in grids), default=-1)
        for media_index, (row, start, num_frames) in enumerate(spans, num_images):
            grids += frame_grids(row, start, num_frames, side, media_index)
            end = start + num_frames * side * side
            grids.append(VisualGrid(row, end, 1, 1, media_index, role="newline", frame=num_frames - 1))
        return tuple(grids)
