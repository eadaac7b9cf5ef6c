"""LLaVA-NeXT (1.6): a base grid, then the tiles' grid with a newline token at the end of each line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmspec.interfaces import VisualGrid
from mmspec.targets.base import ModelAdapter
from mmspec.targets.vision_attention import AttentionCapture, capture_attention

Grid = tuple[int, int]


def anyres_grids(
    segments: list[VisualGrid], row: int, start: int, base: int, length: int, source: int, grid: Grid | None
) -> bool:
    """Add the segments of one any-resolution picture of `length` tokens. False if the numbers do not fit.

    Args:
        base: edge of the base grid. grid: (height, width) of the tiles without their padding, if known.
    """
    segments.append(VisualGrid(row, start, base, base, source))
    rest = length - base * base
    if rest == 0:
        return True
    if rest == 1:
        segments.append(VisualGrid(row, start + base * base, 1, 1, source, role="newline"))
        return True
    if grid is None or grid[0] * (grid[1] + 1) != rest:
        # Made smaller (OneVision), or of unknown size: of all grids with a newline per line, the one most like it.
        wanted = grid[0] / grid[1] if grid is not None else 1.0
        grids = [(height, rest // height - 1) for height in range(1, rest // 2 + 1) if rest % height == 0]
        if not grids:
            return False
        grid = min(grids, key=lambda one: abs(one[0] / one[1] - wanted))
    height, width = grid
    segments.append(VisualGrid(row, start + base * base, height, width, source, role="tiles", has_newlines=True))
    return True


def clip_spans(
    runs: Sequence[tuple[int, int, int]], pixels: Any, frame: int, end: int = 0
) -> list[tuple[int, int, int]] | None:
    """(row, start, frames) of each clip, or None if the numbers do not fit.

    Clips may stand side by side if their pixels are known; without them each run is one clip.

    Args:
        runs: (row, start, length) of the runs of placeholders. pixels: [clips, frames, 3, height, width] or None.
        frame: tokens of a frame. end: tokens that follow the last frame of a clip.
    """
    known = isinstance(pixels, Tensor) and pixels.dim() == 5
    found: list[tuple[int, int, int]] = []
    for row, start, length in runs:
        frames = int(pixels.shape[1]) if known else (length - end) // max(1, frame)
        each = frames * frame + end
        if frames < 1 or frame < 1 or length % each or not (known or length == each):
            return None
        found += [(row, begin, frames) for begin in range(start, start + length, each)]
    return None if known and len(found) != pixels.shape[0] else found


def frame_grids(row: int, start: int, frames: int, side: int, source: int) -> list[VisualGrid]:
    """The square grids of a clip's frames, which follow each other without a gap."""
    return [VisualGrid(row, start + t * side * side, side, side, source, role="frame", frame=t) for t in range(frames)]


class LlavaNextAdapter(ModelAdapter):
    """`LlavaNextForConditionalGeneration`. Pictures of one row are told apart by text between them."""

    model_type = "llava_next"
    vision_args: tuple[str, ...] = ("image_sizes",)
    packing_config_keys: tuple[str, ...] = ("vision_feature_select_strategy",)
    """What transformers' packing of features wants from the config."""

    def grids(self, input_ids: Tensor, vision: Mapping[str, Any]) -> tuple[VisualGrid, ...]:
        """Base and tile grids; none if the placeholders cannot be told apart."""
        return tuple(self.image_grids(input_ids, vision) or ())

    def image_grids(self, input_ids: Tensor, vision: Mapping[str, Any]) -> list[VisualGrid] | None:
        """The segments of all pictures, or None if the numbers do not fit."""
        config = self.model.config.vision_config
        base = config.image_size // config.patch_size
        sizes = vision.get("image_sizes")
        runs = self.placeholder_runs(input_ids, self.model.config.image_token_id)
        if sizes is not None and len(sizes) != len(runs):
            return None
        found: list[VisualGrid] = []
        for source, (row, start, length) in enumerate(runs):
            grid = None if sizes is None else self.unpadded_grid(sizes[source])
            if length < base * base or not anyres_grids(found, row, start, base, length, source, grid):
                return None
        return found

    def attention_capture(self) -> AttentionCapture | None:
        """As of LLaVA 1.5, tile by tile."""
        config = self.model.config
        first = config.vision_feature_select_strategy == "default"
        return capture_attention(self.model.model.vision_tower, config.vision_feature_layer, first)

    def token_saliency(self, shares: Tensor, vision: Mapping[str, Any]) -> Tensor | None:
        """Laid out by transformers' own packing of features; a newline token shows nothing: 0."""
        sizes = vision.get("image_sizes")
        if sizes is None:
            return None
        tiles = self.tiles_per_image(sizes, vision)
        if sum(tiles) != len(shares):
            return None
        packed, _ = self.model.model.pack_image_features(
            list(shares[..., None].split(tiles)),
            image_sizes=sizes,
            image_newline=shares.new_zeros(1),
            **{name: getattr(self.model.config, name) for name in self.packing_config_keys},
        )
        return torch.cat(list(packed)).flatten()

    def tiles_per_image(self, sizes: Any, vision: Mapping[str, Any]) -> list[int]:
        """How many tiles each picture is read as, the whole of it counted."""
        from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

        config = self.model.config
        edge = config.vision_config.image_size
        return [image_size_to_num_patches(size, config.image_grid_pinpoints, edge) for size in sizes]

    def unpadded_grid(self, size: Any) -> Grid:
        """(height, width) of the tiles' grid of a picture of `size` pixels, by transformers' own arithmetic."""
        from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape, unpad_image

        config = self.model.config
        edge, patch = config.vision_config.image_size, config.vision_config.patch_size
        high, wide = get_anyres_image_grid_shape(size, config.image_grid_pinpoints, edge)
        canvas = torch.empty(1, high * (edge // patch), wide * (edge // patch), device="meta")
        _, height, width = unpad_image(canvas, size).shape
        return height, width
