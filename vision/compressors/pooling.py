"""Compressors that merge neighbours: means over windows of the grid, and a learned depthwise convolution.

Frames of a clip are merged over time as well, and pictures that follow each other where there are more of them than
tokens to keep. Ragged edges are means of what is there. Where the target's family cannot say how its tokens lie (no
segments), a row counts as a single line. A merged token stands at the mean position of its members, rounded.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor, nn

from mmspec.engine.gather import scatter_sum
from mmspec.interfaces import VisualGrid, VisualTokens

logger = logging.getLogger("mmspec")


@dataclass(frozen=True)
class Window:
    """So many frames, lines and columns become one token."""

    frames: int
    lines: int
    columns: int


@dataclass(frozen=True)
class Block:
    """Visual tokens that lie together: `times` grids of height x width of one row, from `start` on.

    Attributes:
        width: newline tokens counted.
    """

    row: int
    start: int
    times: int
    height: int
    width: int

    def cells(self, window: Window) -> int:
        """Tokens that are left."""
        sizes = (self.times, window.frames), (self.height, window.lines), (self.width, window.columns)
        return math.prod(math.ceil(size / step) for size, step in sizes)


def blocks_of(segments: Sequence[VisualGrid], counts: Sequence[int]) -> list[Block]:
    """Grids of the same size that follow each other in one clip are one block.

    A row without segments, or whose segments do not come to its number of tokens (`counts`), is one line.
    """
    found = []

    def same(one: VisualGrid) -> tuple[int, ...]:
        clip = one.role == "frame"
        return (one.media_index if clip else -1 - one.start, one.height, one.width + int(one.has_newlines))

    for row, count in enumerate(counts):
        mine = sorted((one for one in segments if one.row == row), key=lambda one: one.start)
        held = sum(one.num_tokens for one in mine)
        if mine and held != count:
            logger.warning(
                "mmspec: the grids of row %d hold %d tokens, it has %d: they count as a line", row, held, count
            )
        if held != count:
            found.append(Block(row, 0, 1, 1, count))
            continue
        for (_, height, width), group in groupby(mine, key=same):
            frames = list(group)
            found.append(Block(row, frames[0].start, len(frames), height, width))
    return found


def window_for(blocks: Sequence[Block], budget: int) -> Window:
    """The window that leaves the most tokens of one row's blocks, of those that leave at most `budget`.

    Of n x n or n lines x (n + 1) columns, and frames as they go: 1 x 1, then two frames, then 1 x 2, 2 x 2, three
    frames, and so on. Where two leave as many tokens, the more square one; at the end each block is one token, and
    `cells_of` has to do the rest.
    """

    def left(step: int) -> int:
        window = _step(step)
        return sum(block.cells(window) for block in blocks)

    last = 3 * max((max(block.times, block.height, block.width) - 1 for block in blocks), default=0)
    # No step leaves more tokens than the one before.
    step = bisect_left(range(last), True, key=lambda one: left(one) <= budget)
    oblong = step % 3 == 2
    return _step(step + 1 if oblong and left(step + 1) == left(step) else step)


def _step(step: int) -> Window:
    """The windows by rising size, from 0."""
    side, more = divmod(step, 3)
    return Window(side + 1 + (more > 0), side + 1, side + 1 + (more == 2))


def windows_for(blocks: Sequence[Block], budget: int, batch: int) -> list[Window]:
    """Of each row its own, so that it does not hang on its neighbours."""
    rows: list[list[Block]] = [[] for _ in range(batch)]
    for block in blocks:
        rows[block.row].append(block)
    return [window_for(row, budget) for row in rows]


def cells_of(blocks: Sequence[Block], windows: Sequence[Window], budget: int, count: int) -> tuple[Tensor, list[int]]:
    """[B, M] int64, which merged token of its row each token belongs to, and how many each row has. -1: none.

    A row of which its window leaves more than `budget` tokens has neighbours merged, as evenly as can be.
    """
    cells, made = torch.full((len(windows), count), -1), [0] * len(windows)
    for block in blocks:
        window = windows[block.row]
        cell = _cells(block.times, block.height, block.width, window)
        cells[block.row, block.start : block.start + len(cell)] = made[block.row] + cell
        made[block.row] += block.cells(window)
    for row, many in enumerate(made):
        if many > budget:
            cells[row] = torch.where(cells[row] < 0, -1, cells[row] * budget // many)
            made[row] = budget
    return cells, made


@lru_cache(maxsize=64)
def layout(blocks: tuple[Block, ...], budget: int, batch: int, count: int) -> tuple[list[Window], Tensor, list[int]]:
    """What `windows_for` and `cells_of` say. Kept, since clips of one length lie alike: not to be written to."""
    windows = windows_for(blocks, budget, batch)
    return windows, *cells_of(blocks, windows, budget, count)


@lru_cache(maxsize=64)
def _cells(times: int, height: int, width: int, window: Window) -> Tensor:
    """[times * height * width] int64, the cell of each token of a block. Shared: not to be written to."""
    t, y, x = torch.meshgrid(
        torch.arange(times) // window.frames,
        torch.arange(height) // window.lines,
        torch.arange(width) // window.columns,
        indexing="ij",
    )
    down, across = math.ceil(height / window.lines), math.ceil(width / window.columns)
    return ((t * down + y) * across + x).flatten()


def merged(visual: VisualTokens, cells: Tensor, made: Sequence[int], weights: Tensor | None = None) -> VisualTokens:
    """Sums over cells, divided by how much there was to sum.

    Args:
        cells: [B, M] of `cells_of`. weights: [B, M, D] of each token in its sum; 1 if None.
    """
    batch, kept = len(made), max(made, default=0)
    cells = cells.to(visual.mask.device)
    place = torch.where((cells >= 0) & visual.mask, cells, kept)

    def total(part: Tensor) -> Tensor:
        return scatter_sum(part, place, kept + 1)[:, :kept]

    sizes = total(visual.mask[..., None].float())
    members = sizes.clamp(min=1)
    positions = visual.position_ids.float()
    axes = positions if positions.dim() == 3 else positions[None]
    spots = torch.stack([(total(axis[..., None]) / members)[..., 0] for axis in axes]).round().long()

    def shrunk(part: Tensor) -> Tensor:
        if weights is None:
            return total(part) / members.to(part.dtype)
        return total(part * weights.to(part.dtype))

    # A mean of one is that token; with weights it is not.
    numbers = torch.arange(place.shape[1], device=place.device).expand(place.shape)
    alone = place.new_full((batch, kept + 1), -1).scatter(1, place, numbers)[:, :kept]
    return VisualTokens(
        inputs_embeds=shrunk(visual.inputs_embeds),
        hidden_states=shrunk(visual.hidden_states),
        mask=torch.arange(kept, device=place.device) < torch.tensor(made, device=place.device)[:, None],
        position_ids=spots if positions.dim() == 3 else spots[0],
        source_indices=None if weights is not None else torch.where(sizes[..., 0] == 1, alone, -1),
    )


@dataclass(frozen=True)
class Pool:
    """Means over windows of the grid, of each row as large as the budget asks."""

    max_tokens: int
    name: str = "pool"

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        """At most `budget` tokens of each row."""
        blocks = blocks_of(visual_tokens.grids, visual_tokens.mask.sum(1).tolist())
        _, cells, made = layout(tuple(blocks), max_tokens, *visual_tokens.mask.shape)
        return merged(visual_tokens, cells, made)


class Conv(nn.Module):
    """A depthwise convolution whose stride is its size, after the mean over time. It begins as the mean.

    The kernel is learned at one size and stretched to the window that the budget asks, so any grid is served.
    """

    name = "conv"
    SIZE = 4

    def __init__(self, hidden_size: int, tokens: int) -> None:
        """
        Raises:
            ValueError: fewer than one token.
        """
        super().__init__()
        if tokens < 1:
            raise ValueError(f"a convolution keeps at least 1 token; got {tokens}.")
        self.hidden_size, self.max_tokens = hidden_size, tokens
        self.kernel = nn.Parameter(torch.ones(hidden_size, self.SIZE, self.SIZE))

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        """As `Pool`, every member weighted by where in its window it lies."""
        blocks = blocks_of(visual_tokens.grids, visual_tokens.mask.sum(1).tolist())
        windows, cells, made = layout(tuple(blocks), max_tokens, *visual_tokens.mask.shape)
        return merged(visual_tokens, cells, made, self._weights(blocks, windows, cells))

    def _weights(self, blocks: Sequence[Block], windows: Sequence[Window], cells: Tensor) -> Tensor:
        batch, count = cells.shape
        spot = torch.zeros(batch, count, dtype=torch.long)
        for block in blocks:
            window = windows[block.row]
            _, y, x = torch.meshgrid(
                *(torch.arange(n) for n in (block.times, block.height, block.width)), indexing="ij"
            )
            y = (y % window.lines) * self.SIZE // window.lines
            x = (x % window.columns) * self.SIZE // window.columns
            spot[block.row, block.start : block.start + y.numel()] = (y * self.SIZE + x).flatten()
        weights = self.kernel.flatten(1).t()[spot.to(self.kernel.device)]
        ones = torch.zeros(batch, max(1, int(cells.max()) + 2) if count else 1)
        place = torch.where(cells >= 0, cells, ones.shape[1] - 1)
        members = ones.scatter_add(1, place, torch.ones_like(place, dtype=ones.dtype)).gather(1, place)
        return weights / members[..., None].to(weights.device)


__all__ = ["Block", "Conv", "Pool", "Window", "blocks_of", "cells_of", "merged", "window_for", "windows_for"]
