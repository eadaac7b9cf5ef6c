"""Image files to RGB pictures: any mode, first frame, upright, within limits; decoded ahead by threads.

Whatever is wrong with a file becomes an `ImageError` with one line of text. Knows nothing of models or captions.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from mmspec.app.errors import one_line
from mmspec.app.settings import MAX_PIXELS

MAX_ASPECT = 200
_SUFFIXES = ".jpg .jpeg .jpe .jfif .png .apng .webp .gif .bmp .dib .tif .tiff .ppm .pgm .pbm .pnm .avif .jp2 .tga .ico"
SUFFIXES = frozenset(_SUFFIXES.split())

Shown = Image.Image | Sequence[Image.Image]
"""What goes with one prompt: a picture, or the frames of a clip, which a model is given as so many pictures."""
Key = TypeVar("Key")
Value = TypeVar("Value")


class ImageError(Exception):
    """A file that is no usable picture. `kind` is a short name for the error column."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@contextmanager
def pixel_limit(max_pixels: int) -> Iterator[None]:
    """Make Pillow itself refuse what is larger, also where it only warns. Process-wide, so wrap a whole job in it."""
    before = Image.MAX_IMAGE_PIXELS
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        Image.MAX_IMAGE_PIXELS = max_pixels
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = before


def load_image(path: Path, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The picture in `path` as RGB, upright (EXIF), transparency on white; the first frame of an animation."""
    check_file(path)
    try:
        with Image.open(path) as image:
            check_size(image.width, image.height, max_pixels)
            image.load()
            return to_rgb(ImageOps.exif_transpose(image))
    except ImageError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError("TooLarge", f"more than {max_pixels} pixels; raise --max-pixels if you trust it") from error
    except UnidentifiedImageError as error:
        raise ImageError("NotAnImage", "not an image, or of a kind that Pillow cannot read") from error
    except MemoryError as error:
        raise ImageError("OutOfMemory", "not enough memory to decode it") from error
    except Exception as error:  # decoders raise anything from OSError to SyntaxError and struct.error on broken files
        raise ImageError("BrokenImage", f"cannot be decoded: {one_line(error)}") from error


def check_file(path: Path) -> None:
    """Refuse what is not a file with something in it."""
    try:
        if path.is_dir():
            raise ImageError("NotAnImage", "is a folder")
        if not path.exists():
            raise ImageError("Missing", "no such file")
        if not path.is_file():
            raise ImageError("NotAnImage", "not a regular file")
        if path.stat().st_size == 0:
            raise ImageError("Empty", "empty file (0 bytes)")
    except OSError as error:
        raise ImageError("Unreadable", one_line(error)) from error


def check_size(width: int, height: int, max_pixels: int) -> None:
    """Refuse what is too large, or absurdly long."""
    if width * height > max_pixels:
        raise ImageError(
            "TooLarge", f"{width} x {height} is more than {max_pixels} pixels; raise --max-pixels if you trust it"
        )
    if max(width, height) > MAX_ASPECT * max(1, min(width, height)):
        raise ImageError("TooThin", f"{width} x {height} is longer than {MAX_ASPECT}:1; crop it")


def pictures(shown: Shown) -> Sequence[Image.Image]:
    """The picture alone, or the frames."""
    return (shown,) if isinstance(shown, Image.Image) else shown


def to_rgb(image: Image.Image) -> Image.Image:
    """RGB in 8 bits. 16-bit and float greys are scaled (Pillow would clip them), transparency goes on white."""
    if image.mode.startswith("I") or image.mode == "F":
        return _scaled(np.asarray(image))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    if image.mode == "LAB":
        return _from_lab(image)
    return image.convert("RGB")


def _scaled(values: np.ndarray) -> Image.Image:
    """Greys of more than 8 bits: full scale is 255, 65535 or, beyond these and for floats outside 0..1, the largest."""
    grey = np.nan_to_num(values.astype(np.float64))
    low, high = min(0.0, float(grey.min())), float(grey.max())
    if values.dtype.kind == "f":
        top = 1.0 if high <= 1 else max(255.0, high)
    else:
        top = 65535.0 if values.dtype.itemsize == 2 or 255 < high <= 65535 else max(255.0, high)
    grey8 = np.clip((grey - low) * (255.0 / (top - low)), 0, 255).round().astype(np.uint8)
    return Image.fromarray(grey8).convert("RGB")


def _from_lab(image: Image.Image) -> Image.Image:
    from PIL import ImageCms

    srgb, lab = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    made = ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB")
    assert made is not None
    return made


def decode_ahead(
    keys: Iterable[Key], load: Callable[[Key], Value], threads: int = 4, ahead: int = 16
) -> Generator[tuple[Key, Value | ImageError], None, None]:
    """Yield `(key, load(key))` in order, with up to `ahead` of them loading in `threads` meanwhile.

    An `ImageError` is yielded in place of the value, so that one bad file stops nobody.
    """
    source, window = iter(keys), deque[tuple[Key, Future[Value]]]()
    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="mmspec-decode") as pool:
        try:
            for key in source:
                window.append((key, pool.submit(load, key)))
                if len(window) > ahead:
                    yield _result(*window.popleft())
            while window:
                yield _result(*window.popleft())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _result(key: Key, future: Future[Any]) -> tuple[Key, Any]:
    try:
        return key, future.result()
    except ImageError as error:
        return key, error


__all__ = [
    "SUFFIXES",
    "ImageError",
    "Shown",
    "check_file",
    "check_size",
    "decode_ahead",
    "load_image",
    "pictures",
    "pixel_limit",
    "to_rgb",
]
