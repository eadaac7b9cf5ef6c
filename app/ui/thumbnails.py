"""Small JPEG pictures as data URIs: of pictures, and of the frames of a clip with their times."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from mmspec.app.io.images import Media, Video, media_images

MEDIA_SIZE = 224
"""Longest side in pixels of the picture of a run."""


@dataclass(frozen=True)
class TimedImage:
    """A small picture.

    Attributes:
        uri: a data URI.
        time_s: seconds from the start of the clip; None for a picture, or where the clip gives none.
    """

    uri: str
    time_s: float | None = None


def to_data_uri(image: Image.Image, max_size: int | None = None, quality: int = 85) -> str:
    """An image as a JPEG data URI.

    Args:
        image: RGB.
        max_size: longest side in pixels; None keeps the size.
        quality: of the JPEG, 1 to 95.
    """
    if max_size is not None and max(image.size) > max_size:
        image = image.copy()
        image.thumbnail((max_size, max_size))
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "JPEG", quality=quality)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def draw_media(media: Media, max_size: int = MEDIA_SIZE) -> list[TimedImage]:
    """The picture, or each frame that was read of a clip, with its time."""
    images = media_images(media)
    times: Sequence[float | None] = frame_times(media) if isinstance(media, Video) else ()
    times = times if len(times) == len(images) else [None] * len(images)
    return [TimedImage(to_data_uri(image, max_size), time_s) for image, time_s in zip(images, times, strict=True)]


def frame_times(video: Video) -> list[float]:
    """Seconds of each frame from the start; empty where the clip gives no frame rate."""
    fps, indices = video.metadata.get("fps"), video.metadata.get("frames_indices")
    if not fps or indices is None:
        return []
    return [float(index) / float(fps) for index in indices]
