"""Qwen2-VL, its successors and models with the same inputs: grids of any size, several position axes (M-RoPE)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from mmspec.interfaces import VisualGrid
from mmspec.vision.grids.layout import VisualLayout

MediaSizes = tuple[int, str, list[tuple[int, int, int]]]
"""Placeholder id, role of the grids, and (time steps, height, width) of each image or video, in tokens."""


class Qwen25VLLayout(VisualLayout):
    """Models whose grid sizes are inputs (`*_grid_thw`, before merging), with one placeholder per merged patch.

    The placeholders of a video are one run (Qwen2.5-VL), or one run per time step with a timestamp before it
    (Qwen3-VL).
    """

    model_types: tuple[str, ...] = (
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_vl",
        "qwen3_vl_moe",
        "qwen2_5_omni_thinker",
        "qwen3_omni_moe_thinker",
        "paddleocr_vl",
        "cosmos3_omni",
        "cosmos3_edge",
        "cohere_compass",
        "hyperclovax_vision_v2",
    )
    vision_args: tuple[str, ...] = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")

    def media_sizes(self, vision: Mapping[str, Any]) -> tuple[MediaSizes, MediaSizes]:
        """Sizes of all images and of all videos of a call.

        Args:
            vision: see `grids`.
        """
        config = self.model.config
        images, videos = (self.merged_sizes(vision, name) for name in ("image", "video"))
        return (config.image_token_id, "base", images), (getattr(config, "video_token_id", -1), "frame", videos)

    def grids(self, input_ids: Tensor, vision: Mapping[str, Any]) -> tuple[VisualGrid, ...]:
        """One grid per image and per time step of a video; empty if the token numbers do not match."""
        grids: list[VisualGrid] = []
        for token, role, sizes in self.media_sizes(vision):
            num_media = 1 + max((grid.media_index for grid in grids), default=-1)
            found = _place_grids(self.placeholder_runs(input_ids, token), self.media_grids(role, sizes, num_media))
            if found is None:
                return ()
            grids += found
        return tuple(grids)

    def merged_sizes(self, vision: Mapping[str, Any], name: str) -> list[tuple[int, int, int]]:
        """(time steps, height, width) of each image or video (`name` "image" or "video"), in tokens."""
        sizes = vision.get(f"{name}_grid_thw")
        rows = [] if sizes is None else [[int(value) for value in row] for row in sizes]
        merges = self.spatial_merges(vision, name, len(rows))
        return [
            (steps, height // merge, width // merge)
            for (steps, height, width), merge in zip(rows, merges, strict=False)
        ]

    def spatial_merges(self, vision: Mapping[str, Any], name: str, count: int) -> list[int]:
        """Edge, in patches, of what one token of each of `count` images or videos stands for."""
        return [self.model.config.vision_config.spatial_merge_size] * count

    def media_grids(self, role: str, sizes: Iterable[tuple[int, int, int]], first_index: int) -> Iterator[VisualGrid]:
        """The grids of images or videos in input order, not yet placed.

        Args:
            role: of the grids.
            sizes: see `merged_sizes`.
            first_index: `media_index` of the first.
        """
        for media_index, (num_steps, height, width) in enumerate(sizes, first_index):
            for step in range(num_steps):
                yield VisualGrid(0, 0, height, width, media_index, role=role, frame=step)


class Glm4vLayout(Qwen25VLLayout):
    """GLM-4V: videos have image placeholders too, so that a call has either images or videos."""

    model_types: tuple[str, ...] = ("glm4v", "glm46v", "glm_ocr", "glm4v_moe", "glmga")

    def media_sizes(self, vision: Mapping[str, Any]) -> tuple[MediaSizes, MediaSizes]:
        """As in the base class, with the token of the images for the videos if there are videos only."""
        images, (video_token, role, videos) = super().media_sizes(vision)
        if videos and not images[2]:
            return (video_token, "base", []), (images[0], role, videos)
        return images, (video_token, role, videos)


class Ernie45VLLayout(Qwen25VLLayout):
    """ERNIE 4.5 VL: consecutive time steps of a video share their visual tokens."""

    model_types: tuple[str, ...] = ("ernie4_5_vl_moe",)

    def media_sizes(self, vision: Mapping[str, Any]) -> tuple[MediaSizes, MediaSizes]:
        """As in the base class, with merged time steps."""
        images, (token, role, videos) = super().media_sizes(vision)
        merge = self.model.config.vision_config.temporal_merge_size
        return images, (token, role, [(num_steps // merge, height, width) for num_steps, height, width in videos])


class VideoLlama3Layout(Qwen25VLLayout):
    """VideoLLaMA 3: merged patches per image or video are inputs. Compressed videos have no grids."""

    model_types: tuple[str, ...] = ("video_llama_3",)
    vision_args: tuple[str, ...] = ("image_grid_thw", "video_grid_thw", "image_merge_sizes", "video_merge_sizes")

    def spatial_merges(self, vision: Mapping[str, Any], name: str, count: int) -> list[int]:
        """From the inputs; empty if they are missing."""
        merges = vision.get(f"{name}_merge_sizes")
        return [] if merges is None else [int(merge) for merge in merges]


class HunYuanVLLayout(Qwen25VLLayout):
    """HunYuan-VL: a newline token after each line of an image, and a single token before and after the image."""

    model_types: tuple[str, ...] = ("hunyuan_vl",)

    def media_grids(self, role: str, sizes: Iterable[tuple[int, int, int]], first_index: int) -> Iterator[VisualGrid]:
        """See the base class."""
        for grid in super().media_grids(role, sizes, first_index):
            single = VisualGrid(0, 0, 1, 1, grid.media_index, role="newline")
            yield from (single, replace(grid, has_newlines=True), single)


def _place_grids(runs: Iterable[tuple[int, int, int]], grids: Iterator[VisualGrid]) -> list[VisualGrid] | None:
    """Consecutive grids in the runs (row, start, length) of their placeholders; adjacent grids share a run.

    Returns:
        None if the numbers of tokens do not match, or a video is in two rows.
    """
    placed: list[VisualGrid] = []
    for row, start, length in runs:
        end = start + length
        while start < end:
            grid = next(grids, None)
            if grid is None or start + grid.num_tokens > end or (grid.frame and placed[-1].row != row):
                return None
            placed.append(replace(grid, row=row, start=start))
            start += grid.num_tokens
    return placed if next(grids, None) is None else None
