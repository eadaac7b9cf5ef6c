"""Still images: files and bytes to RGB. Allow-listed formats only, first frame, EXIF orientation applied, size limits.

Pillow selects the decoder by content, and some decoders start other programs (EPS: Ghostscript), so every `Image.open`
of the package goes through `open_image`. All decoding failures are raised as `ImageError` with a one-line message.
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

from mmspec.vision.video.containers import HEADER_BYTES, describe_format, open_regular_file

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM", "HEIF")
"""Allowed formats by Pillow's names. AVIF needs Pillow 11.3 or later, HEIF (.heic) the package `pillow-heif`."""
_PLUGINS = ("Png", "Jpeg", "Mpo", "WebP", "Gif", "Bmp", "Tiff", "Avif", "Ppm")
MAX_ASPECT = 200
"""Largest ratio of the longer to the shorter side."""
MAX_IMAGE_BYTES = 1 << 30
"""Largest size of an image file in bytes."""
_VALUES_PER_BAND = 1 << 22
"""Values that `to_uint8` converts at a time; bounds its memory."""


class ImageError(Exception):
    """A file is not a usable image.

    Attributes:
        kind: Short identifier of the cause, for the error column of results.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@lru_cache(maxsize=1)
def available_formats() -> tuple[str, ...]:
    """The entries of `IMAGE_FORMATS` that the installed Pillow can decode. Imports their decoders."""
    for name in _PLUGINS:
        with suppress(ImportError):
            importlib.import_module(f"PIL.{name}ImagePlugin")
    with suppress(ImportError):
        import pillow_heif

        pillow_heif.register_heif_opener()
    return tuple(name for name in IMAGE_FORMATS if name in Image.OPEN)


def open_image(file: str | os.PathLike[str] | IO[bytes]) -> Image.Image:
    """`Image.open`, restricted to the allowed formats.

    Raises:
        UnidentifiedImageError: The content is of no allowed format.
        Exception: Any other error of Pillow.
    """
    return Image.open(file, formats=available_formats())


@contextmanager
def pixel_limit(max_pixels: int, strict: bool = True) -> Iterator[None]:
    """Make Pillow refuse images of more than `max_pixels`. Process-wide, so wrap a whole job in it.

    Args:
        max_pixels: Limit on width * height.
        strict: Also raise where Pillow only warns (up to twice the limit); `check_image_size` refuses these anyway,
            with their size in the message.
    """
    before = Image.MAX_IMAGE_PIXELS
    with warnings.catch_warnings():
        warnings.simplefilter("error" if strict else "ignore", Image.DecompressionBombWarning)
        Image.MAX_IMAGE_PIXELS = max_pixels
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = before


def read_image_bytes(path: str) -> bytes:
    """The content of an image file.

    Raises:
        ImageError: The file cannot be read, or is larger than `MAX_IMAGE_BYTES`.
    """
    try:
        with io.FileIO(open_regular_file(path)) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_IMAGE_BYTES:
                raise ImageError("TooLarge", f"{size} bytes; the limit for an image file is {MAX_IMAGE_BYTES} bytes")
            return file.read(size)
    except OSError as error:
        raise ImageError("Unreadable", one_line_message(error)) from error


def decode_image(
    content: bytes, max_pixels: int, on_size: Callable[[int], None] = lambda num_pixels: None
) -> Image.Image:
    """Decode an image to RGB: EXIF orientation applied, transparency on white, first frame of an animation.

    Args:
        content: The file's content.
        max_pixels: Limit on width * height.
        on_size: Called with the number of pixels before they are decoded.

    Raises:
        ImageError: The content is not a usable image.
    """
    if not content:
        raise ImageError("Empty", "empty (0 bytes)")
    with convert_image_errors(max_pixels, content[:HEADER_BYTES]), open_image(io.BytesIO(content)) as image:
        on_size(image.width * image.height)
        return to_upright_rgb(image, max_pixels)


@contextmanager
def convert_image_errors(max_pixels: int, header: bytes = b"") -> Iterator[None]:
    """Raise every exception of the block as an `ImageError`.

    Args:
        max_pixels: The limit that the message names.
        header: First bytes of the file, from which the message names its format.
    """
    try:
        yield
    except ImageError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError("TooLarge", f"more than {max_pixels} pixels; raise --max-pixels if you trust it") from error
    except UnidentifiedImageError as error:
        allowed = ", ".join(available_formats())
        found = describe_format(header)
        if found.endswith(" image") and found.split(" ")[1].upper() in available_formats():
            raise ImageError("BrokenImage", f"cannot be decoded: {found} with a damaged header") from error
        raise ImageError("NotAnImage", f"not an image of an allowed format ({allowed}): {found}") from error
    except MemoryError as error:
        raise ImageError("OutOfMemory", "not enough memory to decode it") from error
    except Exception as error:  # on broken files decoders raise OSError, SyntaxError, struct.error and others
        raise ImageError("BrokenImage", f"cannot be decoded: {one_line_message(error)}") from error


def one_line_message(error: BaseException, limit: int = 300) -> str:
    """The message of an exception on one line of at most `limit` characters; the type's name if it has none."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def to_upright_rgb(image: Image.Image, max_pixels: int) -> Image.Image:
    """Load a Pillow image, apply its EXIF orientation and convert it to RGB.

    Raises:
        ImageError: Its size is not allowed.
    """
    check_image_size(image.width, image.height, max_pixels)
    image.load()
    try:
        upright = ImageOps.exif_transpose(image)
    except Exception:  # damaged EXIF data does not make the image unusable
        upright = image
    return to_rgb(upright)


