"""Heatmaps: marks are in the right cells, invalid input is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmspec.interfaces import VisualGrid
from research.heatmap import (
    KEPT_EDGE_COLOR,
    MIN_CELL_PX,
    STRIP_GAP_PX,
    TARGET_SIDE_PX,
    center_square,
    heatmap,
    heatmaps,
    kept_cells,
    strip,
)

GREEN = np.array(KEPT_EDGE_COLOR)


def solid_image(width: int = 40, height: int = 30, colour: tuple[int, int, int] = (200, 40, 40)) -> Image.Image:
    return Image.new("RGB", (width, height), colour)


def middles(drawn: Image.Image, grid: tuple[int, int]) -> np.ndarray:
    """[height, width, 3] colours at the centre of each cell."""
    pixels, cell = np.asarray(drawn).astype(int), drawn.height // grid[0]
    assert drawn.size == (grid[1] * cell, grid[0] * cell)
    result: np.ndarray = pixels[cell // 2 :: cell, cell // 2 :: cell]
    return result


def corners(drawn: Image.Image, grid: tuple[int, int]) -> np.ndarray:
    """[height, width, 3] colours at the upper left corner of each cell, where frames are drawn."""
    pixels, cell = np.asarray(drawn).astype(int), drawn.height // grid[0]
    result: np.ndarray = pixels[::cell, ::cell]
    return result


GRIDS: list[tuple[tuple[int, int], list[int]]] = [
    ((4, 4), [0, 5, 15]),
    ((3, 7), [2, 7, 20]),
    ((5, 2), [1, 8]),
    ((1, 9), [0, 8]),
    ((1, 1), [0]),
    ((1, 1), []),
    ((4, 4), []),
    ((24, 24), list(range(0, 576, 5))),
]


@pytest.mark.parametrize(("grid", "kept_indices"), GRIDS)
def test_kept_cells_are_outlined_and_others_faded(grid: tuple[int, int], kept_indices: list[int]) -> None:
    drawn = heatmap(solid_image(), grid, kept_indices=kept_indices)
    assert drawn.mode == "RGB" and max(drawn.size) == max(grid) * max(MIN_CELL_PX, TARGET_SIDE_PX // max(grid))
    expected = np.zeros(grid[0] * grid[1], dtype=bool)
    expected[kept_indices] = True
    expected = expected.reshape(grid)
    assert ((corners(drawn, grid) == GREEN).all(-1) == expected).all()
    inside = middles(drawn, grid)
    assert (inside[expected] == (200, 40, 40)).all()
    assert (np.ptp(inside[~expected], axis=-1) == 0).all() and (inside[~expected] > 150).all(), "grey and light"
    from_mask = heatmap(solid_image(), grid, kept_indices=expected)
    assert from_mask.tobytes() == drawn.tobytes(), "a mask equals indices"


@pytest.mark.parametrize(
    ("count", "times", "first"),
    [
        (8, 4, [0, 2, 4, 6]),  # Qwen2.5-VL reads two frames at a time
        (7, 4, [0, 2, 4, 6]),
        (2, 1, [0]),
        (5, 5, [0, 1, 2, 3, 4]),
        (1, 3, [0, 0, 0]),
        (0, 3, []),
    ],
)
def test_a_time_step_is_drawn_on_its_first_frame(count: int, times: int, first: list[int]) -> None:
    frames = [solid_image(20, 20, (30 * n, 0, 0)) for n in range(count)]
    grids = [VisualGrid(0, 4 * t, 2, 2, 0, role="frame", frame=t) for t in range(times)]
    drawn = heatmaps(frames, grids, kept_indices=range(4 * times))
    assert [int(middles(one, (2, 2))[0, 0, 0]) for one in drawn] == [30 * n for n in first]


@pytest.mark.parametrize("row", [0, 1, 12])
def test_video_of_any_batch_row(row: int) -> None:
    """Row 0 also has an image, whose tokens come first; a video ends with a newline token."""
    grids = [VisualGrid(0, 0, 1, 3, 0)]
    for number in range(13):
        start = 3 if number == 0 else 0
        grids += [VisualGrid(number, start + 4 * t, 2, 2, 1 + number, role="frame", frame=t) for t in range(8)]
        grids.append(VisualGrid(number, start + 32, 1, 1, 1 + number, role="newline", frame=7))
    frames = [solid_image(20, 20, (30 * n, 0, 0)) for n in range(8)]
    first = 3 if row == 0 else 0
    drawn = heatmaps(frames, grids, kept_indices=[first + 4 * t + t % 4 for t in range(8)], row=row)
    for n, one in enumerate(drawn):
        assert (corners(one, (2, 2)) == GREEN).all(-1).ravel().tolist() == [n % 4 == cell for cell in range(4)]
        assert int(middles(one, (2, 2)).reshape(-1, 3)[n % 4, 0]) == 30 * n
    assert len(drawn) == 8


def test_several_videos_in_a_row() -> None:
    grids = [VisualGrid(0, 8 * clip + 4 * t, 2, 2, clip, role="frame", frame=t) for clip in range(2) for t in range(2)]
    drawn = heatmaps([solid_image(20, 20, (60 * n, 0, 0)) for n in range(4)], grids, kept_indices=range(16))
    assert [int(middles(one, (2, 2))[0, 0, 0]) for one in drawn] == [0, 60, 120, 180]


def test_several_images_tiles_and_newlines() -> None:
    """Indices count tokens of grids that are not drawn; newline tokens are no cells."""
    grids = [
        VisualGrid(0, 5, 2, 2, 0),
        VisualGrid(0, 9, 2, 2, 0, role="tiles", has_newlines=True),
        VisualGrid(0, 15, 1, 3, 1, has_newlines=True),
        VisualGrid(1, 3, 1, 1, 2),
    ]
    images = [solid_image(colour=(250, 0, 0)), solid_image(colour=(0, 250, 0)), solid_image(colour=(0, 0, 250))]
    first, second = heatmaps(images, grids, kept_indices=[1, 5, 11])
    assert (corners(first, (2, 2)) == GREEN).all(-1).ravel().tolist() == [False, True, False, False]
    assert (corners(second, (1, 3)) == GREEN).all(-1).ravel().tolist() == [False, True, False]
    assert middles(second, (1, 3))[0, 1].tolist() == [0, 250, 0]
    (other,) = heatmaps(images, grids, kept_indices=[0], row=1)
    assert middles(other, (1, 1))[0, 0].tolist() == [0, 0, 250]
    assert heatmaps(images, [], kept_indices=[]) == []
    lines = VisualGrid(0, 7, 2, 3, 0, has_newlines=True)
    assert kept_cells(lines, 10, {10, 12, 13, 15}).tolist() == [[True, False, True], [False, True, False]]


def test_center_crop() -> None:
    wide = Image.new("RGB", (90, 30), "red")
    wide.paste((0, 0, 255), (30, 0, 60, 30))
    assert np.asarray(center_square(wide)).reshape(-1, 3).tolist() == [[0, 0, 255]] * 900
    (drawn,) = heatmaps([wide], [VisualGrid(0, 0, 2, 2, 0)], kept_indices=[0, 1, 2, 3], cropped=True)
    assert (middles(drawn, (2, 2)) == (0, 0, 255)).all()


def test_strip() -> None:
    drawn = strip([solid_image(10, 20), solid_image(30, 10), solid_image(5, 5)], columns=2)
    assert drawn.size == (40 + STRIP_GAP_PX, 25 + STRIP_GAP_PX) and drawn.getpixel((0, 0)) == (200, 40, 40)
    assert drawn.getpixel((10, 0)) == (255, 255, 255) and drawn.getpixel((10 + STRIP_GAP_PX, 0)) == (200, 40, 40)
    assert strip([solid_image(10, 20)] * 3).size == (30 + 2 * STRIP_GAP_PX, 20)
    with pytest.raises(ValueError, match="at least one image; got none"):
        strip([])
    with pytest.raises(ValueError, match="at least one column; got 0"):
        strip([solid_image()], columns=0)


@pytest.mark.parametrize(
    ("grid", "options", "message"),
    [
        ((0, 2), {"kept_indices": []}, r"at least one row and one column; got \(0, 2\)"),
        ((2, 2), {"kept_indices": [4]}, "range from 0 to 3; got 4"),
        ((2, 2), {"kept_indices": [-1]}, "range from 0 to 3; got -1"),
        ((2, 2), {"kept_indices": np.zeros((3, 2), bool)}, r"must have the shape of the grid, \[2, 2\]; got \[3, 2\]"),
    ],
)
def test_invalid_arguments(grid: tuple[int, int], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        heatmap(solid_image(), grid, **options)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1"])
def test_image_modes(mode: str) -> None:
    assert heatmap(solid_image().convert(mode), (2, 3), kept_indices=[0]).mode == "RGB"
