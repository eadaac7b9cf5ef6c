"""LLaVA-NeXT (1.6): a base grid, then the grid of all tiles with a newline token after each line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmspec.interfaces import VisualGrid
from mmspec.vision.grids.layout import VisualLayout

GridSize = tuple[int, int]
"""(height, width) in tokens"""


def anyres_grids(
    row: int, start: int, length: int, media_index: int, base_side: int, tiles: GridSize | None
) -> list[VisualGrid] | None:
    """The grids of one any-resolution image; None if its number of tokens fits none.

    Args:
        row: batch row.
        start: index of the image's first token.
        length: number of the image's tokens.
        media_index: index of the image in the batch.
        base_side: height and width of the base grid.
        tiles: size of the unpadded grid of tiles, if known.
    """
    grids = [VisualGrid(row, start, base_side, base_side, media_index)]
    rest = length - base_side * base_side
    start += base_side * base_side
    if rest == 0:
        return grids
    if rest == 1:
        return [*grids, VisualGrid(row, start, 1, 1, media_index, role="newline")]
    if tiles is None or tiles[0] * (tiles[1] + 1) != rest:
        # Downscaled (LLaVA-OneVision) or of unknown size: the grid of that many tokens with the most similar ratio.
        ratio = tiles[0] / tiles[1] if tiles is not None else 1.0
        sizes = [(height, rest // height - 1) for height in range(1, rest // 2 + 1) if rest % height == 0]
        if not sizes:
            return None
        tiles = min(sizes, key=lambda size: abs(size[0] / size[1] - ratio))
    height, width = tiles
    return [*grids, VisualGrid(row, start, height, width, media_index, role="tiles", has_newlines=True)]


def clip_spans(
    runs: Sequence[tuple[int, int, int]], pixel_values: Any, frame_tokens: int, end_tokens: int = 0
) -> list[tuple[int, int, int]] | None:
    """(row, start, number of frames) of each video; None if the numbers of tokens do not match.

    Videos may be adjacent if `pixel_values` is known; otherwise each run is one video.

    Args:
        runs: (row, start, length) of the runs of video placeholders.
        pixel_values: [videos, frames, 3, height, width], or None.
        frame_tokens: tokens per frame.
        end_tokens: tokens after the last frame of each video.
    """
    is_known = isinstance(pixel_values, Tensor) and pixel_values.dim() == 5
    spans: list[tuple[int, int, int]] = []
    for row, start, length in runs:
        num_frames = int(pixel_values.shape[1]) if is_known else (length - end_tokens) // max(1, frame_tokens)
        clip_tokens = num_frames * frame_tokens + end_tokens
        if num_frames < 1 or frame_tokens < 1 or length % clip_tokens or not (is_known or length == clip_tokens):
            return None
        spans += [(row, clip_start, num_frames) for clip_start in range(start, start + length, clip_tokens)]
    return None if is_known and len(spans) != pixel_values.shape[0] else spans


class LlavaNextLayout(VisualLayout):
    """`LlavaNextForConditionalGeneration`. Images of one row must be separated by text."""

    model_types: tuple[str, ...] = ("llava_next",)
    vision_args: tuple[str, ...] = ("image_sizes",)

    def grids(self, input_ids: Tensor, vision: Mapping[str, Any]) -> tuple[VisualGrid, ...]:
        """Base and tile grids; empty if the placeholders cannot be assigned to images."""
        return tuple(self.image_grids(input_ids, vision) or ())

    @property
    def base_side(self) -> int:
        """Height and width in tokens of the base grid of an image."""
        config = self.model.config.vision_config
        return int(config.image_size // config.patch_size)

    def image_grids(self, input_ids: Tensor, vision: Mapping[str, Any]) -> list[VisualGrid] | None:
        """The grids of all images; None if the numbers of tokens do not match."""
        base_side = self.base_side
        sizes = vision.get("image_sizes")
        runs = self.placeholder_runs(input_ids, self.model.config.image_token_id)
        if sizes is not None and len(sizes) != len(runs):
            return None
        grids: list[VisualGrid] = []
        for media_index, (row, start, length) in enumerate(runs):
            if length < base_side * base_side:
                return None
            tiles = None if sizes is None else self.unpadded_grid(sizes[media_index])
            image = anyres_grids(row, start, length, media_index, base_side, tiles)
            if image is None:
                return None
            grids += image
        return grids

    def media_grids(
        self, input_ids: Tensor, vision: Mapping[str, Any], side: int, end_tokens: int = 0
    ) -> tuple[VisualGrid, ...]:
        """The grids of images, then a grid per frame of videos; empty if the numbers of tokens do not match.

        Args:
            side: height and width of the grid of a frame.
            end_tokens: newline tokens after the last frame of each video.
        """
        grids = self.image_grids(input_ids, vision)
        runs = self.placeholder_runs(input_ids, self.model.config.video_token_id)
        spans = clip_spans(runs, vision.get("pixel_values_videos"), side * side, end_tokens)
        if grids is None or spans is None:
            return ()
        num_images = 1 + max((grid.media_index for grid in grids), default=-1)
        for index, (row, start, num_frames) in enumerate(spans, num_images):
            for frame in range(num_frames):
                grids.append(VisualGrid(row, start, side, side, index, role="frame", frame=frame))
                start += side * side
            if end_tokens:
                grids.append(VisualGrid(row, start, 1, end_tokens, index, role="newline", frame=num_frames - 1))
        return tuple(grids)

    def unpadded_grid(self, size: Any) -> GridSize:
        """Size of the tile grid of an image of `size` (height, width) pixels, by transformers' own arithmetic."""
        from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape, unpad_image

        config = self.model.config
        tile_size = config.vision_config.image_size
        tile_side = tile_size // config.vision_config.patch_size
        rows, columns = get_anyres_image_grid_shape(size, config.image_grid_pinpoints, tile_size)
        padded = torch.empty(1, rows * tile_side, columns * tile_side, device="meta")
        _, height, width = unpad_image(padded, size).shape
        return height, width
