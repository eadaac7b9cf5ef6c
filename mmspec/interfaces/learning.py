"""What online learning needs of a drafter: `LearnableDrafter`, and the `Examples` that it learns from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mmspec.interfaces.drafter import Drafter
from mmspec.interfaces.target import SharedEmbeddings


@dataclass(frozen=True)
class Examples:
    """Positions of accepted text: what a head reads there, and the tokens that the target emitted after it.

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

    def to(self, device: torch.device | str) -> Examples:
        """A copy on a device."""
        return Examples(self.inputs.to(device), self.root_ids.to(device), self.next_ids.to(device))


@dataclass(frozen=True)
class LearningSpec:
    """What a drafter learns.

    Attributes:
        key: name of the weights on disk: architecture and sizes, and a hash of the weights that learning starts from.
        input_size: S of `Examples.inputs`.
        num_next: k of `Examples.next_ids`.
        records_every_position: whether the examples of a row are all positions of its text.
        starts_untrained: whether the drafter cannot draft before it has learned.
    """

    key: str
    input_size: int
    num_next: int
    records_every_position: bool
    starts_untrained: bool


class ClosedFormFit(Protocol):
    """A fit without gradients, over sums of examples.

    Attributes:
        num_examples: positions so far.
    """

    num_examples: int

    @property
    def is_determined(self) -> bool:
        """Whether there are enough examples to `solve`."""

    def add(self, examples: Examples) -> None:
        """Add the examples of one call, in the order of the text. Those that are not finite are left out."""

    def solve(self) -> dict[str, Tensor] | None:
        """The weights to publish; None if there are no finite ones."""


@runtime_checkable
class LearnableDrafter(Drafter, Protocol):
    """A drafter whose weights can be learned from the text that the target emits.

    The learner solves a fit (`closed_form`) or trains a copy (`learnable_copy`, `learning_loss`), and swaps the weights
    in by `publish`, at any time, also while other threads draft.
    """

    @property
    def learning_spec(self) -> LearningSpec:
        """What is learned."""

    def start_recording(self, state: Any, with_examples: bool) -> None:
        """Record the call with this state (return value of `begin`).

        Args:
            state: of the call.
            with_examples: False to record nothing but what takes hardly any time, since there is none for examples.
        """

    def recorded_examples(self, state: Any) -> Examples | None:
        """The examples of the call, which is over, on the target's device; None if there are none."""

    def learnable_copy(self) -> nn.Module:
        """A float32 copy of the weights that are learned."""

    def closed_form(self, device: torch.device) -> ClosedFormFit | None:
        """A new fit in closed form with its sums on a device; None if the weights are trained by gradients."""

    def learning_loss(
        self, module: nn.Module, examples: Examples, shared_embeddings: SharedEmbeddings, candidate_ids: Tensor
    ) -> Tensor:
        """The loss, a scalar.

        Args:
            module: a copy of the weights.
            examples: a batch.
            shared_embeddings: of the target.
            candidate_ids: [V'] int64, increasing, the ids of the softmax; they contain all `next_ids`.
        """

    def publish(self, weights: Mapping[str, Tensor], candidate_ids: Tensor | None) -> None:
        """Draft with these weights from now on.

        Args:
            weights: state dict of a copy.
            candidate_ids: [V'] int64, increasing, the ids that occurred in the text; None if unknown.

        Raises:
            ValueError: names or shapes are not those of the drafter, or a value is not finite.
        """


__all__ = ["ClosedFormFit", "Examples", "LearnableDrafter", "LearningSpec"]
