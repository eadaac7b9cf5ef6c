"""Images from files, bytes, Pillow and arrays to RGB: any mode, first frame, upright, within limits; prefetching.

Every problem is an `ImageError` with one line of text. Knows nothing of models or captions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from mmspec.app.caption.config import MAX_PIXELS
from mmspec.app.errors import one_line
from mmspec.vision.images import (
    ImageError,
    check_image_size,
    convert_image_errors,
    decode_image,
    read_image_bytes,
    to_rgb,
    to_uint8,
    to_upright_rgb,
)
from mmspec.vision.images import (
    pixel_limit as pixel_limit,
)
from mmspec.vision.video.containers import FileBelow
from mmspec.vision.video.decoder_pool import DecoderPool
from mmspec.vision.video.worker_process import DecoderCrashedError, DecoderHungError, DecoderStartError

_COMMON_FORMATS = ".jpg .jpeg .jpe .jfif .png .apng .webp .gif .bmp .dib .tif .tiff .ppm .pgm .pbm .pnm .avif"
_HEIF = ".heic .heif" if find_spec("pillow_heif") else ""
IMAGE_SUFFIXES = frozenset(f"{_COMMON_FORMATS} {_HEIF}".split())
"""Suffixes of the allowed formats: see `mmspec.vision.images.FORMATS`."""


@dataclass(frozen=True)
class Video:
    """Frames of one video, with the keys of transformers' `VideoMetadata`.

    A model that takes videos gets it as a video, others as images.
    """

    frames: tuple[Image.Image, ...]
    metadata: dict[str, Any]

    def array(self) -> np.ndarray:
        """[T, height, width, 3] uint8."""
        return np.stack([np.asarray(frame) for frame in self.frames])


Media = Image.Image | Sequence[Image.Image] | Video
"""The media of one prompt: an image, several images, or a video."""
Source = Path | str | FileBelow | bytes | Image.Image | np.ndarray
"""An image as a path, the bytes of a file, a Pillow image, or an array (`from_array`)."""
_DECODER_ERRORS: dict[type[Exception], tuple[str, str]] = {
    DecoderHungError: ("DecoderHung", "the decoder took too long ({})"),
    DecoderCrashedError: ("DecoderCrashed", "the decoder crashed ({})"),
    ImportError: ("NoVideoReader", "{}"),
}
K = TypeVar("K")
V = TypeVar("V")


def load_image(source: Source, max_pixels: int = MAX_PIXELS, isolated: bool | DecoderPool = False) -> Image.Image:
    """An image as RGB, upright (EXIF), transparency on white; the first frame of an animation.

    Args:
        source: path, bytes, Pillow image or array.
        max_pixels: limit of width times height.
        isolated: decode files and bytes in another process, with limits of time and memory; True starts one for this
            call. Pillow images and arrays are decoded already.

    Raises:
        ImageError: the source cannot be read or decoded.
    """
    with convert_image_errors(max_pixels):
        if isinstance(source, np.ndarray):
            return from_array(source, max_pixels)
        if isinstance(source, Image.Image):
            return to_upright_rgb(source, max_pixels)
    content = _validate_source(source)
    if not isolated:
        return decode_image(content if isinstance(content, bytes) else read_image_bytes(content), max_pixels)
    pool = nullcontext(isolated) if isinstance(isolated, DecoderPool) else DecoderPool()
    with pool as decoders, convert_decoder_errors("BrokenImage"):
        return decoders.decode_image(content, max_pixels)


@contextmanager
def convert_decoder_errors(kind: str, clip: Path | None = None) -> Iterator[None]:
    """Turn what a process that decodes a file raises into an `ImageError`, but not that none could be started.

    Args:
        kind: of what has none of its own.
        clip: of which messages are whole sentences, but name its whole path.
    """
    try:
        yield
    except (DecoderStartError, ImageError):
        raise
    except MemoryError as error:
        raise ImageError("OutOfMemory", "not enough memory to decode it") from error
    except Exception as error:
        found, text = _DECODER_ERRORS.get(type(error), (kind, "cannot be decoded: {}"))
        message = one_line(error, 600)
        if clip is not None:
            text, message = "{}", message.removeprefix(f"{clip}: ").replace(str(clip), clip.name)
        raise ImageError(found, text.format(message)) from error


def _validate_source(source: object) -> str | bytes | FileBelow:
    """The path of a file that is not empty, or bytes."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        if not len(source):
            raise ImageError("Empty", "empty (0 bytes)")
        return bytes(source)
    if not isinstance(source, (str, Path, FileBelow)):
        kind = type(source).__name__
        raise ImageError("NotAnImage", f"an image is a path, bytes, a Pillow image or an array; got {kind}")
    check_file(Path(source))
    return source if isinstance(source, FileBelow) else str(source)


def from_array(values: np.ndarray, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """An array of [height, width], or [height, width, 1, 3 or 4] (grey, RGB, RGBA), as RGB.

    uint8 is taken as it is, bool is black and white, any other type is scaled as in `to_rgb`.
    """
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[:, :, 0]
    if values.ndim not in (2, 3) or (values.ndim == 3 and values.shape[2] not in (3, 4)):
        what = "an array is [height, width], or [height, width, 3 or 4], colours last"
        raise ImageError("NotAnImage", f"{what}; got {list(values.shape)}")
    if values.dtype.kind not in "buif":
        raise ImageError("NotAnImage", f"an array holds numbers; got dtype {values.dtype}")
    check_image_size(values.shape[1], values.shape[0], max_pixels)
    if values.dtype == np.bool_:
        values = values.astype(np.uint8) * 255
    elif values.dtype != np.uint8:
        values = to_uint8(values)
    return to_rgb(Image.fromarray(np.ascontiguousarray(values)))


def check_file(path: Path) -> None:
    """Refuse what is not a regular, non-empty file."""
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


def media_images(media: Media) -> Sequence[Image.Image]:
    """The images of `media`: one, several, or the frames of a video."""
    if isinstance(media, Video):
        return media.frames
    return (media,) if isinstance(media, Image.Image) else media


def decode_ahead(
    keys: Iterable[K],
    load: Callable[[K], V],
    threads: int = 4,
    ahead: int = 16,
    share: Callable[[K], float] = lambda key: 0.0,
) -> Generator[tuple[K, V | ImageError], None, None]:
    """Yield `(key, load(key))` in order, with up to `ahead` of them loading in `threads` threads meanwhile.

    An `ImageError` is yielded instead of the value: one bad file does not stop the others.

    Args:
        share: of the memory for what is ahead; what has all of it is loaded while nothing else is.
    """
    source, window = iter(keys), deque[tuple[K, Future[V]]]()
    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="mmspec-decode") as pool:
        try:
            for key in source:
                while window and sum(share(other) for other, _ in window) + share(key) > 1:
                    yield _result(*window.popleft())
                window.append((key, pool.submit(load, key)))
                if len(window) > ahead:
                    yield _result(*window.popleft())
            while window:
                yield _result(*window.popleft())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _result(key: K, future: Future[Any]) -> tuple[K, Any]:
    try:
        return key, future.result()
    except ImageError as error:
        return key, error
