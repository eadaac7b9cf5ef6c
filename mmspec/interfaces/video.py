"""What the readers of videos need of a sampler of frames."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


class FrameSampler(Protocol):
    """Chooses video frames. Runs before target and drafter, so that plain decoding reads the same frames."""

    def sample(self, total: int, fps: float) -> list[int]:
        """Rising indices of the frames to decode, out of `total` at `fps` frames per second (0 if unknown)."""


@runtime_checkable
class EvenSampler(FrameSampler, Protocol):
    """A sampler that divides a clip evenly: `sample` numbers frames as if all were shown equally long.

    Where they are not, the frames that are shown at the times of these numbers are read, none twice.

    Attributes:
        divides_time: True.
    """

    divides_time: bool
