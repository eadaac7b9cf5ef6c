"""What online learning needs of a drafter, and what it learns from.

`LearnableDrafter` records examples of a call and takes new weights. They are found in one of two ways:
`ClosedFormDrafter` solves equations over sums of all examples, `GradientDrafter` goes on training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

from mmspec.interfaces.drafter import Drafter
from mmspec.interfaces.target import SharedEmbeddings


class LearningExample(Protocol):
    """Tensors that were recorded of one row of a call."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""

    @property
    def is_finite(self) -> bool:
        """Whether no value is infinite or not a number."""

    def to(self, device: torch.device | str) -> Self:
        """A copy on a device."""


@dataclass(frozen=True)
class Examples:
    """Positions of accepted text: the state that a head reads there, and the tokens that the target emitted after it.

    Attributes:
        inputs: [n, S] what the head reads besides the root's token, in the order of the text.
        root_ids: [n] int64, the token that the draft starts from.
        next_ids: [n, k] int64, the k tokens after it; -1 where the text ends. If a drafter records every position and
            the rows are in the order of the text, the row of `next_ids[i, j]` is i + 1 + j.
    """

    inputs: Tensor
    root_ids: Tensor
    next_ids: Tensor

    def __len__(self) -> int:
        return len(self.root_ids)

    @property
    def nbytes(self) -> int:
        return self.inputs.nbytes + self.root_ids.nbytes + self.next_ids.nbytes

    @property
    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.inputs).all())

    def to(self, device: torch.device | str) -> Examples:
        """A copy on a device."""
        return Examples(self.inputs.to(device), self.root_ids.to(device), self.next_ids.to(device))


@runtime_checkable
class LearnableDrafter(Drafter, Protocol):
    """A drafter whose weights can be learned from the text that the target emits.

    New weights are swapped in by `publish`, at any time, also while other threads draft.
    """

    @property
    def learning_key(self) -> str:
        """Name of the weights on disk: architecture and sizes, and a hash of the weights that learning starts from."""

    @property
    def cannot_learn(self) -> str | None:
        """Why this drafter cannot learn, for messages; None if it can."""

    def start_collecting(self, state: Any, with_examples: bool) -> None:
        """Record the call with this state (return value of `begin`).

        Args:
            state: of the call.
            with_examples: False to record nothing but what takes hardly any time, since there is none for examples.
        """

    def collected_examples(self, state: Any) -> Sequence[LearningExample]:
        """The examples of the call, which is over, on the target's device."""

    def publish(self, weights: Mapping[str, Tensor]) -> None:
        """Draft with these weights from now on.

        Raises:
            ValueError: names or shapes are not those of the drafter, or a value is not finite.
        """


class ClosedFormFit(Protocol):
    """A fit without gradients, over sums of examples.

    Attributes:
        num_examples: positions so far.
    """

    num_examples: int

    @property
    def is_determined(self) -> bool:
        """Whether there are enough examples to `solve`."""

    def add(self, examples: Any) -> None:
        """Add examples of one call. Those that are not finite are left out."""

    def solve(self) -> dict[str, Tensor] | None:
        """The weights to publish; None if there are no finite ones."""


@runtime_checkable
class ClosedFormDrafter(LearnableDrafter, Protocol):
    """A `LearnableDrafter` that starts from nothing."""

    def closed_form(self, device: torch.device) -> ClosedFormFit:
        """A new fit with its sums on a device."""


@runtime_checkable
class GradientDrafter(LearnableDrafter, Protocol):
    """A `LearnableDrafter` whose weights were trained before and go on being trained."""

    def learnable_copy(self) -> nn.Module:
        """A float32 copy of the weights, with gradients."""

    def learning_loss(
        self,
        module: nn.Module,
        examples: Sequence[Any],
        shared_embeddings: SharedEmbeddings,
        rng: torch.Generator,
    ) -> Tensor:
        """The loss, a scalar.

        Args:
            module: a copy of the weights.
            examples: a batch, on the device of the copy.
            shared_embeddings: of the target.
            rng: random generator on the CPU.
        """
