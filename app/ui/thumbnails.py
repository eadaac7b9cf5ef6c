"""Small JPEG pictures as data URIs: of pictures, and of the frames of a clip with their times."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

from PIL import Image

from mmspec.app.io.images import Media, Video, media_images

MEDIA_SIZE = 224
"""Longest side in pixels of the picture of a run."""


def draw_media(media: Media) -> list[tuple[str, float | None]]:
    """(data URI, seconds from the start of the clip) of the picture, or of each frame that was read; None where there
    is no time."""
    images = media_images(media)
    times: Sequence[float | None] = frame_times(media) if isinstance(media, Video) else ()
    times = times if len(times) == len(images) else [None] * len(images)
    return [(to_data_uri(image, MEDIA_SIZE), time_s) for image, time_s in zip(images, times, strict=True)]


def to_data_uri(image: Image.Image, max_size: int, quality: int = 85) -> str:
    """An image of at most `max_size` pixels a side as a JPEG data URI; `quality` is that of the JPEG, 1 to 95."""
    small = image.convert("RGB")
    small.thumbnail((max_size, max_size))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=quality)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def frame_times(video: Video) -> list[float]:
    """Seconds of each frame from the start; empty where the clip gives no frame rate."""
    fps, indices = video.metadata.get("fps"), video.metadata.get("frames_indices")
    if not fps or indices is None:
        return []
    return [float(index) / float(fps) for index in indices]
