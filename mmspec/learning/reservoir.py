"""A bounded memory of examples on the host: the latest ones, in a ring."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.interfaces import Examples, LearningSpec

MAX_EXAMPLES = 16384
MAX_RESERVOIR_BYTES = 64 << 20
"""Host memory of a reservoir; large hidden states get fewer examples."""


class ExampleReservoir:
    """The latest examples; a full one overwrites the oldest.

    Attributes:
        capacity: largest number of examples.
        num_dropped: examples that were not stored because a value was not finite.
    """

    def __init__(self, spec: LearningSpec, dtype: torch.dtype, max_bytes: int = MAX_RESERVOIR_BYTES) -> None:
        self.capacity = max(1, min(MAX_EXAMPLES, max_bytes // (spec.input_size * dtype.itemsize)))
        self.num_dropped = 0
        self._inputs = torch.empty(self.capacity, spec.input_size, dtype=dtype)
        self._root_ids = torch.empty(self.capacity, dtype=torch.int64)
        self._next_ids = torch.empty(self.capacity, spec.num_next, dtype=torch.int64)
        self._size = 0
        self._next = 0

    def __len__(self) -> int:
        return self._size

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self._inputs.nbytes + self._root_ids.nbytes + self._next_ids.nbytes

    @torch.no_grad()
    def add(self, examples: Examples) -> None:
        """Store copies of the examples with finite inputs and at least one token to predict."""
        examples = examples.to("cpu")
        is_finite = torch.isfinite(examples.inputs).all(1)
        self.num_dropped += int((~is_finite).sum())
        rows = (is_finite & (examples.next_ids[:, 0] >= 0)).nonzero()[-self.capacity :, 0]
        index = (self._next + torch.arange(len(rows))) % self.capacity
        self._inputs[index] = examples.inputs[rows].to(self._inputs.dtype)
        self._root_ids[index] = examples.root_ids[rows]
        self._next_ids[index] = examples.next_ids[rows]
        self._next = (self._next + len(rows)) % self.capacity
        self._size = min(self.capacity, self._size + len(rows))

    def sample(self, count: int, rng: torch.Generator) -> Examples:
        """`count` examples drawn with replacement, inputs in float32."""
        rows = torch.randint(self._size, (count,), generator=rng)
        return Examples(self._inputs[rows].float(), self._root_ids[rows], self._next_ids[rows])

    def token_ids(self) -> Tensor:
        """[n] int64, increasing, all tokens that are to be predicted."""
        ids = self._next_ids[: self._size].unique()
        return ids[ids >= 0]


__all__ = ["MAX_EXAMPLES", "MAX_RESERVOIR_BYTES", "ExampleReservoir"]
