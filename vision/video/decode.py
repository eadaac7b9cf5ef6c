"""Reads one video with one reader: runs the sampler and bounds memory.

Independent of the decoder.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from mmspec.interfaces import FrameSampler
from mmspec.vision.video.reader import NoFramesError, RecountedError, VideoReader, check_frame_size

logger = logging.getLogger("mmspec")

MAX_FRAMES = 256
"""Default limit on the frames of one call."""


@dataclass(frozen=True)
class FrameMetadata:
    """Properties of a video and of the frames read from it.

    Attributes:
        fps: Average frame rate; 0 if unknown.
        total_num_frames: Frames of the video.
        duration: In seconds.
        width: Of the video in pixels, after rotation; the frames may be smaller.
        height: Likewise.
        video_backend: What decoded it: "pyav".
        frames_indices: Indices of the frames read.
        timestamps: Of these, in seconds from the first frame of the video.
    """

    fps: float
    total_num_frames: int
    duration: float
    width: int
    height: int
    video_backend: str
    frames_indices: tuple[int, ...]
    timestamps: tuple[float, ...]

    def for_processor(self) -> dict[str, Any]:
        """As the fields of transformers' `VideoMetadata`, for a processor's `video_metadata=`.

        Processors compute times as index / fps: frames of a variable rate are named by the numbers that give theirs.
        """
        times = zip(self.frames_indices, self.timestamps, strict=True)
        return {
            "total_num_frames": self.total_num_frames,
            "fps": self.fps or None,
            "duration": self.duration,
            "width": self.width,
            "height": self.height,
            "video_backend": self.video_backend,
            "frames_indices": [n if abs(n - t * self.fps) <= 1 else round(t * self.fps) for n, t in times],
        }


@dataclass(frozen=True)
class Frames:
    """Frames of a video.

    Attributes:
        images: RGB images.
        metadata: Properties of the video.
    """

    images: list[Image.Image]
    metadata: FrameMetadata

    @property
    def timestamps(self) -> list[float]:
        """In seconds from the first frame of the video."""
        return list(self.metadata.timestamps)

    def array(self) -> np.ndarray:
        """[T, height, width, 3] uint8, as processors take a video."""
        return np.stack([np.asarray(image) for image in self.images])


class SamplerError(Exception):
    """A sampler raised.

    Attributes:
        original: The sampler's exception.
    """

    def __init__(self, original: Exception) -> None:
        super().__init__(str(original))
        self.original = original


def read_with(reader: VideoReader, name: str, sampler: FrameSampler, max_frames: int, max_pixels: int) -> Frames:
    """Read the frames that `sampler` selects, and close the reader.

    Args:
        reader: An open video.
        name: Name of the video, for messages.
        sampler: Selects the frames.
        max_frames: Limit on their number.
        max_pixels: Limit on the pixels of each.

    Raises:
        NoFramesError: No frame may be returned.
        SamplerError: The sampler raised.
        Exception: Any error of the reader.
    """
    with closing(reader):
        info = reader.info
        check_frame_size(info.width, info.height)
        total = info.num_frames
        try:
            found = _read_sampled(reader, sampler, total, max_frames, max_pixels)
        except RecountedError as error:
            total = error.num_frames
            logger.debug("%s has %d frames where its packets promise %d", name, total, info.num_frames)
            found = _read_sampled(reader, sampler, total, max_frames, max_pixels)
        indices, timestamps, images = found
        times = tuple(round(time, 6) for time in timestamps)
        size = info.width, info.height
        return Frames(images, FrameMetadata(info.fps, total, info.duration, *size, "pyav", tuple(indices), times))


def _read_sampled(
    reader: VideoReader, sampler: FrameSampler, total: int, max_frames: int, max_pixels: int
) -> tuple[list[int], list[float], list[Image.Image]]:
    """What the reader gives of the frames that a sampler selects out of `total`."""
    if total < 1:
        raise NoFramesError("a video without frames")
    indices = _call_sampler(sampler.sample, total, reader.info.fps)
    _check_indices(indices, range(total), max_frames)
    return reader.read(indices, getattr(sampler, "divides_time", False), max_pixels)


def _call_sampler(method: Callable[..., list[int]], *args: Any) -> list[int]:
    try:
        return list(method(*args))
    except Exception as error:
        raise SamplerError(error) from error


def _check_indices(indices: list[int], candidates: range, max_frames: int) -> None:
    """
    Raises:
        NoFramesError: There are none or too many, or they are not rising indices out of `candidates`.
    """
    if not indices or len(indices) > max_frames:
        raise NoFramesError(f"a sampler must select between 1 and {max_frames} frames; it selected {len(indices)}")
    if any(index not in candidates for index in indices) or indices != sorted(set(indices)):
        limit = len(candidates)
        raise NoFramesError(f"a sampler must select rising indices below {limit}; it selected {indices[:8]}")
