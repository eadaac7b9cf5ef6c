"""Qwen2.5-VL: grids of any size for pictures and clips, three position axes (M-RoPE)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mmspec.interfaces import VisualGrid
from mmspec.targets.base import ModelAdapter


class Qwen25VLAdapter(ModelAdapter):
    """`Qwen2_5_VLForConditionalGeneration`. The grids come with the inputs (`*_grid_thw`, before spatial merging)."""

    model_type = "qwen2_5_vl"
    vision_args = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")

    def grids(self, input_ids: Tensor, vision: Mapping[str, Any]) -> tuple[VisualGrid, ...]:
        """One grid per picture and per time step of a clip."""
        config = self.model.config
        merge = config.vision_config.spatial_merge_size
        found: list[VisualGrid] = []
        source = 0
        for token, name, role in (
            (config.image_token_id, "image_grid_thw", "base"),
            (config.video_token_id, "video_grid_thw", "frame"),
        ):
            grids = vision.get(name)
            grids = [] if grids is None else [tuple(int(n) for n in grid) for grid in grids]
            for row, start, length in self.placeholder_runs(input_ids, token):
                end = start + length
                while start < end:  # several grids may stand side by side
                    if not grids:
                        return ()
                    times, height, width = grids.pop(0)
                    height, width = height // merge, width // merge
                    for time in range(times):
                        found.append(VisualGrid(row, start, height, width, source, role=role, frame=time))
                        start += height * width
                    source += 1
                if start != end:
                    return ()
            if grids:
                return ()
        return tuple(found)
