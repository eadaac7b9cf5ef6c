"""Draw which visual tokens a drafter reads: kept tokens are marked on the image.

Takes images, grids and numbers, and depends on no model or compressor. The records of `mmspec.stats`
(`mmspec.metrics.compression_stats.CompressionRecord`) fit:
`heatmaps(images, record.grids, kept_indices=record.kept_indices)`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from PIL import Image

from mmspec.interfaces import VisualGrid

MIN_CELL_PX = 14
"""Minimum side of one token's square, in pixels."""
TARGET_SIDE_PX = 320
"""Approximate longer side of a drawn image, in pixels."""
KEPT_EDGE_COLOR = (47, 158, 82)
"""RGB of the line around kept tokens, where the others are faded."""
STRIP_GAP_PX = 6
"""Pixels between the images of a strip."""
TokenIndices = Collection[int] | np.ndarray


def heatmap(image: Image.Image, grid: tuple[int, int], *, kept_indices: TokenIndices) -> Image.Image:
    """Draw the tokens of one grid on its image, those that are not kept faded.

    Args:
        image: The image that the grid covers.
        grid: (height, width) in tokens.
        kept_indices: Indices of the kept tokens in row-major order from 0, or a [height, width] bool mask, as NumPy
            indexing accepts both.

    Raises:
        ValueError: `kept_indices` does not fit the grid.
    """
    if grid[0] < 1 or grid[1] < 1:
        raise ValueError(f"a grid needs at least one row and one column; got {tuple(grid)}.")
    return _draw_faded(image, _keep_mask(kept_indices, grid))


def heatmaps(
    images: Sequence[Image.Image],
    grids: Sequence[VisualGrid],
    *,
    kept_indices: Collection[int],
    row: int | None = None,
    cropped: bool = False,
) -> list[Image.Image]:
    """`heatmap` for every image, or every frame, of one prompt, in order.

    Args:
        images: Images of the call; for a row with videos, the frames of its videos, concatenated.
        grids: Grids of the visual tokens (`CompressionRecord.grids`, `Prompt.grids`). Only base images are drawn, not
            their tiles; in a row with videos only frames.
        kept_indices: Indices of kept tokens over all visual tokens of the prompt, in the order of the grids, newline
            tokens counted.
        row: Batch row; that of the first grid if None.
        cropped: Draw the centre square, for processors that centre-crop.

    Raises:
        ValueError: As `heatmap`.
    """
    row_grids = sorted(grids, key=lambda grid: (grid.row, grid.start))
    row_grids = [grid for grid in row_grids if grid.row == (row_grids[0].row if row is None else row)]
    total = sum(grid.num_tokens for grid in row_grids)
    keep = frozenset(_check_indices(kept_indices, total))
    has_video = any(grid.role == "frame" for grid in row_grids)
    drawn: list[tuple[VisualGrid, int]] = []
    start = 0
    for grid in row_grids:
        # `media_index` of an image indexes `images`; that of a video counts over the batch and does not.
        if grid.role == ("frame" if has_video else "base") and (0 if has_video else grid.media_index) < len(images):
            drawn.append((grid, start))
        start += grid.num_tokens
    pictures = []
    for step, (grid, start) in enumerate(drawn):
        image = images[_frame_index(step, len(drawn), len(images)) if has_video else grid.media_index]
        image = center_square(image) if cropped else image
        pictures.append(heatmap(image, (grid.height, grid.width), kept_indices=kept_cells(grid, start, keep)))
    return pictures


def strip(pictures: Sequence[Image.Image], columns: int | None = None) -> Image.Image:
    """Tile images on a white background, `columns` per line (all on one line if None).

    Raises:
        ValueError: `pictures` is empty, or `columns` below 1.
    """
    if not pictures:
        raise ValueError("a strip needs at least one image; got none.")
    columns = len(pictures) if columns is None else columns
    if columns < 1:
        raise ValueError(f"a strip needs at least one column; got {columns}.")
    lines = [pictures[i : i + columns] for i in range(0, len(pictures), columns)]
    heights = [max(picture.height for picture in line) for line in lines]
    width = max(sum(picture.width + STRIP_GAP_PX for picture in line) for line in lines) - STRIP_GAP_PX
    canvas = Image.new("RGB", (width, sum(heights) + STRIP_GAP_PX * (len(lines) - 1)), "white")
    top = 0
    for line, height in zip(lines, heights, strict=True):
        left = 0
        for picture in line:
            canvas.paste(picture, (left, top))
            left += picture.width + STRIP_GAP_PX
        top += height + STRIP_GAP_PX
    return canvas


