"""Which frames of a video are read: evenly, by the second, or those that differ from each other.

Samplers know how many frames there are and how fast they follow, some look at thumbnails; none knows files or decoders.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MOST_LOOKS = 256
"""Thumbnails that a sampler may ask for."""


@dataclass(frozen=True)
class Uniform:
    """`count` frames, one of each of `count` equal stretches; all of them if there are no more.

    Attributes:
        hf: the first frame of each stretch, as transformers' `default_sample_indices_fn` (which refuses to read more
            frames than there are); otherwise the one in the middle, so that the end of a clip is seen too.

    Raises:
        ValueError: a count below 1.
    """

    count: int = 8
    hf: bool = False

    def __post_init__(self) -> None:
        check_count("count", self.count)

    def sample(self, total: int, fps: float) -> list[int]:
        """See `mmspec.interfaces.FrameSampler`."""
        count = min(self.count, total)
        if self.hf:
            return [number * total // count for number in range(count)]
        return [(2 * number + 1) * total // (2 * count) for number in range(count)]


@dataclass(frozen=True)
class ByRate:
    """`rate` frames for each second of the video, evenly: at least one, `most` at most, and none twice.

    Seconds are reckoned by the average rate. Where frames follow each other unevenly, so do the times of those chosen.

    Attributes:
        hf: the first frame of each stretch, as in `Uniform`; how many there are is transformers' number either way.

    Raises:
        ValueError: a rate that is not positive, or `most` below 1.
    """

    rate: float = 1.0
    most: int = 64
    hf: bool = False

    def __post_init__(self) -> None:
        check_rate("rate", self.rate)
        check_count("most", self.most)

    def sample(self, total: int, fps: float) -> list[int]:
        """See `mmspec.interfaces.FrameSampler`."""
        if not fps > 0:
            raise ValueError(f"frames by the second need a video that says how fast it is; fps is {fps}. Give a count.")
        wanted = max(1, int(total / fps * self.rate))
        return Uniform(min(wanted, self.most), self.hf).sample(total, fps)


@dataclass(frozen=True)
class Differing:
    """`count` frames that differ from each other: what is shown only briefly is kept, what stands still comes once.

    Looks at thumbnails of `looks` frames, evenly spread. Takes the most typical one, then again and again the one
    that is least like any taken so far (Gonzalez 1985, farthest-first traversal). A clip in which nothing moves is
    taken evenly.

    Raises:
        ValueError: a count below 1, or fewer looks than that, or more than 256.
    """

    count: int = 8
    looks: int = 64

    def __post_init__(self) -> None:
        check_count("count", self.count)
        if not self.count <= self.looks <= MOST_LOOKS:
            raise ValueError(
                f"looks must lie between count ({self.count}) and {MOST_LOOKS}: frames are chosen among those looked "
                f"at; got {self.looks}."
            )

    def sample(self, total: int, fps: float) -> list[int]:
        """The frames to look at."""
        return Uniform(self.looks).sample(total, fps)

    def select(self, indices: list[int], thumbnails: Tensor) -> list[int]:
        """See `mmspec.interfaces.ContentAwareSampler`."""
        seen = thumbnails.flatten(1).float()
        apart = torch.cdist(seen, seen, p=1) / seen.shape[1]  # mean difference of a colour value, 0 to 255
        when = torch.tensor(indices, dtype=torch.float32)
        when = when / max(1.0, float(when.max()))
        # Less than a step of one colour value, so that time decides only between frames that look the same.
        apart = apart + 0.5 * (when[:, None] - when[None]).abs()
        taken = [int(apart.sum(1).argmin())]
        while len(taken) < min(self.count, len(indices)):
            taken.append(int(apart[:, taken].amin(1).argmax()))
        return [indices[place] for place in sorted(taken)]


def check_count(name: str, value: int) -> None:
    """Refuse what is no whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1; got {value!r}.")


def check_rate(name: str, value: float) -> None:
    """Refuse what is no positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a positive number of frames a second; got {value!r}.")


__all__ = ["ByRate", "Differing", "Uniform", "check_count", "check_rate"]
