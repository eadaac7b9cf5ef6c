"""`arbitrated`: n-grams, these with what is learned, or a copy in 4 bits, whichever pays most; and `instant`.

Every round one arm drafts; all learn from what the target emits. `DraftArbiter` chooses by measured tokens per
second. The arms are subsets of the sources of one best-first drafter, so their probabilities are calibrated together.
With learning, n-grams of all outputs join the union of both (`outputs`), and there is one more arm, `instant`: these
n-grams and instant heads, in C where that is possible. Before anything is learned `outputs` drafts as `hybrid`
does, so it is the arm to begin with, and `hybrid` is none of its own. Lookup is cheap and its own estimate is good
where it copies a long match, so its draft is used whenever it promises more than the best arm gets, without a trial.
A copy of the target in few bits, for which the n-grams draft, is an arm once decoding has taken `COPY_PATIENCE` times
as long as making it will. The module knows neither how instant heads are learned nor when.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mmspec.control.arbiter import CallRates, DraftArbiter
from mmspec.control.round_cost import cost_rows
from mmspec.drafters.heads.instant.online import HeadsState, OnlineHeads
from mmspec.drafters.model.chain import ChainState
from mmspec.drafters.model.self_drafter import QuantizedDrafter
from mmspec.drafters.ngram.base import BestFirstDrafter, BestFirstState
from mmspec.drafters.ngram.lookup import NgramIndex, PromptLookup
from mmspec.drafters.ngram.output_ngrams import OutputNgrams, OutputState
from mmspec.drafters.ngram.recycling import SuccessorTable
from mmspec.engine.tree import DraftTree
from mmspec.interfaces import Prompt, VerifyResult
from mmspec.learning.protocols import ClosedFormFit, Examples

LOOKUP, RECYCLING, HYBRID, OUTPUTS, INSTANT, COPY = range(6)
ARM_NAMES = ("lookup", "recycling", "hybrid", "outputs", "instant", "copy")
_ENABLED_SOURCES = {
    LOOKUP: [True, False, False],
    RECYCLING: [False, True, False],
    HYBRID: [True, True, False],
    OUTPUTS: [True, True, True],
    INSTANT: [False, False, True],  # the others cost more than they add to heads
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
        heads: state of the instant heads, or None.
        chain: state of the copy that drafts, or None.
        by_rows: {`cost_rows`: rates of the arms in this call}.
        rates: those of the current round.
        arm: that drafted the current round; None if none did.
        start_time: of the draft.
        last_time: of the end of the last round, drafted or not.
        available: arms that could have drafted it.
    """

    ngram: BestFirstState
    heads: HeadsState | None
    chain: ChainState | None
    by_rows: dict[int, CallRates]
    rates: CallRates
    arm: int | None = None
    start_time: float = 0.0
    last_time: float = field(default_factory=time.perf_counter)
    available: list[bool] = field(default_factory=list)

    @property
    def outputs(self) -> OutputState:
        """State of the n-grams of all outputs."""
        state: OutputState = self.ngram.source_states[-1]
        return state


