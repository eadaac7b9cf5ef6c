"""Frame samplers: evenly spaced, or at a frame rate.

A sampler knows the number of frames and the frame rate. It depends neither on files nor on decoders.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

MAX_CANDIDATES = 256
"""Largest number of frames that a sampler may request."""


@dataclass(frozen=True)
class Uniform:
    """One frame from each of `num_frames` intervals of equal time; all frames if there are no more.

    A frame that is shown longer than an interval is taken once, so a variable frame rate may give fewer frames.

    Attributes:
        num_frames: Number of frames.
        hf: Take the first frame of each interval, as transformers' `default_sample_indices_fn` (which refuses to sample
            more frames than there are); otherwise the middle one.

    Raises:
        ValueError: `num_frames` is below 1.
    """

    divides_time: ClassVar[bool] = True
    num_frames: int = 8
    hf: bool = False

    def __post_init__(self) -> None:
        check_positive_int("num_frames", self.num_frames)

    def sample(self, total: int, fps: float) -> list[int]:
        count = min(self.num_frames, total)
        if self.hf:
            return [i * total // count for i in range(count)]
        return [(2 * i + 1) * total // (2 * count) for i in range(count)]


@dataclass(frozen=True)
class Fps:
    """`fps` frames per second of video, evenly spaced: at least one, `max_frames` at most, none twice.

    A frame of a variable frame rate that is shown longer is taken once.

    Attributes:
        fps: Frames per second to sample.
        max_frames: Limit on the number of frames.
        hf: As in `Uniform`. The number of frames is that of transformers either way.

    Raises:
        ValueError: `fps` is not positive and finite, or `max_frames` is below 1.
    """

    divides_time: ClassVar[bool] = True
    fps: float = 1.0
    max_frames: int = 64
    hf: bool = False

    def __post_init__(self) -> None:
        check_positive_number("fps", self.fps)
        check_positive_int("max_frames", self.max_frames)

    def sample(self, total: int, fps: float) -> list[int]:
        """See `mmspec.interfaces.FrameSampler`.

        Raises:
            ValueError: The frame rate of the video is unknown.
        """
        if not fps > 0:
            raise ValueError(f"sampling by fps needs a video with a known frame rate; got {fps}. Use num_frames.")
        count = max(1, int(total / fps * self.fps))
        return Uniform(min(count, self.max_frames), self.hf).sample(total, fps)


def check_positive_int(name: str, value: int) -> None:
    """
    Raises:
        ValueError: `value` is not an integer of at least 1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1; got {value!r}.")


def check_positive_number(name: str, value: float) -> None:
    """
    Raises:
        ValueError: `value` is not a positive, finite number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"{name} must be positive and finite; got {value!r}.")
