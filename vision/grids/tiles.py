"""Square tiles of equal size: images that are encoded as tiles, with or without a downscaled whole image."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mmspec.interfaces import VisualGrid


def tokens_per_side(vision_config: Any, merge: float) -> tuple[int, int]:
    """(height, width) in tokens of one tile.

    Args:
        vision_config: with `image_size` and `patch_size`, both in pixels: one number, or (height, width).
        merge: number of patches per token and axis.
    """
    sizes, patches = (
        tuple(value) if isinstance(value, (list, tuple)) else (value, value)
        for value in (vision_config.image_size, vision_config.patch_size)
    )
    height, width = (int(size // patch // merge) for size, patch in zip(sizes, patches, strict=True))
    return height, width


def tile_grids(row: int, starts: list[int], size: tuple[int, int], media_index: int) -> Iterator[VisualGrid]:
    """The grids of one image: its tiles, the last of which is the whole image.

    Args:
        row: batch row.
        starts: index of the first token of each tile.
        size: (height, width) of a tile in tokens.
        media_index: index of the image in the batch.
    """
    for start in starts:
        yield VisualGrid(row, start, *size, media_index, role="base" if start == starts[-1] else "tiles")