def check_image_size(width: int, height: int, max_pixels: int) -> None:
    """Check the size of an image in pixels.

    Raises:
        ImageError: It is empty, has more than `max_pixels`, or an aspect ratio above `MAX_ASPECT`.
    """
    if width < 1 or height < 1:
        raise ImageError("Empty", f"{width} x {height} pixels: the image is empty")
    if width * height > max_pixels:
        raise ImageError(
            "TooLarge", f"{width} x {height} is more than {max_pixels} pixels; raise --max-pixels if you trust it"
        )
    if max(width, height) > MAX_ASPECT * max(1, min(width, height)):
        raise ImageError("TooThin", f"{width} x {height} exceeds the aspect ratio {MAX_ASPECT}:1; crop it")


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert to 8-bit RGB. 16-bit and float greyscale is scaled (Pillow would clip it), transparency goes on white."""
    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(to_uint8(np.asarray(image))).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    if image.mode == "LAB":
        return _lab_to_rgb(image)
    return image.convert("RGB")


def to_uint8(values: np.ndarray) -> np.ndarray:
    """Scale an array of another number type to uint8.

    Full scale is 1 for floats in 0..1, else 255; 65535 for 16-bit integers and larger ones in 256..65535; and the
    largest value beyond these. Values below 0 shift the lower end.
    """
    rows = max(1, _VALUES_PER_BAND * len(values) // max(1, values.size))
    bands = [values[start : start + rows] for start in range(0, len(values), rows)]
    low = high = 0.0
    for band in bands:
        finite = band[np.isfinite(band)].astype(np.float64)
        low = min(low, float(finite.min(initial=0.0)))
        high = max(high, float(finite.max(initial=0.0)))
    if values.dtype.kind == "f":
        top = 1.0 if high <= 1 else max(255.0, high)
    else:
        top = 65535.0 if values.dtype.itemsize == 2 or 255 < high <= 65535 else max(255.0, high)
    scaled = np.empty(values.shape, np.uint8)
    for i, band in enumerate(bands):
        finite = np.nan_to_num(band.astype(np.float64), posinf=high, neginf=low)
        scaled[i * rows : (i + 1) * rows] = np.clip((finite - low) * (255.0 / (top - low)), 0, 255).round()
    return scaled


def _lab_to_rgb(image: Image.Image) -> Image.Image:
    srgb = ImageCms.createProfile("sRGB")
    lab = ImageCms.createProfile("LAB")
    converted: Any = ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB")
    assert converted is not None
    return converted


__all__ = [
    "IMAGE_FORMATS",
    "ImageError",
    "available_formats",
    "check_image_size",
    "convert_image_errors",
    "decode_image",
    "one_line_message",
    "open_image",
    "pixel_limit",
    "read_image_bytes",
    "to_rgb",
    "to_uint8",
    "to_upright_rgb",
]
