"""What a player makes of a decoded frame: orientation, shape of the pixels, transparency, high dynamic range.

Independent of the demuxers; frames are those of PyAV.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image

from mmspec.vision.video.reader import FrameSize

MAX_SAMPLE_ASPECT = 10.0
"""Largest ratio of the sides of a pixel; a file that declares more has square ones."""
REFERENCE_WHITE = 203.0
"""Luminance of white in nits in HDR video (ITU-R BT.2408)."""
HLG_PEAK = 1000.0
"""Luminance in nits of the display that HLG is shown on (ITU-R BT.2100)."""
KNEE = 0.5
"""Linear light, of that of white, above which HDR is compressed."""
_PQ, _HLG = 16, 18
# ITU-T H.273, ColourPrimaries: to linear light of BT.709, whose primaries sRGB has.
_TO_709 = {
    9: ((1.6605, -0.5876, -0.0728), (-0.1246, 1.1329, -0.0083), (-0.0182, -0.1006, 1.1187)),  # BT.2020
    12: ((1.2249, -0.2247, 0.0), (-0.0421, 1.0419, 0.0), (-0.0196, -0.0786, 1.0979)),  # P3, D65
}
# The matrix (a b / c d) of a display matrix, x' = a x + c y and y' = b x + d y with y down, and what Pillow calls it.
_ORIENTATIONS: dict[tuple[int, int, int, int], Image.Transpose | None] = {
    (1, 0, 0, 1): None,
    (0, 1, -1, 0): Image.Transpose.ROTATE_270,
    (-1, 0, 0, -1): Image.Transpose.ROTATE_180,
    (0, -1, 1, 0): Image.Transpose.ROTATE_90,
    (-1, 0, 0, 1): Image.Transpose.FLIP_LEFT_RIGHT,
    (1, 0, 0, -1): Image.Transpose.FLIP_TOP_BOTTOM,
    (0, 1, 1, 0): Image.Transpose.TRANSPOSE,
    (0, -1, -1, 0): Image.Transpose.TRANSVERSE,
}


def find_orientation(a: float, b: float, c: float, d: float) -> Image.Transpose | None:
    """The one of the eight orientations that is nearest to a display matrix; None for that of the stored picture.

    Players turn by multiples of 90 degrees only: an angle in between is rounded, stretching is left to the shape of the
    pixels.
    """
    first, second = math.hypot(a, b) or 1.0, math.hypot(c, d) or 1.0
    unit = (a / first, b / first, c / second, d / second)

    def agreement(one: tuple[int, int, int, int]) -> float:
        return round(sum(x * y for x, y in zip(unit, one, strict=True)), 6)  # of equal ones the first

    return _ORIENTATIONS[max(_ORIENTATIONS, key=agreement)]


@dataclass(frozen=True)
class Presentation:
    """How the frames of a stream are shown.

    Attributes:
        orientation: As `find_orientation`.
        sample_aspect: Width of a pixel in units of its height.
        transfer: ITU-T H.273's TransferCharacteristics; 0 if unknown.
        primaries: Its ColourPrimaries, likewise.
    """

    orientation: Image.Transpose | None = None
    sample_aspect: float = 1.0
    transfer: int = 0
    primaries: int = 0

    @classmethod
    def of(cls, frame: Any, stream: Any) -> Presentation:
        """That of a stream, from its first frame."""
        side_data = frame.side_data.get("DISPLAYMATRIX")
        matrix = bytes(side_data) if side_data is not None else b""
        orientation = None
        if len(matrix) >= 36:
            a, b, _, c, d = struct.unpack("=5i", matrix[:20])
            orientation = find_orientation(a, b, c, d)
        aspect = float(stream.sample_aspect_ratio or 1)
        aspect = aspect if 1 / MAX_SAMPLE_ASPECT <= aspect <= MAX_SAMPLE_ASPECT else 1.0
        context = stream.codec_context
        colour = [getattr(context, name, 0) for name in ("color_trc", "color_primaries")]  # newer versions of PyAV
        return cls(orientation, aspect, *(int(value or 0) for value in colour))

    @property
    def is_hdr(self) -> bool:
        """Whether the frames have a high dynamic range."""
        return self.transfer in (_PQ, _HLG)

    def shown_size(self, width: int, height: int) -> FrameSize:
        """The size of a frame as it is shown. No side is shorter than it is stored, before it is turned."""
        if self.sample_aspect > 1:
            width = round(width * self.sample_aspect)
        else:
            height = round(height / self.sample_aspect)
        return self._turned((width, height))

    def _turned(self, size: FrameSize) -> FrameSize:
        is_lying = self.orientation is not None and self.orientation >= Image.Transpose.ROTATE_90
        return size[::-1] if is_lying and self.orientation != Image.Transpose.ROTATE_180 else size

    def to_image(self, frame: Any, size: FrameSize) -> Image.Image:
        """A frame as it is shown: RGB, of that size; transparency on white, as in pictures."""
        width, height = self._turned(size)
        if self.is_hdr:
            values = frame.to_ndarray(format="rgb48le", width=width, height=height)
            image = Image.fromarray(to_standard_range(values, self.transfer, self.primaries))
        elif _has_alpha(frame):
            layer = Image.fromarray(frame.to_ndarray(format="rgba", width=width, height=height))
            image = Image.alpha_composite(Image.new("RGBA", layer.size, (255, 255, 255, 255)), layer).convert("RGB")
        else:
            image = frame.to_image(width=width, height=height)
        return image if self.orientation is None else image.transpose(self.orientation)


def _has_alpha(frame: Any) -> bool:
    return frame.format.has_palette or any(part.is_alpha for part in frame.format.components)


def to_standard_range(values: np.ndarray, transfer: int, primaries: int) -> np.ndarray:
    """HDR colours as sRGB.

    Light is taken relative to reference white and to the primaries of sRGB. The largest channel m of a pixel stays up
    to `KNEE`, k; above it becomes 1 - (1-k)^2 / (m - 2k + 1), so white is bright and highlights differ still. The other
    channels are scaled like it, which keeps the hue.

    Args:
        values: [height, width, 3] uint16, coded by PQ or HLG.
        transfer: As in `Presentation`.
        primaries: Likewise.

    Returns:
        [height, width, 3] uint8.
    """
    shown = np.empty(values.shape, np.uint8)
    matrix = _TO_709.get(primaries)
    for row, coded in enumerate(values):  # one at a time: the memory of a large frame would be eight times as much
        light = _light_of(transfer)[coded]
        if transfer == _HLG:
            luminance = light @ np.array([0.2627, 0.6780, 0.0593], np.float32)
            light = light * (HLG_PEAK / REFERENCE_WHITE) * (luminance**0.2)[:, None]
        if matrix is not None:
            light = np.maximum(light @ np.array(matrix, np.float32).T, 0)
        largest = light.max(1, keepdims=True)
        above = 1 - (1 - KNEE) ** 2 / np.maximum(largest - 2 * KNEE + 1, 1 - KNEE)
        light = light * np.where(largest > KNEE, above / np.maximum(largest, KNEE), 1)
        gamma = np.where(light <= 0.0031308, 12.92 * light, 1.055 * np.maximum(light, 0.0031308) ** (1 / 2.4) - 0.055)
        shown[row] = (255 * gamma).round()
    return shown


@lru_cache(maxsize=2)
def _light_of(transfer: int) -> np.ndarray:
    """Linear light of each coded value of 16 bits: PQ relative to reference white, HLG of the scene, 0 to 1."""
    coded = np.linspace(0, 1, 1 << 16)
    if transfer == _PQ:  # SMPTE ST 2084
        power = coded ** (32 / 2523)
        light = (np.maximum(power - 107 / 128, 0) / (2413 / 128 - 2392 / 128 * power)) ** (8192 / 1305)
        return (light * (10_000 / REFERENCE_WHITE)).astype(np.float32)
    a, b, c = 0.17883277, 0.28466892, 0.55991073
    return np.where(coded <= 0.5, coded**2 / 3, (np.exp((coded - c) / a) + b) / 12).astype(np.float32)
