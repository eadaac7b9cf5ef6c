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

from mmspec.messages import one_line
from mmspec.vision.depth import DeepColour
from mmspec.vision.depth import to_uint8 as to_uint8
from mmspec.vision.video.containers import HEADER_BYTES, FileBelow, describe_format, open_regular_file

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM", "HEIF")
"""Allowed formats by Pillow's names. AVIF needs Pillow 11.3 or later, HEIF (.heic) the package `pillow-heif`."""
_PLUGINS = ("Png", "Jpeg", "Mpo", "WebP", "Gif", "Bmp", "Tiff", "Avif", "Ppm")
MAX_ASPECT = 200
"""Largest ratio of the longer to the shorter side."""
MAX_IMAGE_BYTES = 1 << 30
"""Largest size of an image file in bytes."""
MAX_REDUCED_PIXELS = 268_000_000
"""Largest JPEG in pixels that is decoded at a reduced scale, where its full size exceeds the limit."""


class ImageError(Exception):
    """A file is not a usable image.

    Attributes:
        kind: Short identifier of the cause, for the error column of results.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[type[ImageError], tuple[str, str]]:
        return type(self), (self.kind, str(self))


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


def read_image_bytes(path: str | FileBelow) -> bytes:
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
        raise ImageError("Unreadable", one_line(error)) from error


def decode_image(
    content: bytes, max_pixels: int, on_size: Callable[[int], None] = lambda num_pixels: None
) -> Image.Image:
    """Decode an image to sRGB: EXIF orientation applied, transparency on white, first frame of an animation.

    Args:
        content: The file's content.
        max_pixels: Limit on width * height. A larger JPEG, up to `MAX_REDUCED_PIXELS`, is decoded at a smaller scale.
        on_size: Called with the number of pixels before they are decoded.

    Raises:
        ImageError: The content is not a usable image.
    """
    if not content:
        raise ImageError("Empty", "empty (0 bytes)")
    with (
        convert_image_errors(max_pixels, content[:HEADER_BYTES]),
        _open_reduced(content, max_pixels) or open_image(io.BytesIO(content)) as image,
    ):
        on_size(image.width * image.height)
        return to_upright_rgb(image, max_pixels, lambda: open_image(io.BytesIO(content)))


def _open_reduced(content: bytes, max_pixels: int) -> Image.Image | None:
    """A JPEG of more than `max_pixels`, set to be decoded at 1/2, 1/4 or 1/8 of its size; None for any other file.

    Raises:
        ImageError: It has more than `MAX_REDUCED_PIXELS`, or exceeds the limit at 1/8.
    """
    if not content.startswith(b"\xff\xd8\xff"):
        return None
    from PIL.JpegImagePlugin import JpegImageFile

    try:
        image = JpegImageFile(io.BytesIO(content))  # `Image.open` refuses large ones before anything can be set
    except Exception:
        return None  # `open_image` has the message
    width, height = image.size
    if width * height <= max_pixels:
        return None
    for scale in (2, 4, 8):
        if width * height <= MAX_REDUCED_PIXELS and -(-width // scale) * -(-height // scale) <= max_pixels:
            image.draft(image.mode, (max(1, width // scale), max(1, height // scale)))
            return image
    limit = min(64 * max_pixels, MAX_REDUCED_PIXELS)
    raise ImageError("TooLarge", f"{width} x {height} is more than {limit} pixels, the limit for a JPEG at 1/8 scale")


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
        names = {found.split(" ")[1].upper(), *(["HEIF"] if "HEIC" in found else [])}
        if found.endswith(" image") and names & set(available_formats()):
            raise ImageError("BrokenImage", f"cannot be decoded: {found} with a damaged header") from error
        found += " (pip install pillow-heif to read it)" if "HEIC" in found else ""
        raise ImageError("NotAnImage", f"not an image of an allowed format ({allowed}): {found}") from error
    except MemoryError as error:
        raise ImageError("OutOfMemory", "not enough memory to decode it") from error
    except Exception as error:  # on broken files decoders raise OSError, SyntaxError, struct.error and others
        raise ImageError("BrokenImage", f"cannot be decoded: {one_line(error)}") from error


def to_upright_rgb(image: Image.Image, max_pixels: int, reopen: Callable[[], Image.Image] | None = None) -> Image.Image:
    """Load a Pillow image, apply its EXIF orientation and convert it to RGB.

    Args:
        image: An open image.
        max_pixels: Limit on width * height.
        reopen: Opens it again: colours of fewer than 16 bits in 16 would be black otherwise.

    Raises:
        ImageError: Its size is not allowed.
    """
    check_image_size(image.width, image.height, max_pixels)
    deep = DeepColour.find(image, reopen) if reopen is not None else None
    image.load()
    if deep is not None:
        deep.restore(image)
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
    """Convert to 8-bit sRGB: by the ICC profile, if there is one.

    Integers of more than 8 bits and floats are scaled (Pillow would clip them), transparency goes on white.
    """
    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(to_uint8(np.asarray(image))).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        colours = _to_srgb(rgba.convert("RGB"), image.info.get("icc_profile"))
        white = Image.new("RGB", rgba.size, (255, 255, 255))
        return Image.composite(colours, white, rgba.getchannel("A"))
    if image.mode == "LAB":
        return _lab_to_rgb(image)
    flat = image.convert("RGB") if image.mode in ("P", "1", "YCbCr", "HSV") else image
    return _to_srgb(flat, image.info.get("icc_profile"))


def _to_srgb(image: Image.Image, profile: object) -> Image.Image:
    """A picture of mode RGB, L or CMYK as RGB, by its ICC profile; a broken or unsuitable profile is ignored."""
    if not isinstance(profile, bytes) or not profile:
        return image.convert("RGB")
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        transform = ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), image.mode, "RGB")
        if image.mode == "RGB" and _is_identity(transform):
            return image
        converted = ImageCms.applyTransform(image, transform)
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return image.convert("RGB")
    return image.convert("RGB") if converted is None else converted


def _is_identity(transform: Any) -> bool:
    """Whether a transform changes no colour visibly: the profile is sRGB, under whatever name."""
    steps = np.linspace(0, 255, 9).round().astype(np.uint8)
    cube = np.stack(np.meshgrid(steps, steps, steps), axis=-1).reshape(27, 27, 3)
    converted: Any = ImageCms.applyTransform(Image.fromarray(cube), transform)
    return int(np.abs(np.asarray(converted).astype(int) - cube).max()) <= 2


def _lab_to_rgb(image: Image.Image) -> Image.Image:
    srgb = ImageCms.createProfile("sRGB")
    lab = ImageCms.createProfile("LAB")
    converted: Any = ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB")
    assert converted is not None
    return converted
