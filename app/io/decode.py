"""The picture or clip of a row, decoded in another process within limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmspec.app.io.images import Media, load_image
from mmspec.app.io.item import Item
from mmspec.app.io.videos import load_media, load_video
from mmspec.vision.video.decoder_pool import DecoderPool

if TYPE_CHECKING:
    from mmspec.interfaces import FrameSampler


def decode_item(item: Item, sampler: FrameSampler, max_pixels: int, decoders: DecoderPool) -> Media:
    """The media of a row.

    Raises:
        ImageError: it cannot be read or decoded.
    """
    if item.content is None:
        return load_media(item.path, sampler, max_pixels, decoders)
    data = item.content.read()
    if item.is_video:
        return load_video(data, sampler, max_pixels, decoders)
    return load_image(data, max_pixels, decoders)


__all__ = ["decode_item"]
