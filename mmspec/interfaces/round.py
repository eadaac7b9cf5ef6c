"""The parts of a round that is one recorded function (`mmspec.engine.round`): a draft, and the forward over it.

Each part is a function of tensors that reads no value on the host, and the tensors of the coming round. It changes
nothing but keys and values behind the committed positions, so it may run twice, or fail, without an effect. States of
recurrent layers have no positions: their next values are outputs, which the host accepts (`follow_part`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from mmspec.engine.recordings import Recordings, WrittenPlace
from mmspec.engine.tree import DraftTree
from mmspec.interfaces.target import Target

ROUND = "round"
"""Owner of the recordings of rounds whose draft is no part of them."""


@dataclass(frozen=True)
class DraftPart:
    """The draft of the coming round, tokens emitted before it included.

    Attributes:
        owner: of the recordings.
        key: what else distinguishes the function from the owner's others.
        state: tensors at fixed addresses.
        inputs: tensors that differ from round to round.
        numbers: [B][n] integers of the host that differ from round to round.
        max_depth: largest depth of a node.
        hidden_state_indices: hidden states of the target that the drafter reads.
        function: (state, inputs, numbers [B, n] int64, noise [B, `max_depth` + 1, V] or None) -> the tree, and what
            the drafter keeps.
        select_hidden_states: {index: [B, N, D]} -> [B, N, S], those that the drafter reads.
    """

    owner: Hashable
    key: Hashable
    state: Sequence[Tensor]
    inputs: Sequence[Tensor]
    numbers: list[list[int]]
    max_depth: int
    hidden_state_indices: tuple[int, ...]
    function: Callable[[Sequence[Tensor], Sequence[Tensor], Tensor, Tensor | None], tuple[DraftTree, Sequence[Tensor]]]
    select_hidden_states: Callable[[Mapping[int, Tensor]], Tensor]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The draft alone as a recorded function, where the size of the tree depends on it.

        Args:
            tensors: `state`, `inputs`, [B, n] int64 `numbers`, and noise if there is any.

        Returns:
            Scores, tokens, parents and node mask of the tree, each [B, N], and what the drafter keeps.
        """
        inputs = tensors[len(self.state) :]
        numbers, *noise = inputs[len(self.inputs) :]
        tree, kept = self.function(
            tensors[: len(self.state)], inputs[: len(self.inputs)], numbers, noise[0] if noise else None
        )
        assert tree.scores is not None
        return tree.scores, tree.tokens, tree.parents, tree.node_mask, *kept


@dataclass(frozen=True)
class ScorePart:
    """The forward over a tree, and the commit of its accepted nodes.

    Attributes:
        key: what distinguishes the function from those of other rounds.
        state: tensors at fixed addresses.
        lengths: committed positions of each row.
        hidden_state_indices: of the hidden states that `forward` returns.
        forward: (state, lengths [B] int64, finished tree) -> logits [B, N, V], each hidden state [B, N, D], and what
            `commit` reads besides.
        commit: (state, lengths [B], path [B, N], counts [B], what it reads besides) -> `num_kept` tensors for
            `follow_part`; lengths and recurrent states stay as they are.
        places: (state, lengths [B]) -> where both write.
        chains_only: whether branches are cut off a tree that is drafted within the round.
        num_kept: see `commit`.
    """

    key: Hashable
    state: Sequence[Tensor]
    lengths: list[int]
    hidden_state_indices: tuple[int, ...]
    forward: Callable[[Sequence[Tensor], Tensor, DraftTree], tuple[Tensor, ...]]
    commit: Callable[[Sequence[Tensor], Tensor, Tensor, Tensor, Sequence[Tensor]], tuple[Tensor, ...]]
    places: Callable[[Sequence[Tensor], Tensor], list[WrittenPlace]]
    chains_only: bool = False
    num_kept: int = 0

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The forward alone as a recorded function, where the rest of the round must run eager.

        Args:
            tensors: `state`; [B] int64 committed lengths; tokens, parents, node mask, ancestor mask and depths of the
                sanitized tree.
        """
        *state, lengths, tokens, parents, node_mask, ancestor_mask, depths = tensors
        return self.forward(state, lengths, DraftTree(tokens, parents, node_mask, None, ancestor_mask, depths))

    def written(self, *tensors: Tensor) -> list[WrittenPlace]:
        """Keys and values that a run with these arguments has written."""
        return self.places(tensors[:-6], tensors[-6])


@runtime_checkable
class RecordableTarget(Target, Protocol):
    """A target whose forwards may be part of a recorded round.

    Attributes:
        recordings: records the round.
        device: of the forwards.
    """

    recordings: Recordings | None
    device: torch.device

    def score_part(self, num_nodes: int, hidden_state_indices: Sequence[int]) -> ScorePart | None:
        """The coming forward over trees of `num_nodes` nodes; None if it must run alone."""

    def follow_part(self, tokens: Sequence[Sequence[int]], kept: Sequence[Tensor]) -> None:
        """The functions have run, and `commit` returned `kept`: advance each row by the nodes of its `tokens`."""
