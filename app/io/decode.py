"""The picture or clip of a row, decoded in another process within limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mmspec.app.caption.config import FRAMES, MAX_PIXELS
from mmspec.app.caption.progress import print_stderr
from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.content import Pictures
from mmspec.app.io.images import ImageError, Media, load_image
from mmspec.app.io.item import Item
from mmspec.app.io.videos import load_media
from mmspec.vision.video.decoder_pool import DecoderPool
from mmspec.vision.video.samplers import Uniform

if TYPE_CHECKING:
    from PIL import Image

    from mmspec.interfaces import FrameSampler

MAX_ROW_PIXELS = 4
"""Pixels of all pictures of a row together, in multiples of the limit of one."""


def decode_item(item: Item, sampler: FrameSampler, max_pixels: int, decoders: DecoderPool) -> Media:
    """The media of a row: a picture, a clip, or several pictures, by content.

    Raises:
        ImageError: it cannot be read or decoded; the message says where a list or table names it.
    """
    with item.locate_errors():
        if item.content is None:
            return load_media(item.path, sampler, max_pixels, decoders)
        if isinstance(item.content, Pictures) and len(item.content.parts) > 1:
            return _decode_pictures(item.content, max_pixels, decoders)
        return load_media(item.content.read(), sampler, max_pixels, decoders, named_video=item.is_video)


def _decode_pictures(content: Pictures, max_pixels: int, decoders: DecoderPool) -> tuple[Image.Image, ...]:
    """All pictures of a row, within `MAX_ROW_PIXELS`."""
    images: list[Image.Image] = []
    left = MAX_ROW_PIXELS * max_pixels
    for number, part in enumerate(content.parts):
        try:
            image = load_image(part.read(), max_pixels, decoders)
        except ImageError as error:
            raise ImageError(error.kind, f"picture {number} of {len(content.parts)}: {error}") from error
        left -= image.width * image.height
        if left < 0:
            raise ImageError("TooLarge", f"the pictures of the row have more than {MAX_ROW_PIXELS * max_pixels} pixels")
        images.append(image)
    return tuple(images)


def decode_readable(items: Sequence[Item], decoders: DecoderPool, command: str) -> list[tuple[Item, Media]]:
    """The rows that can be decoded, with their media; the others are counted in one line on standard error.

    Raises:
        UsageError: there is no row, or none can be decoded.
    """
    found: list[tuple[Item, Media]] = []
    errors: list[str] = []
    for item in items:
        try:
            found.append((item, decode_item(item, Uniform(FRAMES), MAX_PIXELS, decoders)))
        except ImageError as error:
            errors.append(f"{item.id or item.file_name or item.path}: {one_line(error)}")
    if not found:
        raise UsageError(f"{command}: {errors[0] if errors else 'no pictures or clips'}")
    if errors:
        print_stderr(f"mmspec: skipped {len(errors)} of {len(items)} that cannot be read; the first: {errors[0]}")
    return found
