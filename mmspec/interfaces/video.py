"""What the readers of videos need of a sampler of frames."""

from __future__ import annotations

from typing import Protocol


class FrameSampler(Protocol):
    """Chooses video frames. Runs before target and drafter, so that plain decoding reads the same frames.

    One that divides a clip evenly may have an attribute `divides_time`, True: its `sample` numbers frames as if all
    were shown equally long. Where they are not, the frames that are shown at the times of these numbers are read, none
    twice.
    """

    def sample(self, total: int, fps: float) -> list[int]:
        """Rising indices of the frames to decode, out of `total` at `fps` frames per second (0 if unknown)."""
