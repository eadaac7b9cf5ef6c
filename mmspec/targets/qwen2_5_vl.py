"""Qwen2.5-VL: grids of any size for images and videos, three position axes (M-RoPE)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mmspec.interfaces import VisualGrid
from mmspec.targets.base import ModelAdapter


class Qwen25VLAdapter(ModelAdapter):
    """`Qwen2_5_VLForConditionalGeneration`. Grid sizes are inputs (`*_grid_thw`, before merging)."""

    model_type = "qwen2_5_vl"
    vision_args = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")

    def grids(self, input_ids: Tensor, vision: Mapping[str, Any]) -> tuple[VisualGrid, ...]:
        """One grid per image and per time step of a video; empty if the token numbers do not match."""
        config = self.model.config
        merge = config.vision_config.spatial_merge_size
        grids: list[VisualGrid] = []
        media_index = 0
        for token, argument, role in (
            (config.image_token_id, "image_grid_thw", "base"),
            (config.video_token_id, "video_grid_thw", "frame"),
        ):
            values = vision.get(argument)
            sizes = [] if values is None else [tuple(int(value) for value in size) for size in values]
            for row, start, length in self.placeholder_runs(input_ids, token):
                end = start + length
                while start < end:  # several grids may be adjacent
                    if not sizes:
                        return ()
                    num_frames, height, width = sizes.pop(0)
                    height //= merge
                    width //= merge
                    for frame in range(num_frames):
                        grids.append(VisualGrid(row, start, height, width, media_index, role=role, frame=frame))
                        start += height * width
                    media_index += 1
                if start != end:
                    return ()
            if sizes:
                return ()
        return tuple(grids)