class ArbitratedDrafter:
    """Drafts with the arm (a subset of the n-gram sources, or instant heads) that yields the most tokens per second.

    Attributes:
        name: of the drafter.
        ngram: the best-first drafter; the arms are subsets of its sources.
        heads: the instant heads, or None.
        copied: drafts with a copy of the target in few bits; None where there is none.
        arms: that may draft; `INSTANT` only once the heads have learned something, `COPY` once there is one.
        arbiter: measures the arms.
    """

    def __init__(
        self,
        heads: OnlineHeads | None = None,
        arms: Sequence[int] | None = None,
        name: str = "",
        may_copy: bool = False,
    ) -> None:
        """
        Args:
            heads: instant heads for one target, with which the drafter learns.
            arms: that may draft; None for all that can.
            name: of the drafter.
            may_copy: whether a copy of the target may be made, on a CPU.
        """
        self.name = name or "arbitrated"
        self._outputs = OutputNgrams(records=may_copy)  # from which the copy takes its guesses
        self.ngram = BestFirstDrafter(self.name, [PromptLookup(), SuccessorTable(), self._outputs])
        self.heads = heads
        if arms is None:
            arms = (LOOKUP, RECYCLING, HYBRID) if heads is None else (LOOKUP, RECYCLING, OUTPUTS, INSTANT)
        self.copied = QuantizedDrafter(guide=self.ngram, is_optional=True) if may_copy else None
        self.arms = frozenset((*arms, COPY) if may_copy else arms)
        self._decode_s = 0.0
        self._make_s = math.inf
        self._waits = True
        self.arbiter = DraftArbiter(len(ARM_NAMES), first=HYBRID if heads is None else OUTPUTS)
        self.vocab_size = self.ngram.vocab_size if heads is None else heads.vocab_size
        self.requirements = self.ngram.requirements if self.copied is None else self.copied.requirements
        if heads is not None:
            self.requirements = replace(self.requirements, hidden_state_indices=(heads.hidden_state_index,))

    # --- the Drafter protocol -----------------------------------------------------------------------------------------

    def begin(self, prompt: Prompt) -> ArbitratedState:
        """Start all arms."""
        heads = None if self.heads is None else self.heads.begin(prompt)
        ngram = self.ngram.begin(prompt)
        chain = None if self.copied is None or prompt.layer_subsets is None else self.copied.begin(prompt)
        if chain is not None and prompt.layer_subsets is not None:
            chain.guide, self._make_s = ngram, prompt.layer_subsets.make_s
        batch = len(prompt.input_ids)
        by_rows = {batch: self.arbiter.start(batch)}
        state = ArbitratedState(ngram, heads, chain, by_rows, by_rows[batch])
        state.outputs.flag(prompt.banned_ids, prompt.stop_ids)
        return state

    def propose(self, state: ArbitratedState, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        """The draft of lookup if it promises more than the best arm gets, else that of the chosen arm."""
        state.start_time, num_rows = time.perf_counter(), cost_rows(sum(active), len(active))
        if num_rows not in state.by_rows:
            state.by_rows[num_rows] = self.arbiter.start(num_rows)
        state.rates = state.by_rows[num_rows]
        self.ngram.catch_up(state.ngram)
        state.available = [arm in self.arms for arm in range(len(ARM_NAMES))]
        state.available[INSTANT] &= self.heads is not None and self.heads.is_ready
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
        if arm == INSTANT and self.heads is not None and state.heads is not None:
            state.outputs.heads = self.heads.distributions(state.heads)
            max_nodes = self.ngram.limit_nodes(state.ngram, max_nodes)
            drafted = self._outputs.draft(state.outputs, max_nodes, active, self.ngram.calibration)
            if drafted is not None:
                tree, state.ngram.candidates = drafted
                return tree
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
        if self.heads is not None and state.heads is not None:
            self.heads.observe(state.heads, result, hidden_states)
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
        """Whether from now on there may be a copy (`mmspec.interfaces.GrowingDrafter`)."""
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


class LearnableArbitratedDrafter(ArbitratedDrafter):
    """With instant heads, whose learning is that of the whole: a `mmspec.learning.protocols.ClosedFormDrafter`."""

    heads: OnlineHeads

    cannot_learn: str | None = None

    @property
    def learning_key(self) -> str:
        return self.heads.learning_key

    def start_collecting(self, state: ArbitratedState, with_examples: bool) -> None:
        """See `LearnableDrafter`; the n-grams count what the call emits, which takes hardly any time."""
        assert state.heads is not None
        self.heads.start_collecting(state.heads, with_examples)
        state.outputs.records = True

    def collected_examples(self, state: ArbitratedState) -> list[Examples]:
        """See `LearnableDrafter`: one of all rows."""
        self.ngram.catch_up(state.ngram)  # the call is over: the n-grams count its last tokens
        return [] if state.heads is None else self.heads.collected_examples(state.heads)

    def closed_form(self, device: torch.device) -> ClosedFormFit:
        return self.heads.closed_form(device)

    def publish(self, weights: Mapping[str, Tensor]) -> None:
        self.heads.publish(weights)
        self.arbiter.retry(INSTANT)