def kept_cells(grid: VisualGrid, start: int, kept_indices: Collection[int]) -> np.ndarray:
    """[height, width] bool, True for kept cells of a grid whose first token has index `start`."""
    return np.isin(_token_indices(grid, start), np.fromiter(kept_indices, dtype=np.int64, count=len(kept_indices)))


def center_square(image: Image.Image) -> Image.Image:
    """The largest centred square of an image."""
    side = min(image.size)
    left = (image.width - side) // 2
    top = (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))


# --- private helpers --------------------------------------------------------------------------------------------------


def _frame_index(step: int, num_steps: int, num_frames: int) -> int:
    """The first frame of time step `step`: models may merge frames in pairs, an odd last one with itself."""
    return min(step * (num_frames + num_frames % 2) // num_steps, num_frames - 1)


def _token_indices(grid: VisualGrid, start: int) -> np.ndarray:
    """[height, width] int64 indices of a grid's tokens, newline tokens left out."""
    line = grid.width + int(grid.has_newlines)
    return start + line * np.arange(grid.height)[:, None] + np.arange(grid.width)


def _keep_mask(kept_indices: TokenIndices, grid: tuple[int, int]) -> np.ndarray:
    """[height, width] bool."""
    if isinstance(kept_indices, np.ndarray) and kept_indices.dtype == np.bool_:
        if kept_indices.shape != tuple(grid):
            shape = list(kept_indices.shape)
            raise ValueError(f"a mask of kept tokens must have the shape of the grid, {list(grid)}; got {shape}.")
        return kept_indices
    mask = np.zeros(grid[0] * grid[1], dtype=bool)
    mask[_check_indices(kept_indices, len(mask))] = True
    return mask.reshape(grid)


def _check_indices(kept_indices: TokenIndices, total: int) -> list[int]:
    indices = [int(index) for index in kept_indices]
    invalid = next((index for index in indices if not 0 <= index < total), None)
    if invalid is not None:
        raise ValueError(f"indices of kept tokens range from 0 to {total - 1}; got {invalid}.")
    return indices


def _resize_to_grid(image: Image.Image, grid: tuple[int, int]) -> tuple[np.ndarray, int]:
    """The image as float32 [height, width, 3], resized so that cells are squares, and the side of a cell in pixels."""
    cell = max(MIN_CELL_PX, TARGET_SIDE_PX // max(grid))
    size = (grid[1] * cell, grid[0] * cell)
    return np.asarray(image.convert("RGB").resize(size), dtype=np.float32), cell


def _cells_to_pixels(cells: np.ndarray, cell: int) -> np.ndarray:
    return cells.repeat(cell, 0).repeat(cell, 1)


def _draw_faded(image: Image.Image, keep_mask: np.ndarray) -> Image.Image:
    """Fade the cells outside the mask, and draw a thin line around those inside."""
    pixels, cell = _resize_to_grid(image, keep_mask.shape)
    mask = _cells_to_pixels(keep_mask, cell)
    grey = 0.25 * pixels.mean(2, keepdims=True) + 150
    drawn = np.where(mask[..., None], pixels, grey)
    edge = (np.arange(drawn.shape[0])[:, None] % cell == 0) | (np.arange(drawn.shape[1])[None] % cell == 0)
    drawn[edge & mask] = KEPT_EDGE_COLOR
    return _to_image(drawn)


def _to_image(drawn: np.ndarray) -> Image.Image:
    return Image.fromarray(drawn.clip(0, 255).astype(np.uint8))
