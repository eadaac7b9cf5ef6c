"""Gemma 3 and 4: a square grid per image or crop, and grids of any size."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any

from torch import Tensor

from mmspec.interfaces import VisualGrid
from mmspec.vision.grids.layout import VisualLayout


class Gemma3Layout(VisualLayout):
    """`Gemma3ForConditionalGeneration`. An image and each of its crops is pooled to `mm_tokens_per_image` tokens.

    Crops follow their image with text in between, so that nothing in the prompt tells them from further images.
    """

    model_types: tuple[str, ...] = ("gemma3",)

    def grids(self, input_ids: Tensor, vision: Mapping[str, Any]) -> tuple[VisualGrid, ...]:
        """One square grid per image or crop; empty if a run of placeholders has another length."""
        config = self.model.config
        side = isqrt(config.mm_tokens_per_image)
        runs = self.placeholder_runs(input_ids, config.image_token_id)
        if any(length != side * side for _, _, length in runs):
            return ()
        return tuple(VisualGrid(row, start, side, side, index) for index, (row, start, _) in enumerate(runs))


class Gemma4Layout(VisualLayout):
    """`Gemma4ForConditionalGeneration`. Grid sizes follow from the patch positions (`*_position_ids`)."""

    model_types: tuple[str, ...] = ("gemma4",)
    vision_args: tuple[str, ...] = ("image_position_ids", "video_position_ids", "num_frames_per_video")

    def grids(self, input_ids: Tensor, vision: Mapping[str, Any]) -> tuple[VisualGrid, ...]:
        """One grid per image and per frame of a video; empty if the token numbers do not match."""
        config = self.model.config
        grids: list[VisualGrid] = []
        media_index = 0
        for token, argument, role in (
            (config.image_token_id, "image_position_ids", "base"),
            (config.video_token_id, "video_position_ids", "frame"),
        ):
            sizes = self._grid_sizes(vision.get(argument))
            runs = self.placeholder_runs(input_ids, token)
            if [height * width for height, width in sizes] != [length for _, _, length in runs]:
                return ()
            frames = [1] * len(sizes) if role == "base" else _frame_counts(vision, len(sizes))
            owners = [(index, frame) for index, count in enumerate(frames) for frame in range(count)]
            for (row, start, _), (height, width), (index, frame) in zip(runs, sizes, owners, strict=True):
                grids.append(VisualGrid(row, start, height, width, media_index + index, role=role, frame=frame))
            media_index += len(frames)
        return tuple(grids)

    def _grid_sizes(self, position_ids: Any) -> list[tuple[int, int]]:
        """(height, width) in visual tokens of each image or frame, from patch positions [M, P, 2] (x, y), -1 padded."""
        if position_ids is None:
            return []
        kernel = self.model.config.vision_config.pooling_kernel_size
        return [(int(y + 1) // kernel, int(x + 1) // kernel) for x, y in position_ids.amax(1).tolist()]


def _frame_counts(vision: Mapping[str, Any], num_frames: int) -> list[int]:
    """Frames of each video; one video if the counts are not passed."""
    counts = vision.get("num_frames_per_video")
    return [int(count) for count in counts] if counts is not None else [num_frames] * bool(num_frames)
