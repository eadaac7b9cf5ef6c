"""Compressors that merge neighbouring tokens: means over windows of the grid, and a learned depthwise convolution.

Windows also cover several frames of a video, and several images where there are more images than tokens. A window at
the edge of a grid averages the tokens it covers. If the model family does not report the grids, a row is treated as a
single line of tokens. A merged token gets the rounded mean of its members' position ids.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import ClassVar

import torch
from torch import Tensor, nn

from mmspec.engine.gather import scatter_sum
from mmspec.interfaces import VisualGrid, VisualTokens
from mmspec.vision.compressors.latent import TrainedCompressor

logger = logging.getLogger("mmspec")


@dataclass(frozen=True)
class Window:
    """Size of a pooling window: `frames` x `height` x `width` tokens become one."""

    frames: int
    height: int
    width: int


@dataclass(frozen=True)
class GridBlock:
    """Consecutive grids of equal size in one row: an image, or the frames of a video.

    Attributes:
        row: Batch row.
        start: Index of the first token in the row.
        num_frames: Number of grids.
        height: Lines of each grid.
        width: Tokens per line, newline token included.
    """

    row: int
    start: int
    num_frames: int
    height: int
    width: int

    def num_cells(self, window: Window) -> int:
        """Number of merged tokens under `window`."""
        sizes = (self.num_frames, window.frames), (self.height, window.height), (self.width, window.width)
        return math.prod(math.ceil(size / step) for size, step in sizes)


def group_grids(grids: Sequence[VisualGrid], counts: Sequence[int]) -> list[GridBlock]:
    """Group consecutive frames of the same video and size into blocks; each image is a block.

    Args:
        grids: Grids of all rows.
        counts: Number of visual tokens of each row. A row whose grids do not add up to it becomes one line.
    """
    blocks = []

    def block_key(grid: VisualGrid) -> tuple[int, ...]:
        is_frame = grid.role == "frame"
        return (grid.media_index if is_frame else -1 - grid.start, grid.height, grid.width + int(grid.has_newlines))

    for row, count in enumerate(counts):
        row_grids = sorted((grid for grid in grids if grid.row == row), key=lambda grid: grid.start)
        total = sum(grid.num_tokens for grid in row_grids)
        if row_grids and total != count:
            logger.warning(
                "mmspec: the grids of row %d have %d tokens, the row has %d; pooling treats it as one line",
                row,
                total,
                count,
            )
        if total != count:
            blocks.append(GridBlock(row, 0, 1, 1, count))
            continue
        for (_, height, width), group in groupby(row_grids, key=block_key):
            frames = list(group)
            blocks.append(GridBlock(row, frames[0].start, len(frames), height, width))
    return blocks


def choose_window(blocks: Sequence[GridBlock], max_tokens: int) -> Window:
    """The smallest window that leaves at most `max_tokens` tokens of one row's blocks.

    Windows are tried in rising order (frames, height, width): (1, 1, 1), (2, 1, 1), (2, 1, 2), (2, 2, 2), (3, 2, 2),
    and so on. Of two that leave equally many tokens the square one is chosen. If there are more blocks than
    `max_tokens`, each block becomes one token and `assign_cells` merges further.
    """

    def num_left(step: int) -> int:
        window = _window_at(step)
        return sum(block.num_cells(window) for block in blocks)

    last = 3 * max((max(block.num_frames, block.height, block.width) - 1 for block in blocks), default=0)
    # The number of tokens left does not rise with the step, so bisection applies.
    step = bisect_left(range(last), True, key=lambda i: num_left(i) <= max_tokens)
    is_oblong = step % 3 == 2
    return _window_at(step + 1 if is_oblong and num_left(step + 1) == num_left(step) else step)


def _window_at(step: int) -> Window:
    """The window number `step` in rising order of size, from 0."""
    side, remainder = divmod(step, 3)
    return Window(side + 1 + (remainder > 0), side + 1, side + 1 + (remainder == 2))


def assign_cells(
    blocks: Sequence[GridBlock], windows: Sequence[Window], max_tokens: int, count: int
) -> tuple[Tensor, list[int]]:
    """Assign every token to a cell (a merged token).

    Args:
        blocks: Blocks of all rows.
        windows: Window of each row.
        max_tokens: Limit per row; where the window leaves more, neighbouring cells are merged evenly.
        count: Length M of the token dimension.

    Returns:
        cells [B, M] int64, the cell of each token, -1 for none; and the number of cells of each row.
    """
    cells = torch.full((len(windows), count), -1)
    num_cells = [0] * len(windows)
    for block in blocks:
        window = windows[block.row]
        block_cells = _block_cells(block.num_frames, block.height, block.width, window)
        cells[block.row, block.start : block.start + len(block_cells)] = num_cells[block.row] + block_cells
        num_cells[block.row] += block.num_cells(window)
    for row, num in enumerate(num_cells):
        if num > max_tokens:
            cells[row] = torch.where(cells[row] < 0, -1, cells[row] * max_tokens // num)
            num_cells[row] = max_tokens
    return cells, num_cells


@lru_cache(maxsize=64)
def plan_pooling(
    blocks: tuple[GridBlock, ...], max_tokens: int, batch: int, count: int
) -> tuple[list[Window], Tensor, list[int]]:
    """The window of each row, and `assign_cells`. Cached, as prompts of one shape recur, and so read-only."""
    windows = [choose_window([one for one in blocks if one.row == row], max_tokens) for row in range(batch)]
    return windows, *assign_cells(blocks, windows, max_tokens, count)


@lru_cache(maxsize=64)
def _block_cells(num_frames: int, height: int, width: int, window: Window) -> Tensor:
    """[num_frames * height * width] int64, the cell of each token of a block. Read-only, since the cache shares it."""
    t, y, x = torch.meshgrid(
        torch.arange(num_frames) // window.frames,
        torch.arange(height) // window.height,
        torch.arange(width) // window.width,
        indexing="ij",
    )
    cell_rows = math.ceil(height / window.height)
    cell_columns = math.ceil(width / window.width)
    return ((t * cell_rows + y) * cell_columns + x).flatten()


def merge_cells(
    visual_tokens: VisualTokens, cells: Tensor, num_cells: Sequence[int], weights: Tensor | None = None
) -> VisualTokens:
    """Mean of each cell's tokens, each times its weight.

    Args:
        visual_tokens: M tokens per row.
        cells: [B, M] int64 from `assign_cells`.
        num_cells: Number of cells of each row.
        weights: [B, M, D]; 1 if None.
    """
    batch = len(num_cells)
    max_cells = max(num_cells, default=0)
    cells = cells.to(visual_tokens.mask.device)
    # Tokens of no cell are summed into an extra one, which is cut off.
    target = torch.where((cells >= 0) & visual_tokens.mask, cells, max_cells)

    def cell_sum(part: Tensor) -> Tensor:
        return scatter_sum(part, target, max_cells + 1)[:, :max_cells]

    sizes = cell_sum(visual_tokens.mask[..., None].float())
    divisor = sizes.clamp(min=1)
    positions = visual_tokens.position_ids.float()
    axes = positions if positions.dim() == 3 else positions[None]
    merged_positions = torch.stack([(cell_sum(axis[..., None]) / divisor)[..., 0] for axis in axes]).round().long()

    def merge(part: Tensor) -> Tensor:
        return cell_sum(part if weights is None else part * weights.to(part.dtype)) / divisor.to(part.dtype)

    # The mean of a single token is that token, unless it has a weight.
    indices = torch.arange(target.shape[1], device=target.device).expand(target.shape)
    member = target.new_full((batch, max_cells + 1), -1).scatter(1, target, indices)[:, :max_cells]
    return VisualTokens(
        inputs_embeds=merge(visual_tokens.inputs_embeds),
        hidden_states=merge(visual_tokens.hidden_states),
        mask=torch.arange(max_cells, device=target.device) < torch.tensor(num_cells, device=target.device)[:, None],
        position_ids=merged_positions if positions.dim() == 3 else merged_positions[0],
        source_indices=None if weights is not None else torch.where(sizes[..., 0] == 1, member, -1),
    )


@dataclass(frozen=True)
class Pool:
    """Average pooling over windows of the grid; the window is chosen per row from `max_tokens`."""

    max_tokens: int
    name: str = "pool"
    needs_grids: ClassVar[bool] = True

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        """Means over windows, at most `max_tokens` per row."""
        blocks = group_grids(visual_tokens.grids, visual_tokens.mask.sum(1).tolist())
        _, cells, num_cells = plan_pooling(tuple(blocks), max_tokens, *visual_tokens.mask.shape)
        return merge_cells(visual_tokens, cells, num_cells)


class Conv(TrainedCompressor):
    """Depthwise convolution with stride equal to its window, after the mean over frames (SpecVLM). Starts as the mean.

    The kernel has one trained size and is stretched (nearest neighbour) to the window, so it applies to any grid.
    """

    name = "conv"
    needs_grids = True
    KERNEL_SIZE = 4

    def __init__(self, hidden_size: int, max_tokens: int) -> None:
        """
        Raises:
            ValueError: `max_tokens` is below 1.
        """
        super().__init__(hidden_size, max_tokens)
        self.kernel = nn.Parameter(torch.ones(hidden_size, self.KERNEL_SIZE, self.KERNEL_SIZE))

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        """As `Pool`, each member weighted by its position in the window."""
        blocks = group_grids(visual_tokens.grids, visual_tokens.mask.sum(1).tolist())
        windows, cells, num_cells = plan_pooling(tuple(blocks), max_tokens, *visual_tokens.mask.shape)
        return merge_cells(visual_tokens, cells, num_cells, self._weights(blocks, windows, cells))

    def _weights(self, blocks: Sequence[GridBlock], windows: Sequence[Window], cells: Tensor) -> Tensor:
        """[B, M, D] kernel value of each token."""
        kernel_index = torch.zeros_like(cells)
        for block in blocks:
            window = windows[block.row]
            _, y, x = torch.meshgrid(
                *(torch.arange(size) for size in (block.num_frames, block.height, block.width)), indexing="ij"
            )
            y = (y % window.height) * self.KERNEL_SIZE // window.height
            x = (x % window.width) * self.KERNEL_SIZE // window.width
            kernel_index[block.row, block.start : block.start + y.numel()] = (y * self.KERNEL_SIZE + x).flatten()
        return self.kernel.flatten(1).t()[kernel_index.to(self.kernel.device)]
