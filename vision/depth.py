"""Numbers of more than 8 bits as 8 bits: integers that use fewer bits than they have, floats, missing data."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

_VALUES_PER_BAND = 1 << 22
"""Values that `to_uint8` converts at a time; bounds its memory."""
_SAMPLE_VALUES = 1 << 20
"""Values from which `to_uint8` finds the scale."""
_FULL_SCALES = (255, 1023, 4095, 16383, 65535)
"""Largest values of the numbers of bits that cameras and scanners store in wider integers."""
MAX_OUTLIER_SHARE = 0.01
"""Share of values that do not decide the scale of floats."""
MAX_RADIANCE = 16.0
"""Floats up to this are taken for radiance and not for values of 8 bits."""
_MAX_DARK = 63
"""Largest high byte of colours of at most 14 bits in 16."""
_DEEP_MODES = ("RGB", "RGBA", "RGBX")


def to_uint8(values: np.ndarray) -> np.ndarray:
    """Scale an array of another number type to uint8.

    Full scale of integers is the least of 255, 1023, 4095, 16383 and 65535 that holds their values, else the largest
    value. That of floats is 1 for values in 0..1, their largest value up to `MAX_RADIANCE`, else 255 or the largest
    value; few values above do not count. Values below 0 shift the lower end. A value far from all others marks missing
    data: it is clipped to the scale of the others.
    """
    low, top = _scale(values)
    rows = max(1, _VALUES_PER_BAND * len(values) // max(1, values.size))
    scaled = np.empty(values.shape, np.uint8)
    for start in range(0, len(values), rows):
        band = values[start : start + rows].astype(np.float64)
        finite = np.nan_to_num(band, nan=0.0, posinf=top, neginf=low)
        scaled[start : start + rows] = np.clip((finite - low) * (255.0 / (top - low)), 0, 255).round()
    return scaled


def _scale(values: np.ndarray) -> tuple[float, float]:
    """The values that become 0 and 255, from an even sample of `values`."""
    flat = values.reshape(-1)[:: max(1, values.size // _SAMPLE_VALUES)]
    found = np.sort(flat[np.isfinite(flat)].astype(np.float64))
    found = _without_missing(found)
    if not found.size:
        return 0.0, 1.0
    low, high = min(0.0, float(found[0])), float(found[-1])
    if values.dtype.kind != "f":
        fitting = (full for full in _FULL_SCALES if high <= full)
        return low, float(next(fitting, high))
    usual = float(found[-1 - min(max(1, int(MAX_OUTLIER_SHARE * found.size)), found.size // 4)])
    if usual <= 1:
        return low, 1.0 if usual > 0 or high <= 1 else high
    return low, usual if usual <= MAX_RADIANCE else max(255.0, high)


def _without_missing(found: np.ndarray) -> np.ndarray:
    """Sorted values without a largest or smallest one that is far from the others: it stands for missing data."""
    for _ in range(2):
        if not found.size:
            break
        inner = found[np.searchsorted(found, found[0], "right") :]
        if inner.size and found[0] < 0:
            gap, span = inner[0] - found[0], inner[-1] - inner[0]
            if gap > 4 * span and (span > 0 or found[0] <= -999):
                found = inner
        inner = found[: np.searchsorted(found, found[-1], "left")]
        if inner.size and inner[-1] > inner[0] and found[-1] - inner[-1] > 10 * (inner[-1] - inner[0]):
            found = inner
    return found


@dataclass(frozen=True)
class DeepColour:
    """How Pillow unpacks a picture of 16 bits a channel, of which it keeps the high byte. Found before it is loaded.

    Attributes:
        reopen: Opens the picture again.
        low_tiles: Its tiles, with arguments that give the low byte.
        is_grey: The four bytes of a pixel of these tiles are those of grey and transparency, the high ones first.
    """

    reopen: Callable[[], Image.Image]
    low_tiles: list[Any]
    is_grey: bool

    @classmethod
    def find(cls, image: Image.Image, reopen: Callable[[], Image.Image]) -> DeepColour | None:
        """That of an open picture that is not loaded; None if it has no colours of 16 bits."""
        file: Any = image
        file.tile = [_raw_tile(tile) for tile in getattr(image, "tile", ())]
        found = [_low_tile(tile) for tile in file.tile]
        if image.mode not in _DEEP_MODES or not found or None in found:
            return None
        return cls(reopen, found, is_grey=_raw_mode(file.tile[0]).startswith("LA"))

    def restore(self, image: Image.Image) -> None:
        """Scale the colours, all by one factor, and the transparency of the loaded `image` by the bits that they use.

        Nothing is done where they use 15 bits or more: the high byte is right then.
        """
        high = np.asarray(image)
        parts = (slice(0, 3), slice(3, high.shape[2]))
        dark = [part for part in parts if high[:, :, part].size and high[:, :, part].max() <= _MAX_DARK]
        if not dark:
            return
        with self.reopen() as again:
            file: Any = again
            file.tile = self.low_tiles
            low = np.asarray(again)
        if self.is_grey:
            low = low[:, :, [1, 1, 1, 3]]
        scaled = high.copy()
        for part in dark:
            scaled[:, :, part] = to_uint8(high[:, :, part].astype(np.uint16) << 8 | low[:, :, part])
        image.paste(Image.fromarray(scaled))


def _raw_mode(tile: Any) -> str:
    """Pillow's name of how a pixel is stored; empty if unknown."""
    args = tile[3]
    name = args if isinstance(args, str) else (*(args or ()), "")[0]
    return name if isinstance(name, str) else ""


def _replaced(tile: Any, codec: str, args: Any) -> Any:
    """A tile with another codec and arguments; its type depends on the version of Pillow."""
    values = (codec, *tile[1:3], args)
    return tile._make(values) if hasattr(tile, "_make") else values


def _raw_tile(tile: Any) -> Any:
    """A tile of a PPM file with 16 bits as bytes: Pillow scales its numbers to 8 bits. Any other as it is."""
    is_ppm = tile[0] == "ppm" and tile[3] == ("RGB", 65535)
    return _replaced(tile, "raw", ("RGB;16B", 0, 1)) if is_ppm else tile


def _low_tile(tile: Any) -> Any:
    """A tile of 16 bits a channel, with the order of the two bytes exchanged; None for any other."""
    codec, _, _, args = tile
    name, _, bits = _raw_mode(tile).rpartition(";")
    foreign = "B" if sys.byteorder == "little" else "L"
    order = {"16B": "L", "16L": "B", "16N": foreign}.get(bits)
    if order is None:
        return None
    raw_mode = "RGBA" if name == "LA" else f"{name};16{order}"
    return _replaced(tile, codec, raw_mode if isinstance(args, str) else (raw_mode, *args[1:]))
