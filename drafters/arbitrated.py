"""`arbitrated`: n-grams of several kinds, or a copy in 4 bits, whichever pays most.

Every round one arm drafts; all follow what the target emits. `DraftArbiter` chooses by measured tokens per second. The
arms are subsets of the sources of one best-first drafter, so their probabilities are calibrated together. `outputs`,
all of them with counts of the n-grams of all calls, is the arm to begin with. Lookup is cheap and its own estimate is
good where it copies a long match, so its draft is used whenever it promises more than the best arm gets, without a
trial. A copy of the target in few bits, for which the n-grams draft, is an arm once decoding has taken `COPY_PATIENCE`
times as long as making it will.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from mmspec.control.arbiter import CallRates, DraftArbiter
from mmspec.control.round_cost import cost_rows
from mmspec.drafters.model.chain import ChainState
from mmspec.drafters.model.self_drafter import QuantizedDrafter
from mmspec.drafters.ngram.base import BestFirstDrafter, BestFirstState
from mmspec.drafters.ngram.lookup import NgramIndex, PromptLookup
from mmspec.drafters.ngram.output_ngrams import OutputNgrams
from mmspec.drafters.ngram.recycling import SuccessorTable
from mmspec.engine.tree import DraftTree
from mmspec.interfaces import Drafter, Prompt, VerifyResult

LOOKUP, RECYCLING, OUTPUTS, COPY = range(4)
ARM_NAMES = ("lookup", "recycling", "outputs", "copy")
_ENABLED_SOURCES = {
    LOOKUP: [True, False, False],
    RECYCLING: [False, True, False],
    OUTPUTS: [True, True, True],
    COPY: [True, True, False],  # they draft for the copy
}
COPY_PATIENCE = 10
"""Decoding time before a copy of the target is made, in units of the time that making it is expected to take."""
MIN_LOOKUP_MATCH = 6
"""Length of a match from which on the draft of lookup is compared with the best arm."""


@dataclass
class ArbitratedState:
    """State of one call.

    Attributes:
        ngram: state of the sources.
        chain: state of the copy that drafts, or None.
        by_rows: {`cost_rows`: rates of the arms in this call}.
        rates: those of the current round.
        arm: that drafted the current round; None if none did.
        start_time: of the draft.
        last_time: of the end of the last round, drafted or not.
        available: arms that could have drafted it.
    """

    ngram: BestFirstState
    chain: ChainState | None
    by_rows: dict[int, CallRates]
    rates: CallRates
    arm: int | None = None
    start_time: float = 0.0
    last_time: float = field(default_factory=time.perf_counter)
    available: list[bool] = field(default_factory=list)


class ArbitratedDrafter(Drafter):
    """Drafts with the arm (a subset of the n-gram sources, or a copy) that yields the most tokens per second.

    Attributes:
        ngram: the best-first drafter; the arms are subsets of its sources.
        copied: drafts with a copy of the target in few bits; None where there is none.
        arms: that may draft; `COPY` once there is one.
        arbiter: measures the arms.
    """

    name = "arbitrated"

    def __init__(self, arms: Sequence[int] = (LOOKUP, RECYCLING, OUTPUTS), may_copy: bool = False) -> None:
        """
        Args:
            arms: that may draft, besides the copy.
            may_copy: whether a copy of the target may be made, on a CPU.
        """
        self.ngram = BestFirstDrafter(self.name, [PromptLookup(), SuccessorTable(), OutputNgrams()])
        self.copied = QuantizedDrafter(guide=self.ngram, is_optional=True) if may_copy else None
        self.arms = frozenset((*arms, COPY) if may_copy else arms)
        self._decode_s = 0.0
        self._make_s = math.inf
        self._waits = True
        self.arbiter = DraftArbiter(len(ARM_NAMES), first=OUTPUTS)
        self.vocab_size = self.ngram.vocab_size
        self.requirements = self.ngram.requirements if self.copied is None else self.copied.requirements

    # --- a call ------------------------------------------------------------------------------------------------------

    def begin(self, prompt: Prompt) -> ArbitratedState:
        """Start all arms."""
        ngram = self.ngram.begin(prompt)
        chain = None if self.copied is None or prompt.layer_subsets is None else self.copied.begin(prompt)
        if chain is not None and prompt.layer_subsets is not None:
            chain.guide, self._make_s = ngram, prompt.layer_subsets.make_s
        batch = len(prompt.input_ids)
        by_rows = {batch: self.arbiter.start(batch)}
        return ArbitratedState(ngram, chain, by_rows, by_rows[batch])

    def propose(self, state: ArbitratedState, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        """The draft of lookup if it promises more than the best arm gets, else that of the chosen arm."""
        state.start_time, num_rows = time.perf_counter(), cost_rows(sum(active), len(active))
        if num_rows not in state.by_rows:
            state.by_rows[num_rows] = self.arbiter.start(num_rows)
        state.rates = state.by_rows[num_rows]
        self.ngram.catch_up(state.ngram)
        state.available = [arm in self.arms for arm in range(len(ARM_NAMES))]
        state.available[COPY] &= state.chain is not None and self._has_copy(state.chain)
        if LOOKUP in self.arms and self._has_long_match(state, active):
            state.arm = None  # not measured as the arm's: these are its best rounds
            tree = self._propose(state, LOOKUP, max_nodes, active)
            if 1 + _expected_gain(tree, active) > self.arbiter.best_tokens(state.rates, state.available):
                return tree
            state.ngram.candidates = []  # of a draft that is not scored
        state.arm = self.arbiter.choose(state.rates, state.available)
        return self._propose(state, state.arm, max_nodes, active)

    def _propose(self, state: ArbitratedState, arm: int, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        state.ngram.enabled = _ENABLED_SOURCES[arm]
        if arm == COPY and self.copied is not None and state.chain is not None:
            return self.copied.propose(state.chain, max_nodes, active)
        return self.ngram.propose(state.ngram, max_nodes, active)

    def _has_copy(self, chain: ChainState) -> bool:
        """Whether there is a copy of the target; made once the calls have been long enough for it to pay."""
        subsets = chain.prompt.layer_subsets
        if subsets is None or self._decode_s < COPY_PATIENCE * subsets.make_s:
            return False
        if not subsets.make_s:
            return True
        if subsets.make():
            return True
        chain.prompt = replace(chain.prompt, layer_subsets=None)
        return False

    def _has_long_match(self, state: ArbitratedState, active: Sequence[bool]) -> bool:
        """Whether lookup can copy a long match in most of the active rows."""
        indices: list[NgramIndex] = state.ngram.source_states[0]
        lengths = [index.longest_match() for index, is_active in zip(indices, active, strict=True) if is_active]
        return 2 * sum(length >= MIN_LOOKUP_MATCH for length in lengths) > len(lengths)

    def observe(self, state: ArbitratedState, result: VerifyResult, hidden_states: Mapping[int, Tensor]) -> None:
        """Let all arms follow, and measure the one that drafted."""
        before = state.last_time
        self.ngram.observe(state.ngram, result, {})
        if self.copied is not None and state.chain is not None:
            self.copied.observe(state.chain, result, {})
        num_rows = sum(map(bool, result.emitted_ids))
        now = time.perf_counter()
        seconds, state.last_time = now - state.start_time, now
        self._decode_s += now - before
        if state.arm is not None and num_rows:
            tokens = sum(map(len, result.emitted_ids)) / num_rows
            self.arbiter.record(state.rates, state.arm, tokens, seconds, state.available)
        state.arm, state.start_time = None, 0.0

    def has_grown(self) -> bool:
        """Whether from now on there may be a copy."""
        waited, self._waits = self._waits, self._decode_s < COPY_PATIENCE * self._make_s
        return waited and not self._waits

    def replicate(self) -> ArbitratedDrafter:
        """A drafter in the same state that shares no mutable state with this one."""
        return copy.deepcopy(self)


def _expected_gain(tree: DraftTree, active: Sequence[bool]) -> float:
    """Accepted tokens per active row that an n-gram draft, which is on the host, expects."""
    if tree.num_nodes == 1 or tree.scores is None:
        return 0.0
    return float((tree.scores[:, 1:] * tree.node_mask[:, 1:]).sum()) / max(1, sum(active))
