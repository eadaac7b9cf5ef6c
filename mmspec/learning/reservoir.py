"""A bounded memory of examples on the host: the latest ones."""

from __future__ import annotations

from collections import deque

import torch

from mmspec.learning.protocols import LearningExample

MAX_EXAMPLES = 256
MAX_RESERVOIR_BYTES = 64 << 20
"""Host memory of a reservoir; long sequences and large hidden states get fewer examples."""


class ExampleReservoir:
    """The latest examples; new ones replace the oldest.

    Attributes:
        max_bytes: largest size of all examples.
        nbytes: size of all examples.
        num_dropped: examples that were not stored: a value was not finite, or they were too large.
    """

    def __init__(self, max_bytes: int = MAX_RESERVOIR_BYTES) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self.num_dropped = 0
        self._examples: deque[LearningExample] = deque()

    def __len__(self) -> int:
        return len(self._examples)

    def add(self, example: LearningExample) -> None:
        """Store a copy on the host."""
        if example.nbytes > self.max_bytes or not example.is_finite:
            self.num_dropped += 1
            return
        self._examples.append(example.to("cpu"))
        self.nbytes += example.nbytes
        while self.nbytes > self.max_bytes or len(self) > MAX_EXAMPLES:
            self.nbytes -= self._examples.popleft().nbytes

    def sample(self, count: int, rng: torch.Generator) -> list[LearningExample]:
        """`count` different examples, or all if there are fewer."""
        order = torch.randperm(len(self._examples), generator=rng)[:count]
        return [self._examples[index] for index in order.tolist()]
