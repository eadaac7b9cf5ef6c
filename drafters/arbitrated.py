"""`arbitrated`, which is `auto` without a trained head: lookup, recycling, both, or instant heads, whichever pays most.

Every round one arm drafts; all learn from what the target emits. `DraftArbiter` chooses by measured tokens per second.
Lookup is cheap and its own estimate is good where it copies a long match, so its draft is used whenever it promises
more than the best arm gets, without a trial. The module knows neither how instant heads are learned nor when.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mmspec.control.arbiter import CallRates, DraftArbiter
from mmspec.drafters.instant.drafter import InstantDrafter
from mmspec.drafters.ngram.base import BestFirstDrafter, BestFirstState
from mmspec.drafters.ngram.hybrid import hybrid
from mmspec.drafters.ngram.lookup import NgramIndex
from mmspec.engine.tree import DraftTree
from mmspec.interfaces import (
    ClosedFormFit,
    DrafterRequirements,
    Examples,
    LearningSpec,
    Prompt,
    SharedEmbeddings,
    VerifyResult,
)

LOOKUP, RECYCLING, HYBRID, INSTANT = range(4)
ARM_NAMES = ("lookup", "recycling", "hybrid", "instant")
_ENABLED_SOURCES = {LOOKUP: [True, False], RECYCLING: [False, True], HYBRID: [True, True]}
MIN_LOOKUP_MATCH = 6
"""Length of a match from which on the draft of lookup is compared with the best arm."""


@dataclass
class ArbitratedState:
    """State of one call.

    Attributes:
        ngram: state of the n-gram sources.
        instant: state of the instant heads, or None.
        rates: of the arms in this call.
        arm: that drafted the current round; None if none did.
        start_time: of the draft.
        available: arms that could have drafted it.
    """

    ngram: BestFirstState
    instant: Any
    rates: CallRates
    arm: int | None = None
    start_time: float = 0.0
    available: tuple[bool, ...] = ()


class ArbitratedDrafter:
    """Drafts by the arm that earns most.

    Attributes:
        ngram: the n-gram sources; `lookup`, `recycling` and `hybrid` are subsets of them.
        instant: the instant heads, or None.
        head: their network, or None; found here by what speeds up linear layers.
        arbiter: measures the arms.
    """

    name = "arbitrated"

    def __init__(self, instant: InstantDrafter | None = None, ngram: BestFirstDrafter | None = None) -> None:
        self.ngram = hybrid() if ngram is None else ngram
        self.instant = instant
        self.head = None if instant is None else instant.head
        self.arbiter = DraftArbiter(len(ARM_NAMES))
        self.vocab_size = self.ngram.vocab_size if instant is None else instant.vocab_size
        requirements = self.ngram.requirements
        if instant is not None:
            requirements = DrafterRequirements(
                instant.requirements.hidden_state_indices,
                requirements.top_k,
                max(requirements.max_tree_size, instant.requirements.max_tree_size),
            )
        self.requirements = requirements

    # --- the Drafter protocol -----------------------------------------------------------------------------------------

    def begin(self, prompt: Prompt) -> ArbitratedState:
        """Start all arms."""
        instant = None if self.instant is None else self.instant.begin(prompt)
        return ArbitratedState(self.ngram.begin(prompt), instant, self.arbiter.start(len(prompt.input_ids)))

    def propose(self, state: ArbitratedState, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        """The draft of lookup if it promises more than the best arm gets, else that of the chosen arm."""
        state.start_time = time.perf_counter()
        can_use_instant = self.instant is not None and self.instant.is_ready
        state.available = (True, True, True, can_use_instant)
        if self._has_long_match(state, active):
            state.arm = None  # not measured as the arm's: these are its best rounds
            tree = self._propose_ngram(state, LOOKUP, max_nodes, active)
            if 1 + _expected_gain(tree, active) > self.arbiter.best_tokens(state.rates, list(state.available)):
                return tree
            state.ngram.candidates = []  # of a draft that is not scored
        state.arm = self.arbiter.choose(state.rates, list(state.available))
        if state.arm == INSTANT:
            assert self.instant is not None
            return self.instant.propose(state.instant, max_nodes, active)
        return self._propose_ngram(state, state.arm, max_nodes, active)

    def _propose_ngram(self, state: ArbitratedState, arm: int, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        state.ngram.enabled = _ENABLED_SOURCES[arm]
        return self.ngram.propose(state.ngram, max_nodes, active)

    def _has_long_match(self, state: ArbitratedState, active: Sequence[bool]) -> bool:
        """Whether lookup can copy a long match in most of the active rows."""
        indices: list[NgramIndex] = state.ngram.source_states[0]
        lengths = [index.longest_match() for index, is_active in zip(indices, active, strict=True) if is_active]
        return 2 * sum(length >= MIN_LOOKUP_MATCH for length in lengths) > len(lengths)

    def observe(self, state: ArbitratedState, result: VerifyResult, hidden_states: Mapping[int, Tensor]) -> None:
        """Let all arms follow, and measure the one that drafted."""
        self.ngram.observe(state.ngram, result, {})
        if self.instant is not None:
            self.instant.observe(state.instant, result, hidden_states)
        num_rows = sum(map(bool, result.emitted_ids))
        if state.arm is not None and num_rows:
            tokens = sum(map(len, result.emitted_ids)) / num_rows
            seconds = time.perf_counter() - state.start_time
            self.arbiter.record(state.rates, state.arm, tokens, seconds, list(state.available))
        state.arm = None

    def replicate(self) -> ArbitratedDrafter:
        """A drafter in the same state that shares weights but no mutable state with this one."""
        return copy.deepcopy(self)


def _expected_gain(tree: DraftTree, active: Sequence[bool]) -> float:
    """Accepted tokens per active row that an n-gram draft, which is on the host, expects."""
    if tree.num_nodes == 1 or tree.scores is None:
        return 0.0
    return float((tree.scores[:, 1:] * tree.node_mask[:, 1:]).sum()) / max(1, sum(active))


class LearnableArbitratedDrafter(ArbitratedDrafter):
    """With instant heads, whose learning is that of the whole: a `mmspec.interfaces.LearnableDrafter`."""

    instant: InstantDrafter

    @property
    def learning_spec(self) -> LearningSpec:
        """See `LearnableDrafter`."""
        return self.instant.learning_spec

    def start_recording(self, state: ArbitratedState) -> None:
        """See `LearnableDrafter`."""
        self.instant.start_recording(state.instant)

    def recorded_examples(self, state: ArbitratedState) -> Examples | None:
        """See `LearnableDrafter`."""
        return self.instant.recorded_examples(state.instant)

    def learnable_copy(self) -> nn.Module:
        """See `LearnableDrafter`."""
        return self.instant.learnable_copy()

    def closed_form(self, module: nn.Module) -> ClosedFormFit | None:
        """See `LearnableDrafter`."""
        return self.instant.closed_form(module)

    def learning_loss(
        self, module: nn.Module, examples: Examples, shared_embeddings: SharedEmbeddings, candidate_ids: Tensor
    ) -> Tensor:
        """See `LearnableDrafter`."""
        return self.instant.learning_loss(module, examples, shared_embeddings, candidate_ids)

    def publish(self, weights: Mapping[str, Tensor], candidate_ids: Tensor | None) -> None:
        """See `LearnableDrafter`."""
        was_ready = self.instant.is_ready
        self.instant.publish(weights, candidate_ids)
        if not was_ready:
            self.arbiter.retry(INSTANT)


__all__ = ["ARM_NAMES", "ArbitratedDrafter", "ArbitratedState", "LearnableArbitratedDrafter"]
