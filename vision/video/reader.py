"""What a reader of videos is: its protocol, its errors and its limits. Independent of the decoders."""

from __future__ import annotations

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

    def shown_at(self, numbers: Sequence[int]) -> list[int]:
        """Indices of the frames that are shown when the frames of these numbers, rising, would be if all were shown
        equally long. None is named twice."""

    def read(self, indices: Sequence[int], size: FrameSize) -> tuple[list[Image.Image], list[float]]:
        """Decode frames.

        Args:
            indices: Frame indices in rising order.
            size: Size of the returned images.

        Returns:
            RGB images, and their timestamps in seconds from the first frame of the video.

        Raises:
            DamagedError: One of the frames is damaged.
            RecountedError: The video has another number of frames.
            Exception: Any error of the decoder.
        """

    def close(self) -> None:
        """Close the file."""


def check_frame_size(width: int, height: int, max_pixels: int = MAX_FRAME_PIXELS) -> None:
    """
    Raises:
        NoFramesError: The frames have more than `max_pixels`.
    """
    if width * height > max_pixels:
        raise NoFramesError(f"frames of {width} x {height} pixels; the limit is {max_pixels} pixels")
