"""Pictures from files, bytes, Pillow and arrays to RGB: any mode, first frame, upright, within limits; decoded ahead.

Whatever is wrong with one becomes an `ImageError` with one line of text. Knows nothing of models or captions.
"""

from __future__ import annotations

import io
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from mmspec.app.errors import one_line
from mmspec.app.settings import MAX_PIXELS

MAX_ASPECT = 200
_SUFFIXES = ".jpg .jpeg .jpe .jfif .png .apng .webp .gif .bmp .dib .tif .tiff .ppm .pgm .pbm .pnm .avif .jp2 .tga .ico"
SUFFIXES = frozenset(_SUFFIXES.split())


@dataclass(frozen=True)
class Video:
    """The frames of one video, and what it is by the names of transformers' `VideoMetadata`.

    A model that takes videos is given them as one; others get so many pictures.
    """

    frames: tuple[Image.Image, ...]
    metadata: dict[str, Any]

    def array(self) -> np.ndarray:
        """[T, height, width, 3] uint8."""
        return np.stack([np.asarray(frame) for frame in self.frames])


Shown = Image.Image | Sequence[Image.Image] | Video
"""What goes with one prompt: a picture, several, or a video."""
Source = Path | str | bytes | Image.Image | np.ndarray
"""What a picture may come as: a file by its path, what is in one, an image of Pillow's, an array (`from_array`)."""
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


def load_image(source: Source, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """A picture as RGB, upright (EXIF), transparency on white; the first one of an animated file.

    Raises:
        ImageError: whatever is wrong with it.
    """
    try:
        if isinstance(source, np.ndarray):
            return from_array(source, max_pixels)
        if isinstance(source, Image.Image):
            return _ready(source, max_pixels)
        with Image.open(_file(source)) as image:
            return _ready(image, max_pixels)
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


def _file(source: object) -> Path | io.BytesIO:
    """What Pillow opens."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        if not len(source):
            raise ImageError("Empty", "empty (0 bytes)")
        return io.BytesIO(source)
    if not isinstance(source, (str, Path)):
        kind = type(source).__name__
        raise ImageError("NotAnImage", f"a picture is a path, bytes, an image of Pillow's or an array; got {kind}")
    check_file(Path(source))
    return Path(source)


def _ready(image: Image.Image, max_pixels: int) -> Image.Image:
    check_size(image.width, image.height, max_pixels)
    image.load()
    try:
        upright = ImageOps.exif_transpose(image)
    except Exception:  # what cannot be read of the EXIF data says nothing; the picture is there all the same
        upright = image
    return to_rgb(upright)


def from_array(values: np.ndarray, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """An array of [height, width], or [height, width, 1, 3 or 4] (grey, RGB, RGBA), as RGB.

    Bytes are taken as they are, truth values are black and white; anything else is scaled as `to_rgb` does.
    """
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[:, :, 0]
    if values.ndim not in (2, 3) or (values.ndim == 3 and values.shape[2] not in (3, 4)):
        what = "an array is [height, width], or [height, width, 3 or 4], colours last"
        raise ImageError("NotAnImage", f"{what}; got {list(values.shape)}")
    if values.dtype.kind not in "buif":
        raise ImageError("NotAnImage", f"an array holds numbers; got dtype {values.dtype}")
    check_size(values.shape[1], values.shape[0], max_pixels)
    if values.dtype == np.bool_:
        values = values.astype(np.uint8) * 255
    elif values.dtype != np.uint8:
        values = _eight_bits(values)
    return to_rgb(Image.fromarray(np.ascontiguousarray(values)))


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
    """Refuse what is too large, or absurdly long, or nothing at all."""
    if width < 1 or height < 1:
        raise ImageError("Empty", f"{width} x {height} pixels, nothing to see")
    if width * height > max_pixels:
        raise ImageError(
            "TooLarge", f"{width} x {height} is more than {max_pixels} pixels; raise --max-pixels if you trust it"
        )
    if max(width, height) > MAX_ASPECT * max(1, min(width, height)):
        raise ImageError("TooThin", f"{width} x {height} is longer than {MAX_ASPECT}:1; crop it")


def pictures(shown: Shown) -> Sequence[Image.Image]:
    """The picture alone, or the frames."""
    if isinstance(shown, Video):
        return shown.frames
    return (shown,) if isinstance(shown, Image.Image) else shown


def to_rgb(image: Image.Image) -> Image.Image:
    """RGB in 8 bits. 16-bit and float greys are scaled (Pillow would clip them), transparency goes on white."""
    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_eight_bits(np.asarray(image))).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    if image.mode == "LAB":
        return _from_lab(image)
    return image.convert("RGB")


def _eight_bits(values: np.ndarray) -> np.ndarray:
    """Numbers of other kinds: full scale is 255, 65535 or, beyond these and for floats outside 0..1, the largest."""
    exact = values.astype(np.float64)
    finite = exact[np.isfinite(exact)]
    low, high = min(0.0, float(finite.min(initial=0.0))), float(finite.max(initial=0.0))
    exact = np.nan_to_num(exact, posinf=high, neginf=low)
    if values.dtype.kind == "f":
        top = 1.0 if high <= 1 else max(255.0, high)
    else:
        top = 65535.0 if values.dtype.itemsize == 2 or 255 < high <= 65535 else max(255.0, high)
    return np.clip((exact - low) * (255.0 / (top - low)), 0, 255).round().astype(np.uint8)


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
    "Source",
    "Video",
    "check_file",
    "check_size",
    "decode_ahead",
    "from_array",
    "load_image",
    "pictures",
    "pixel_limit",
    "to_rgb",
]
