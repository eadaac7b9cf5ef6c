"""Draw which visual tokens a drafter reads: kept tokens marked on the image, or scores as a colour overlay.

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
OVERLAY_ALPHA = 0.6
"""Opacity of the score colours over the image."""
STRIP_GAP_PX = 6
"""Pixels between the images of a strip."""
CHROMA = 0.085
"""Oklab chroma of the score colours: the largest that sRGB can represent over the whole colormap."""

TokenIndices = Collection[int] | np.ndarray
TokenScores = Sequence[float] | np.ndarray


def heatmap(
    image: Image.Image,
    grid: tuple[int, int],
    *,
    kept_indices: TokenIndices | None = None,
    scores: TokenScores | None = None,
    span: tuple[float, float] | None = None,
) -> Image.Image:
    """Draw the tokens of one grid on its image.

    With `kept_indices` alone, the other tokens are faded. With `scores`, the image is grey under the score colours
    (dark blue is low, light yellow is high), and kept tokens have a white frame within a black one.

    Args:
        image: The image that the grid covers.
        grid: (height, width) in tokens.
        kept_indices: Indices of the kept tokens in row-major order from 0, or a [height, width] bool mask, as NumPy
            indexing accepts both.
        scores: One finite number per token, row-major or [height, width].
        span: (lowest, highest) score of the colormap; the range of `scores` if None.

    Raises:
        ValueError: Both `kept_indices` and `scores` are None, or one does not fit the grid.
    """
    if grid[0] < 1 or grid[1] < 1:
        raise ValueError(f"a grid needs at least one row and one column; got {tuple(grid)}.")
    if kept_indices is None and scores is None:
        raise ValueError("heatmap needs kept_indices=, scores=, or both; got neither.")
    keep_mask = None if kept_indices is None else _keep_mask(kept_indices, grid)
    if scores is None:
        assert keep_mask is not None
        return _draw_faded(image, keep_mask)
    return _draw_scores(image, _score_grid(scores, grid), keep_mask, span)


def heatmaps(
    images: Sequence[Image.Image],
    grids: Sequence[VisualGrid],
    *,
    kept_indices: Collection[int] | None = None,
    scores: TokenScores | None = None,
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
        scores: One number for each visual token of the prompt, counted likewise. All images share one colour range.
        row: Batch row; that of the first grid if None.
        cropped: Draw the centre square, for processors that centre-crop.

    Raises:
        ValueError: As `heatmap`.
    """
    row_grids = sorted(grids, key=lambda grid: (grid.row, grid.start))
    row_grids = [grid for grid in row_grids if grid.row == (row_grids[0].row if row is None else row)]
    total = sum(grid.num_tokens for grid in row_grids)
    values = None if scores is None else _score_grid(scores, (1, total))[0]
    keep = None if kept_indices is None else frozenset(_check_indices(kept_indices, total))
    has_video = any(grid.role == "frame" for grid in row_grids)
    drawn: list[tuple[VisualGrid, int]] = []
    start = 0
    for grid in row_grids:
        # `media_index` of an image indexes `images`; that of a video counts over the batch and does not.
        if grid.role == ("frame" if has_video else "base") and (0 if has_video else grid.media_index) < len(images):
            drawn.append((grid, start))
        start += grid.num_tokens
    parts = [None if values is None else values[_token_indices(*entry)] for entry in drawn]
    span = None
    if values is not None:
        span = _score_range(np.concatenate([part.ravel() for part in parts if part is not None]))
    pictures = []
    for step, ((grid, start), part) in enumerate(zip(drawn, parts, strict=True)):
        image = images[_frame_index(step, len(drawn), len(images)) if has_video else grid.media_index]
        mask = None if keep is None else kept_cells(grid, start, keep)
        image = center_square(image) if cropped else image
        pictures.append(heatmap(image, (grid.height, grid.width), kept_indices=mask, scores=part, span=span))
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


def colormap(values: np.ndarray) -> np.ndarray:
    """[..., 3] float sRGB (0 to 255) of values in 0..1, perceptually uniform with rising lightness.

    A path through Oklab (Ottosson, 2020) from dark blue through green to light yellow.
    """
    lightness = 0.28 + 0.67 * values
    hue = np.radians(285 - 180 * values)
    a = CHROMA * np.cos(hue)
    b = CHROMA * np.sin(hue)
    cones = np.stack(
        [
            lightness + 0.3963377774 * a + 0.2158037573 * b,
            lightness - 0.1055613458 * a - 0.0638541728 * b,
            lightness - 0.0894841775 * a - 1.2914855480 * b,
        ],
        axis=-1,
    )
    lms_to_rgb = np.array(
        [
            [4.0767416621, -3.3077115913, 0.2309699292],
            [-1.2684380046, 2.6097574011, -0.3413193965],
            [-0.0041960863, -0.7034186147, 1.7076147010],
        ]
    )
    linear = (cones**3 @ lms_to_rgb.T).clip(0, 1)
    return 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


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


def _score_grid(scores: TokenScores, grid: tuple[int, int]) -> np.ndarray:
    """[height, width] float64."""
    values = np.asarray(scores, dtype=np.float64)
    if values.size != grid[0] * grid[1]:
        raise ValueError(f"scores must have one value per token, {grid[0] * grid[1]}; got {list(values.shape)}.")
    if not np.isfinite(values).all():
        raise ValueError(f"scores must be finite; got {values[~np.isfinite(values)][0]}.")
    return values.reshape(grid)


def _score_range(values: np.ndarray) -> tuple[float, float] | None:
    return (float(values.min()), float(values.max())) if values.size else None


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


def _draw_scores(
    image: Image.Image, values: np.ndarray, keep_mask: np.ndarray | None, span: tuple[float, float] | None
) -> Image.Image:
    """Draw the score colours over the grey image, and frame the cells of the mask in white within black."""
    pixels, cell = _resize_to_grid(image, values.shape)
    low, high = span or (float(values.min()), float(values.max()))
    scaled = ((values - low) / (high - low or 1.0)).clip(0, 1)
    colors = _cells_to_pixels(colormap(scaled), cell)
    drawn = OVERLAY_ALPHA * colors + (1 - OVERLAY_ALPHA) * pixels.mean(2, keepdims=True)
    if keep_mask is not None:
        mask = _cells_to_pixels(keep_mask, cell)
        distance = np.minimum(*np.meshgrid(*(_distance_to_cell_edge(size, cell) for size in drawn.shape[1::-1])))
        drawn[mask & (distance == 0)] = 0
        drawn[mask & (distance == 1)] = 255
    return _to_image(drawn)


def _distance_to_cell_edge(size: int, cell: int) -> np.ndarray:
    """[size] distance of each pixel along one axis to the nearer edge of its cell."""
    offset = np.arange(size) % cell
    return np.minimum(offset, cell - 1 - offset)


def _to_image(drawn: np.ndarray) -> Image.Image:
    return Image.fromarray(drawn.clip(0, 255).astype(np.uint8))
