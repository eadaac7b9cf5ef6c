"""Pictures from files and bytes to RGB: only formats of an allow-list, first frame, upright, within limits.

Pillow chooses a decoder by content and knows some that start other programs (EPS: Ghostscript), so every `Image.open`
of the package is in `open_image`. Whatever is wrong with a picture becomes an `ImageError` with one line of text.
"""

from __future__ import annotations

import importlib
import io
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import IO, Any

import numpy as np
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError

from mmspec.vision.video.containers import HEAD, named, opened

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM", "HEIF")
"""By Pillow's names. AVIF needs Pillow 11.3 or later, HEIF (.heic) the package `pillow-heif`."""
_PLUGINS = ("Png", "Jpeg", "Mpo", "WebP", "Gif", "Bmp", "Tiff", "Avif", "Ppm")
MAX_ASPECT = 200
MAX_BYTES = 1 << 30
"""Bytes that the file of a picture may have."""
_BAND = 1 << 22
"""Values that are scaled at a time."""


class ImageError(Exception):
    """A file that is no usable picture. `kind` is a short name for the error column."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@lru_cache(maxsize=1)
def formats() -> tuple[str, ...]:
    """Those of `FORMATS` that can be read here. Their decoders are imported."""
    for name in _PLUGINS:
        with suppress(ImportError):
            importlib.import_module(f"PIL.{name}ImagePlugin")
    with suppress(ImportError):
        import pillow_heif

        pillow_heif.register_heif_opener()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def open_image(file: str | os.PathLike[str] | IO[bytes]) -> Image.Image:
    """`Image.open` of an allowed format.

    Raises:
        UnidentifiedImageError: of no allowed format. Anything else: as Pillow does.
    """
    return Image.open(file, formats=formats())


@contextmanager
def pixel_limit(max_pixels: int, strict: bool = True) -> Iterator[None]:
    """Make Pillow itself refuse what is larger. Process-wide, so wrap a whole job in it.

    Args:
        strict: also where Pillow only warns, up to twice as many pixels; `check_size` refuses these with their size.
    """
    before = Image.MAX_IMAGE_PIXELS
    with warnings.catch_warnings():
        warnings.simplefilter("error" if strict else "ignore", Image.DecompressionBombWarning)
        Image.MAX_IMAGE_PIXELS = max_pixels
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = before


def content_of(path: str) -> bytes:
    """What is in the file of a picture.

    Raises:
        ImageError: it cannot be read, or has more than `MAX_BYTES`.
    """
    try:
        with io.FileIO(opened(path)) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_BYTES:
                raise ImageError("TooLarge", f"{size} bytes; {MAX_BYTES} bytes is the limit of a picture's file")
            return file.read(size)
    except OSError as error:
        raise ImageError("Unreadable", line_of(error)) from error


def read_still(content: bytes, max_pixels: int, grant: Callable[[int], None] = lambda pixels: None) -> Image.Image:
    """The picture in `content` as RGB, upright (EXIF), transparency on white; the first one of an animated file.

    Args:
        grant: called with the number of pixels before they are decoded.

    Raises:
        ImageError: whatever is wrong with it.
    """
    if not content:
        raise ImageError("Empty", "empty (0 bytes)")
    with explained(max_pixels, content[:HEAD]), open_image(io.BytesIO(content)) as image:
        grant(image.width * image.height)
        return ready(image, max_pixels)


@contextmanager
def explained(max_pixels: int, head: bytes = b"") -> Iterator[None]:
    """Whatever decoding raises, as an `ImageError`. `head`: the first bytes of the file."""
    try:
        yield
    except ImageError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError("TooLarge", f"more than {max_pixels} pixels; raise --max-pixels if you trust it") from error
    except UnidentifiedImageError as error:
        allowed, found = ", ".join(formats()), named(head)
        if found.endswith(" picture") and found.split(" ")[1].upper() in formats():
            raise ImageError("BrokenImage", f"cannot be decoded: {found} with a damaged header") from error
        raise ImageError("NotAnImage", f"not an image of an allowed format ({allowed}): {found}") from error
    except MemoryError as error:
        raise ImageError("OutOfMemory", "not enough memory to decode it") from error
    except Exception as error:  # decoders raise anything from OSError to SyntaxError and struct.error on broken files
        raise ImageError("BrokenImage", f"cannot be decoded: {line_of(error)}") from error


def line_of(error: BaseException, limit: int = 300) -> str:
    """The message of an error on one line; the name of its type if it has none."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def ready(image: Image.Image, max_pixels: int) -> Image.Image:
    """An image of Pillow's as RGB, upright, if its size is allowed."""
    check_size(image.width, image.height, max_pixels)
    image.load()
    try:
        upright = ImageOps.exif_transpose(image)
    except Exception:  # what cannot be read of the EXIF data says nothing; the picture is there all the same
        upright = image
    return to_rgb(upright)


def check_size(width: int, height: int, max_pixels: int) -> None:
    """Refuse what is too large, or absurdly long, or nothing at all."""
    if width < 1 or height < 1:
        raise ImageError("Empty", f"{width} x {height} pixels, nothing to see")
    if width * height > max_pixels:
        raise ImageError(
            "TooLarge", f"{width} x {height} is more than {max_pixels} pixels; raise --max-pixels if you trust it"
        )
    if max(width, height) > MAX_ASPECT * max(1, min(width, height)):
        raise ImageError("TooThin", f"{width} x {height} is longer than {MAX_ASPECT}:1; crop it")


def to_rgb(image: Image.Image) -> Image.Image:
    """RGB in 8 bits. 16-bit and float greys are scaled (Pillow would clip them), transparency goes on white."""
    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(eight_bits(np.asarray(image))).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    if image.mode == "LAB":
        return _from_lab(image)
    return image.convert("RGB")


def eight_bits(values: np.ndarray) -> np.ndarray:
    """Numbers of other kinds: full scale is 255, 65535 or, beyond these and for floats outside 0..1, the largest."""
    rows = max(1, _BAND * len(values) // max(1, values.size))
    bands = [values[start : start + rows] for start in range(0, len(values), rows)]
    low = high = 0.0
    for band in bands:
        finite = band[np.isfinite(band)].astype(np.float64)
        low, high = min(low, float(finite.min(initial=0.0))), max(high, float(finite.max(initial=0.0)))
    if values.dtype.kind == "f":
        top = 1.0 if high <= 1 else max(255.0, high)
    else:
        top = 65535.0 if values.dtype.itemsize == 2 or 255 < high <= 65535 else max(255.0, high)
    made = np.empty(values.shape, np.uint8)
    for number, band in enumerate(bands):
        exact = np.nan_to_num(band.astype(np.float64), posinf=high, neginf=low)
        scaled = np.clip((exact - low) * (255.0 / (top - low)), 0, 255).round()
        made[number * rows : (number + 1) * rows] = scaled
    return made


def _from_lab(image: Image.Image) -> Image.Image:
    srgb, lab = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    made: Any = ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB")
    assert made is not None
    return made


__all__ = [
    "FORMATS",
    "ImageError",
    "check_size",
    "content_of",
    "eight_bits",
    "explained",
    "formats",
    "line_of",
    "open_image",
    "pixel_limit",
    "read_still",
    "ready",
    "to_rgb",
]
