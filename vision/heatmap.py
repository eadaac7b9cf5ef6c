"""Pictures of what a drafter was shown: tokens that were kept, marked on the image, and scores laid over it.

Takes images, grids and numbers; knows no model, no compressor and no call. What `mmspec.stats` says of a call
(`mmspec.metrics.compression_stats.Shown`) fits: `heatmaps(images, shown.grids, kept=shown.numbers)`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from PIL import Image

from mmspec.interfaces import VisualGrid

CELL = 14
"""Pixels of one token's square, at least."""
SIDE = 320
"""Pixels of a picture's longer side, about."""
MARK = (47, 158, 82)
"""Colour of the line around a token that was seen, where the others are faded."""
COVER = 0.6
"""How much of the picture the colours of scores cover."""
GAP = 6
"""Pixels between the pictures of a strip."""
CHROMA = 0.085
"""How vivid the colours of scores are: as much as a screen can show of all of them."""

Numbers = Collection[int] | np.ndarray
Scores = Sequence[float] | np.ndarray


def heatmap(
    image: Image.Image,
    grid: tuple[int, int],
    *,
    kept: Numbers | None = None,
    scores: Scores | None = None,
    span: tuple[float, float] | None = None,
) -> Image.Image:
    """One image with the tokens of its grid on it.

    Without scores, the tokens that were not kept are faded. With scores, their colours (dark blue is low, light yellow
    is high) are laid over the image in grey, and kept tokens have a frame, white within black.

    Args:
        grid: (lines, columns) of tokens.
        kept: numbers of the tokens that were kept, line by line from 0, or [lines, columns] bool.
        scores: a number per token, line by line or [lines, columns].
        span: the scores that are darkest and lightest; those of the image's own if None.

    Raises:
        ValueError: neither kept nor scores, or some that do not fit the grid.
    """
    if grid[0] < 1 or grid[1] < 1:
        raise ValueError(f"a grid has at least one line and one column; got {tuple(grid)}.")
    if kept is None and scores is None:
        raise ValueError("there is nothing to draw: give kept=, scores=, or both.")
    cells = None if kept is None else _cells(kept, grid)
    if scores is None:
        assert cells is not None
        return _faded(image, cells)
    return _coloured(image, _values(scores, grid), cells, span)


def heatmaps(
    images: Sequence[Image.Image],
    grids: Sequence[VisualGrid],
    *,
    kept: Collection[int] | None = None,
    scores: Scores | None = None,
    row: int | None = None,
    cropped: bool = False,
) -> list[Image.Image]:
    """The same for all pictures and frames of a prompt, one each, in their order.

    Args:
        images: of the call; of a row with clips, their frames, one clip after the other. grids: how the visual tokens
            lie (`Shown.grids`, `Prompt.segments`). Only whole pictures are drawn, not their tiles, and frames alone in
            a row with clips.
        kept, scores: as in `heatmap`, counted over all visual tokens of the prompt, which follow each other as their
            grids do (tokens that end a line count). row: of the batch; that of the first grid if None.
        cropped: the processor shows the model the middle square only.

    Raises:
        ValueError: as in `heatmap`.
    """
    mine = sorted(grids, key=lambda one: (one.row, one.start))
    mine = [one for one in mine if one.row == (mine[0].row if row is None else row)]
    total = sum(one.num_tokens for one in mine)
    values = None if scores is None else _values(scores, (1, total))[0]
    seen = None if kept is None else frozenset(_checked(kept, total))
    clip = any(segment.role == "frame" for segment in mine)
    drawn: list[tuple[VisualGrid, int]] = []
    start = 0
    for segment in mine:
        # The number of a picture is one of the images; that of a clip, which counts on over the batch, is none.
        if segment.role == ("frame" if clip else "base") and (0 if clip else segment.media_index) < len(images):
            drawn.append((segment, start))
        start += segment.num_tokens
    parts = [None if values is None else values[_places(*one)] for one in drawn]
    span = _span(np.concatenate([part.ravel() for part in parts if part is not None])) if values is not None else None
    made = []
    for step, ((segment, start), part) in enumerate(zip(drawn, parts, strict=True)):
        image = images[_frame(step, len(drawn), len(images)) if clip else segment.media_index]
        cells = None if seen is None else cells_of(segment, start, seen)
        shape = (segment.height, segment.width)
        made.append(heatmap(square(image) if cropped else image, shape, kept=cells, scores=part, span=span))
    return made


def strip(pictures: Sequence[Image.Image], columns: int | None = None) -> Image.Image:
    """Several pictures as one, in lines of so many (all in one line if None), on white.

    Raises:
        ValueError: no pictures, or no columns.
    """
    if not pictures:
        raise ValueError("a strip is made of at least one picture; got none.")
    columns = len(pictures) if columns is None else columns
    if columns < 1:
        raise ValueError(f"a strip has at least one column; got {columns}.")
    lines = [pictures[at : at + columns] for at in range(0, len(pictures), columns)]
    heights = [max(one.height for one in line) for line in lines]
    width = max(sum(one.width + GAP for one in line) for line in lines) - GAP
    made = Image.new("RGB", (width, sum(heights) + GAP * (len(lines) - 1)), "white")
    top = 0
    for line, height in zip(lines, heights, strict=True):
        left = 0
        for one in line:
            made.paste(one, (left, top))
            left += one.width + GAP
        top += height + GAP
    return made


def cells_of(segment: VisualGrid, start: int, kept: Collection[int]) -> np.ndarray:
    """[height, width] bool, which cells of a grid were kept. start: number of its first token."""
    return np.isin(_places(segment, start), np.fromiter(kept, dtype=np.int64, count=len(kept)))


