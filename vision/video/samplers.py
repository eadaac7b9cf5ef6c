"""Frame samplers: evenly spaced, at a frame rate, or frames that differ from each other.

A sampler knows the number of frames and the frame rate; content-aware ones also get thumbnails. It depends neither on
files nor on decoders.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

MAX_CANDIDATES = 256
"""Largest number of frames, or of thumbnails, that a sampler may request."""


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


@dataclass(frozen=True)
class MostDifferent:
    """`num_frames` frames that differ from each other: brief events are included, static scenes appear once.

    Compares thumbnails of `num_candidates` evenly spaced frames: starts with the most typical one, then repeatedly
    takes the one farthest from all selected so far (farthest-first traversal, Gonzalez 1985). In a static video the
    result is evenly spaced.

    Attributes:
        num_frames: Number of frames.
        num_candidates: Number of thumbnails.

    Raises:
        ValueError: `num_frames` is below 1, or `num_candidates` is not between it and `MAX_CANDIDATES`.
    """

    divides_time: ClassVar[bool] = True
    num_frames: int = 8
    num_candidates: int = 64

    def __post_init__(self) -> None:
        check_positive_int("num_frames", self.num_frames)
        if not self.num_frames <= self.num_candidates <= MAX_CANDIDATES:
            raise ValueError(
                f"num_candidates must lie between num_frames ({self.num_frames}) and {MAX_CANDIDATES}; "
                f"got {self.num_candidates}."
            )

    def sample(self, total: int, fps: float) -> list[int]:
        """Indices of the candidates."""
        return Uniform(self.num_candidates).sample(total, fps)

    def select(self, indices: list[int], thumbnails: Tensor) -> list[int]:
        import torch  # slow to import, and processes that only decode pictures do not need it

        pixels = thumbnails.flatten(1).float()
        distance = torch.cdist(pixels, pixels, p=1) / pixels.shape[1]  # mean absolute difference, 0 to 255
        time = torch.tensor(indices, dtype=torch.float32)
        time = time / max(1.0, float(time.max()))
        # Below one step of a colour value, so that time decides only between frames that look the same.
        distance = distance + 0.5 * (time[:, None] - time[None]).abs()
        selected = [int(distance.sum(1).argmin())]
        while len(selected) < min(self.num_frames, len(indices)):
            selected.append(int(distance[:, selected].amin(1).argmax()))
        return [indices[i] for i in sorted(selected)]


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
