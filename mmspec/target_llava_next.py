"""LLaVA-NeXT (1.6): a base grid, then the tiles' grid with a newline token at the end of each line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mmspec.interfaces import Segment
from mmspec.target_hf import Family


def tiles(segments: list[Segment], row: int, start: int, base: int, length: int, source: int, size: Any) -> bool:
    """Add the segments of one any-resolution picture of `length` tokens. False if the numbers do not fit.

    Args:
        base: edge of the base grid. size: (height, width) of the original picture in pixels, or None.
    """
    segments.append(Segment(row, start, base, base, source))
    rest = length - base * base
    if rest == 0:
        return True
    if rest == 1:
        segments.append(Segment(row, start + base * base, 1, 1, source, role="newline"))
        return True
    # Unpadding keeps the picture's proportions: of all grids with a newline per line, the one that fits them best.
    wanted = float(size[0]) / float(size[1]) if size is not None else 1.0
    grids = [(height, rest // height - 1) for height in range(1, rest // 2 + 1) if rest % height == 0]
    if not grids:
        return False
    height, width = min(grids, key=lambda grid: abs(grid[0] / grid[1] - wanted))
    segments.append(Segment(row, start + base * base, height, width, source, role="tiles", newline=True))
    return True


class LlavaNext(Family):
    """`LlavaNextForConditionalGeneration`. Pictures of one row are told apart by text between them."""

    model_type = "llava_next"
    vision_args: tuple[str, ...] = ("image_sizes",)

    def segments(self, input_ids: Tensor, vision: Mapping[str, Any]) -> tuple[Segment, ...]:
        """Base and tile grids; none if the placeholders cannot be told apart."""
        return tuple(self.pictures(input_ids, vision) or ())

    def pictures(self, input_ids: Tensor, vision: Mapping[str, Any]) -> list[Segment] | None:
        """The segments of all pictures, or None if the numbers do not fit."""
        config = self.model.config.vision_config
        base = config.image_size // config.patch_size
        sizes = vision.get("image_sizes")
        runs = self.runs(input_ids, self.model.config.image_token_id)
        if sizes is not None and len(sizes) != len(runs):
            return None
        found: list[Segment] = []
        for source, (row, start, length) in enumerate(runs):
            size = None if sizes is None else sizes[source]
            if length < base * base or not tiles(found, row, start, base, length, source, size):
                return None
        return found
