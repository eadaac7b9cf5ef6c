"""One reading of a video with one reader: asks the sampler, shows it thumbnails if it wants to look, bounds memory.

Knows neither which readers there are nor what is done when one fails.
"""

from __future__ import annotations

import logging
import math
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from mmspec.interfaces import ContentAwareSampler, FrameSampler
from mmspec.vision.video.backends import (
    MOST_PIXELS,
    THUMBNAIL,
    EndedEarlyError,
    NoFramesError,
    Reader,
    Size,
    check_frame,
)

logger = logging.getLogger("mmspec")

MOST_FRAMES = 256
"""Frames that one call may read, unless it is told otherwise, and thumbnails that a sampler may look at."""
PIXELS_A_CALL = 64_000_000
"""All frames of a call together have no more than these: a quarter of a gigabyte."""


@dataclass(frozen=True)
class Metadata:
    """What a video is, and which of it was read.

    Attributes:
        fps: frames a second on average, 0 if unknown. total: frames. duration: seconds.
        width, height: of the video as it is shown, in pixels; the frames that were read may be smaller.
        backend: who read it. indices: the frames that were read.
    """

    fps: float
    total: int
    duration: float
    width: int
    height: int
    backend: str
    indices: tuple[int, ...]

    def for_processor(self) -> dict[str, Any]:
        """The same by the names of transformers' `VideoMetadata`, which processors take as `video_metadata=`."""
        return {
            "total_num_frames": self.total,
            "fps": self.fps or None,
            "duration": self.duration,
            "width": self.width,
            "height": self.height,
            "video_backend": self.backend,
            "frames_indices": list(self.indices),
        }


@dataclass(frozen=True)
class Frames:
    """RGB pictures, the second of each counted from the first frame of the video, and what the video is."""

    images: list[Image.Image]
    times: list[float]
    metadata: Metadata

    def array(self) -> np.ndarray:
        """[T, height, width, 3] uint8, as processors take a clip."""
        return np.stack([np.asarray(image) for image in self.images])


class SamplerError(Exception):
    """A sampler failed: its own error, which no other reader will mend."""

    def __init__(self, inner: Exception) -> None:
        super().__init__(str(inner))
        self.inner = inner


def read_with(reader: Reader, backend: str, name: str, sampler: FrameSampler, most: int, max_pixels: int) -> Frames:
    """What `sampler` chooses of an open video, which is closed.

    Args:
        backend, name: what reader and video are called. most: frames that may be read. max_pixels: of each of them.

    Raises:
        NoFramesError: nothing that may be returned. SamplerError: the sampler failed. Anything else: the reader did.
    """
    with closing(reader):
        about = reader.about
        check_frame(about.width, about.height, MOST_PIXELS)
        total = about.total
        try:
            chosen, images, times = _chosen(reader, sampler, total, most, max_pixels)
        except EndedEarlyError as error:
            total = error.total
            logger.warning("%s ends early: %d of %d frames can be decoded", name, total, about.total)
            chosen, images, times = _chosen(reader, sampler, total, most, max_pixels)
        held = Metadata(about.fps, total, about.duration, about.width, about.height, backend, tuple(chosen))
        return Frames(images, [round(time, 6) for time in times], held)


def _chosen(
    reader: Reader, sampler: FrameSampler, total: int, most: int, max_pixels: int
) -> tuple[list[int], list[Image.Image], list[float]]:
    """The frames that a sampler chooses out of `total`, their pictures and times."""
    if total < 1:
        raise NoFramesError("a video without frames")
    looks = isinstance(sampler, ContentAwareSampler)
    chosen = _asked(sampler.sample, total, reader.about.fps)
    _check(chosen, range(total), MOST_FRAMES if looks else most)
    if isinstance(sampler, ContentAwareSampler):
        seen, _ = reader.read(chosen, (THUMBNAIL, THUMBNAIL))
        looked = chosen
        chosen = _asked(sampler.select, looked, torch.from_numpy(np.stack([np.asarray(image) for image in seen])))
        _check(chosen, looked, most)
    size = _fitted((reader.about.width, reader.about.height), min(max_pixels, PIXELS_A_CALL // len(chosen)))
    return (chosen, *reader.read(chosen, size))


def _asked(choose: Any, *args: Any) -> list[int]:
    try:
        return list(choose(*args))
    except Exception as error:
        raise SamplerError(error) from error


def _check(chosen: list[int], among: range | list[int], most: int) -> None:
    if not chosen or len(chosen) > most:
        raise NoFramesError(f"between 1 and {most} frames can be read; the sampler chose {len(chosen)}")
    known = among if isinstance(among, range) else set(among)
    if any(index not in known for index in chosen) or chosen != sorted(set(chosen)):
        limit = f"below {len(among)}" if isinstance(among, range) else "among those it looked at"
        raise NoFramesError(f"the sampler must choose rising numbers {limit}; it chose {chosen[:8]}")


def _fitted(size: Size, most: int) -> Size:
    """The largest size of the same proportions with at most so many pixels."""
    width, height = size
    shrink = math.sqrt(most / (width * height))
    if shrink >= 1:
        return size
    width = max(1, min(most, int(width * shrink)))  # of a very long strip one edge is 1
    return width, max(1, min(int(height * shrink), most // width))


__all__ = ["MOST_FRAMES", "Frames", "Metadata", "SamplerError", "read_with"]
