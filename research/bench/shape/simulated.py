"""Drafters whose acceptance is given: each tree is replaced by one that holds the known continuation.

For models of `research.bench.shape.models`, whose next token is the successor of the last. The drafter drafts in
full; its tree is replaced by one of the same size: a chain whose first k tokens are right, and wrong siblings, so that
the target accepts k. Everything else runs as always: forward, sampling, acceptance, commit. k is drawn per row and
round, a truncated geometric distribution whose mean is tau - 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmspec.engine.recordings import Recordings
from mmspec.engine.tree import DraftTree
from mmspec.interfaces import Drafter, DrafterRequirements, Prompt, VerifyResult
from mmspec.interfaces.round import DraftPart

WRONG_OFFSET = 100
"""Successors this far ahead are wrong tokens, a different one at each node."""


def acceptance_for_tau(tau: float, depth: int) -> float:
    """Probability p of accepting each further token such that a chain of `depth` gives `tau` tokens per forward.

    tau = 1 + p + ... + p^depth, solved by bisection.

    Raises:
        ValueError: tau is not between 1 and depth + 1.
    """
    if not 1 <= tau <= depth + 1:
        raise ValueError(f"tau is 1 to {depth + 1} for {depth} draft tokens; got {tau}")
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(depth + 1)) < tau else (low, middle)
    return (low + high) / 2


class Oracle(Drafter):
    """A chain that costs nothing to draft; its tokens are placeholders for `SimulatedAcceptance`."""

    name = "oracle"
    requirements = DrafterRequirements()
    vocab_size: int | None = None

    def __init__(self, tree_size: int) -> None:
        self.tree_size = tree_size
        self._device = torch.device("cpu")

    def begin(self, prompt: Prompt) -> Any:
        """No state."""
        self._device = prompt.input_ids.device

    def propose(self, state: Any, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        """A chain of `tree_size` nodes in every row."""
        size = min(self.tree_size, max_nodes)
        index = torch.arange(size, device=self._device).expand(len(active), -1)
        return DraftTree(index.clone(), index - 1, torch.ones_like(index, dtype=torch.bool))

    def observe(self, state: Any, result: VerifyResult, hidden_states: Mapping[int, Tensor]) -> None:
        """Nothing to update."""


@dataclass
class SimulatedState:
    """State of a call: the inner drafter's, and the last token of each row."""

    inner: Any
    last_ids: list[int]


class SimulatedAcceptance(Drafter):
    """Wraps a drafter.

    Attributes:
        inner: drafts in full; only the size of its trees is used.
        tau: wanted tokens per forward of a row. depth: of its trees.
    """

    __module__ = f"mmspec.{__name__}"  # drafters of a user are checked in every round, and not recorded as a whole
    vocab_size: int | None = None

    def __init__(
        self, name: str, inner: Drafter, tau: float, depth: int, vocab_size: int, generator: torch.Generator
    ) -> None:
        self.inner, self.tau, self.depth = inner, tau, depth
        self.name = f"{name}@tau{tau:g}"
        self.requirements = replace(inner.requirements, max_tree_size=max(inner.requirements.max_tree_size, depth + 1))
        self._probability = acceptance_for_tau(tau, depth)
        self._vocab_size, self._generator = vocab_size, generator
        self._forms: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, prompt: Prompt) -> SimulatedState:
        """Start of a call."""
        return SimulatedState(self.inner.begin(prompt), prompt.input_ids[:, -1].tolist())

    def use_recordings(self, state: SimulatedState, recordings: Recordings) -> None:
        self.inner.use_recordings(state.inner, recordings)

    def propose(self, state: SimulatedState, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        """A tree of the size of the inner drafter's."""
        tree = self.inner.propose(state.inner, max_nodes, active)
        if tree.num_nodes == 1:
            return tree
        return self._tree(tree.num_nodes, torch.tensor(self._draw(state)).to(tree.tokens.device))

    def observe(self, state: SimulatedState, result: VerifyResult, hidden_states: Mapping[int, Tensor]) -> None:
        """Follow the output."""
        self._follow(state, result)
        self.inner.observe(state.inner, result, hidden_states)

    def draft_part(self, state: SimulatedState, num_nodes: int) -> DraftPart | None:
        """See `Drafter.draft_part`: the inner drafter's, with another tree."""
        part = self.inner.draft_part(state.inner, num_nodes)
        if part is None or part.max_depth < self.depth:  # which bounds the depth of its tree
            return None
        draft = part.function

        def function(
            fixed: Sequence[Tensor], inputs: Sequence[Tensor], numbers: Tensor, noise: Tensor | None
        ) -> tuple[DraftTree, Sequence[Tensor]]:
            _, kept = draft(fixed, inputs, numbers[:, :-2], noise)
            return self._tree(num_nodes, numbers[:, -2:]), kept

        numbers = [row + given for row, given in zip(part.numbers, self._draw(state), strict=True)]
        return replace(part, key=(self.depth, part.key), numbers=numbers, function=function)

    def observe_part(
        self, state: SimulatedState, result: VerifyResult, hidden_states: Tensor, kept: Sequence[Tensor]
    ) -> None:
        self._follow(state, result)
        self.inner.observe_part(state.inner, result, hidden_states, kept)

    def _draw(self, state: SimulatedState) -> list[list[int]]:
        """[B][2]: how many tokens of each row are to be accepted, and its last token."""
        draws = torch.rand(len(state.last_ids), self.depth, generator=self._generator)
        counts = (draws < self._probability).cumprod(1).sum(1).tolist()
        return [list(pair) for pair in zip(counts, state.last_ids, strict=True)]

    def _tree(self, num_nodes: int, given: Tensor) -> DraftTree:
        """The tree for `_draw` [B, 2] on the device."""
        if num_nodes not in self._forms:
            self._forms[num_nodes] = draft_form(num_nodes, self.depth, given.device)
        parents, depths = self._forms[num_nodes]
        counts, last = given.t()[:, :, None]
        index = torch.arange(num_nodes, device=given.device)
        is_right = (index <= self.depth) & (depths <= counts)
        tokens = torch.where(is_right, last + depths, last + WRONG_OFFSET + index) % self._vocab_size
        every = torch.ones_like(tokens, dtype=torch.bool)
        return DraftTree(tokens, parents.expand(len(given), -1).contiguous(), every)

    def _follow(self, state: SimulatedState, result: VerifyResult) -> None:
        state.last_ids = [
            ids[-1] if ids else last for ids, last in zip(result.emitted_ids, state.last_ids, strict=True)
        ]


def draft_form(num_nodes: int, depth: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """([N] parents, [N] depths) of a chain of `depth` nodes below the root, and siblings along it for the rest."""
    chain = [-1, *range(min(depth, num_nodes - 1))]
    parents = chain + [index % depth for index in range(num_nodes - len(chain))]
    depths = [*range(len(chain)), *(parent + 1 for parent in parents[len(chain) :])]
    return torch.tensor(parents, device=device), torch.tensor(depths, device=device)