def square(image: Image.Image) -> Image.Image:
    """The middle square of an image."""
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))


def colours(shares: np.ndarray) -> np.ndarray:
    """[..., 3] float colours (0 to 255) of shares from 0 to 1: equal steps look equal, and lighter is always more.

    A path through Oklab (Ottosson, 2020) whose lightness grows evenly, from dark blue through green to light yellow.
    """
    lightness = 0.28 + 0.67 * shares
    hue = np.radians(285 - 180 * shares)
    a, b = CHROMA * np.cos(hue), CHROMA * np.sin(hue)
    cones = np.stack(
        [
            lightness + 0.3963377774 * a + 0.2158037573 * b,
            lightness - 0.1055613458 * a - 0.0638541728 * b,
            lightness - 0.0894841775 * a - 1.2914855480 * b,
        ],
        axis=-1,
    )
    to_rgb = np.array(
        [
            [4.0767416621, -3.3077115913, 0.2309699292],
            [-1.2684380046, 2.6097574011, -0.3413193965],
            [-0.0041960863, -0.7034186147, 1.7076147010],
        ]
    )
    linear = (cones**3 @ to_rgb.T).clip(0, 1)
    return 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


# --- parts ------------------------------------------------------------------------------------------------------------


def _frame(step: int, steps: int, frames: int) -> int:
    """The first frame that a step of a clip covers: a model may read them in pairs, an odd last one with itself."""
    return min(step * (frames + frames % 2) // steps, frames - 1)


def _places(segment: VisualGrid, start: int) -> np.ndarray:
    """[height, width] numbers of a grid's tokens; those that end a line are left out."""
    line = segment.width + int(segment.has_newlines)
    return start + line * np.arange(segment.height)[:, None] + np.arange(segment.width)


def _cells(kept: Numbers, grid: tuple[int, int]) -> np.ndarray:
    """[lines, columns] bool."""
    if isinstance(kept, np.ndarray) and kept.dtype == np.bool_:
        if kept.shape != tuple(grid):
            raise ValueError(f"kept must be {list(grid)}, as the grid is; got {list(kept.shape)}.")
        return kept
    cells = np.zeros(grid[0] * grid[1], dtype=bool)
    cells[_checked(kept, len(cells))] = True
    return cells.reshape(grid)


def _checked(kept: Numbers, total: int) -> list[int]:
    numbers = [int(number) for number in kept]
    wrong = next((number for number in numbers if not 0 <= number < total), None)
    if wrong is not None:
        raise ValueError(f"the numbers of kept tokens go from 0 to {total - 1}; got {wrong}.")
    return numbers


def _values(scores: Scores, grid: tuple[int, int]) -> np.ndarray:
    """[lines, columns] float64."""
    values = np.asarray(scores, dtype=np.float64)
    if values.size != grid[0] * grid[1]:
        raise ValueError(f"there is one score per token, {grid[0] * grid[1]} of them; got {list(values.shape)}.")
    if not np.isfinite(values).all():
        raise ValueError(f"scores must be finite; got {values[~np.isfinite(values)][0]}.")
    return values.reshape(grid)


def _span(values: np.ndarray) -> tuple[float, float] | None:
    return (float(values.min()), float(values.max())) if values.size else None


def _enlarged(image: Image.Image, grid: tuple[int, int]) -> tuple[np.ndarray, int]:
    """The image in float32 with the cells of its grid as squares, and their side."""
    cell = max(CELL, SIDE // max(grid))
    size = (grid[1] * cell, grid[0] * cell)
    return np.asarray(image.convert("RGB").resize(size), dtype=np.float32), cell


def _spread(cells: np.ndarray, cell: int) -> np.ndarray:
    """Of cells, of pixels."""
    return cells.repeat(cell, 0).repeat(cell, 1)


def _faded(image: Image.Image, seen: np.ndarray) -> Image.Image:
    """The picture with the cells that were not seen faded, and a thin line around those that were."""
    small, cell = _enlarged(image, seen.shape)
    mask = _spread(seen, cell)
    grey = 0.25 * small.mean(2, keepdims=True) + 150
    drawn = np.where(mask[..., None], small, grey)
    edge = (np.arange(drawn.shape[0])[:, None] % cell == 0) | (np.arange(drawn.shape[1])[None] % cell == 0)
    drawn[edge & mask] = MARK
    return _picture(drawn)


def _coloured(
    image: Image.Image, values: np.ndarray, kept: np.ndarray | None, span: tuple[float, float] | None
) -> Image.Image:
    """The picture in grey under the colours of its scores, kept cells framed, white within black."""
    small, cell = _enlarged(image, values.shape)
    low, high = span or (float(values.min()), float(values.max()))
    shares = ((values - low) / (high - low or 1.0)).clip(0, 1)
    drawn = COVER * _spread(colours(shares), cell) + (1 - COVER) * small.mean(2, keepdims=True)
    if kept is not None:
        mask = _spread(kept, cell)
        within = np.minimum(*np.meshgrid(*(_inset(size, cell) for size in drawn.shape[1::-1])))
        drawn[mask & (within == 0)] = 0
        drawn[mask & (within == 1)] = 255
    return _picture(drawn)


def _inset(size: int, cell: int) -> np.ndarray:
    """Of each pixel of a side, how far it is from the nearer end of its cell."""
    place = np.arange(size) % cell
    return np.minimum(place, cell - 1 - place)


def _picture(drawn: np.ndarray) -> Image.Image:
    return Image.fromarray(drawn.clip(0, 255).astype(np.uint8))


__all__ = ["cells_of", "colours", "heatmap", "heatmaps", "square", "strip"]
