"""What a reader of videos is: its protocol, its errors and its limits. Independent of the decoders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from PIL import Image

from mmspec.vision.video.containers import FileBelow

VideoSource = str | bytes | FileBelow
"""A path, or the content of a file."""
FrameSize = tuple[int, int]
"""(width, height) in pixels."""

MAX_FRAME_PIXELS = 64_000_000
"""Largest frame in pixels; 8K has 33 million."""
MAX_TOTAL_PIXELS = 64_000_000
"""Limit on the pixels of all frames of a call: a quarter of a gigabyte."""
NO_STREAM_MESSAGE = "a video without frames: it has no video stream"


class NoFramesError(Exception):
    """No frame can be returned."""


class DamagedError(NoFramesError):
    """The file is cut, or a frame that was asked for cannot be decoded as it was encoded."""


class RecountedError(Exception):
    """The packets of the file give another number of frames than the decoder; nothing is lost. Sample again.

    Attributes:
        num_frames: Number of frames that the decoder gives, to which the reader keeps from now on.
    """

    def __init__(self, num_frames: int) -> None:
        super().__init__(f"the decoder gives {num_frames} frames")
        self.num_frames = num_frames


@dataclass(frozen=True)
class VideoInfo:
    """Properties of a video.

    Attributes:
        num_frames: Number of frames.
        fps: Average frame rate; 0 if unknown.
        duration: In seconds.
        width: In pixels, after rotation.
        height: In pixels, after rotation.
    """

    num_frames: int
    fps: float
    duration: float
    width: int
    height: int


class VideoReader(Protocol):
    """An open video."""

    info: VideoInfo

    def read(
        self, numbers: Sequence[int], by_time: bool, max_pixels: int
    ) -> tuple[list[int], list[float], list[Image.Image]]:
        """Decode frames.

        Args:
            numbers: Frame indices in rising order.
            by_time: Read the frames that are shown when those of the numbers would be if all were shown equally long,
                each once.
            max_pixels: Larger frames are scaled down; `MAX_TOTAL_PIXELS` limits all together.

        Returns:
            Indices, timestamps in seconds from the first frame of the video, and RGB images of one size.

        Raises:
            DamagedError: One of the frames is damaged.
            RecountedError: The video has another number of frames.
            Exception: Any error of the decoder.
        """

    def close(self) -> None:
        """Close the file."""


def check_frame_size(width: int, height: int) -> None:
    """
    Raises:
        NoFramesError: The frames have more than `MAX_FRAME_PIXELS`.
    """
    if width * height > MAX_FRAME_PIXELS:
        raise NoFramesError(f"frames of {width} x {height} pixels; the limit is {MAX_FRAME_PIXELS} pixels")


def fit_size(size: FrameSize, max_pixels: int) -> FrameSize:
    """The largest size with the same aspect ratio and at most `max_pixels` pixels."""
    width, height = size
    scale = math.sqrt(max_pixels / (width * height))
    if scale >= 1:
        return size
    width = max(1, min(max_pixels, int(width * scale)))  # one side of a very long strip is 1
    return width, max(1, min(int(height * scale), max_pixels // width))
