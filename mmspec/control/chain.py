"""Controller of drafts by a whole model: which variant of the model drafts, and how many tokens.

A variant is, for instance, a set of decoder layers of the target. Variants and lengths are compared by expected tokens
per second, from the running acceptance of each variant's tokens and from measured costs: the objective of DEL (arXiv
2504.05598, section 3.2) with seconds in place of layers. One object serves all calls of a drafter. Affects speed only.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from mmspec.control.ema import ema
from mmspec.control.round_cost import assumed_cost
from mmspec.engine.tree import bucket_size
from mmspec.forks import new_lock

ACCEPTANCE_DECAY = 0.97
"""Factor on the acceptance counts of a variant in each draft."""
PRIOR_ACCEPTED, PRIOR_DRAFTED = 1.2, 2.0
"""Prior counts of a variant."""
NUM_TRIALS = 2
"""Drafts of a variant before it is compared by its measured cost; the first one warms up."""
FIRST_LENGTH = 3
"""Tokens that a variant drafts while its acceptance is measured."""
EXPLORE_EVERY_DRAFTS = 12
"""Every so many drafts the variant that has drafted least is tried."""


@dataclass(frozen=True)
class ChainPlan:
    """How to draft in one round.

    Attributes:
        variant: the variant that drafts.
        length: largest number of tokens.
        min_prob: stop behind a token that is accepted with a smaller probability: it costs more time than it saves.
    """

    variant: Hashable
    length: int
    min_prob: float = 0.0


@dataclass
class VariantStats:
    """Measurements of one variant at one number of rows.

    Attributes:
        num_accepted: decayed number of accepted draft tokens.
        num_drafted: decayed number of draft tokens whose predecessors were all accepted.
        step_s: seconds of one draft token; 0 before it is measured.
        num_drafts: drafts so far.
    """

    num_accepted: float = PRIOR_ACCEPTED
    num_drafted: float = PRIOR_DRAFTED
    step_s: float = 0.0
    num_drafts: int = 0

    @property
    def acceptance(self) -> float:
        """Estimated probability that a draft token is accepted, given that its predecessors are."""
        return min(0.99, self.num_accepted / self.num_drafted)


@dataclass
class ChainController:
    """Chooses the variant and the length of each draft.

    Attributes:
        max_length: largest number of tokens of a draft.
        by_batch: {number of rows: {variant: measurements}}. Rows that have ended cost little: see `cost_rows`.
        base_s: {number of rows: {nodes of the round: its seconds without the draft}}.
        num_plans: {number of rows: number of `plan` calls}.
    """

    max_length: int
    by_batch: dict[int, dict[Hashable, VariantStats]] = field(default_factory=dict)
    base_s: dict[int, dict[int, float]] = field(default_factory=dict)
    num_plans: dict[int, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=new_lock, repr=False)

    def __deepcopy__(self, memo: dict[int, object]) -> ChainController:
        return self.copy()

    def copy(self) -> ChainController:
        """An independent controller with the same measurements."""
        with self.lock:
            parts = copy.deepcopy((self.by_batch, self.base_s, self.num_plans))
        return type(self)(self.max_length, *parts)

    def plan(self, batch: int, variants: Sequence[Hashable]) -> ChainPlan:
        """The plan of the coming round, for the highest expected tokens per second.

        Args:
            batch: `cost_rows` of the round.
            variants: those to choose from, the likeliest to be good first.
        """
        with self.lock:
            stats = self.by_batch.setdefault(batch, {})
            number = self.num_plans[batch] = self.num_plans.get(batch, 0) + 1
            known = [stats.setdefault(variant, VariantStats()) for variant in variants]
            if known[0].num_drafts < NUM_TRIALS:
                return ChainPlan(variants[0], min(FIRST_LENGTH, self.max_length))
            if len(variants) > 1 and number % EXPLORE_EVERY_DRAFTS == 0:
                # Not all at the beginning: drafts that do not pay would end the drafting before it has begun.
                index = min(range(len(variants)), key=lambda index: known[index].num_drafts)
                return ChainPlan(variants[index], min(FIRST_LENGTH, self.max_length))
            base_s = self.base_s.get(batch, {})
            best, best_rate = ChainPlan(variants[0], self.max_length), 0.0
            for variant, one in zip(variants, known, strict=True):
                if one.num_drafts < NUM_TRIALS:
                    continue
                length, rate = self._best_length(batch, one, base_s)
                if rate > best_rate:
                    best, best_rate = ChainPlan(variant, length, one.step_s * rate), rate
            return best

    def record(
        self,
        batch: int,
        plan: ChainPlan,
        num_drafted: int,
        num_accepted: Sequence[int],
        draft_s: float,
        base_s: float,
        num_nodes: int,
    ) -> None:
        """Update after a round with a draft.

        Args:
            batch: `cost_rows` of the round.
            plan: of the round.
            num_drafted: tokens of the draft that were scored; 0 if the draft was not.
            num_accepted: accepted draft tokens of each row that was drafted for.
            draft_s: seconds per token of the draft.
            base_s: seconds of the round without the draft.
            num_nodes: size of the tree that was scored.
        """
        with self.lock:
            stats = self.by_batch.setdefault(batch, {}).setdefault(plan.variant, VariantStats())
            stats.num_drafts += 1
            if num_drafted and num_accepted:
                reached = sum(min(count + 1, num_drafted) for count in num_accepted) / len(num_accepted)
                accepted = sum(min(count, num_drafted) for count in num_accepted) / len(num_accepted)
                stats.num_drafted = ACCEPTANCE_DECAY * stats.num_drafted + reached
                stats.num_accepted = ACCEPTANCE_DECAY * stats.num_accepted + accepted
            if stats.num_drafts > 1:
                stats.step_s = ema(stats.step_s or None, draft_s, 0.1, restart_below=0.5)
                known = self.base_s.setdefault(batch, {})
                known[num_nodes] = ema(known.get(num_nodes), base_s, 0.1, restart_below=0.5)

    def _best_length(self, batch: int, stats: VariantStats, base_s: Mapping[int, float]) -> tuple[int, float]:
        """(length, tokens per second) of the best length with a variant."""
        best, best_rate = 1, 0.0
        expected_tokens = path_prob = 1.0
        for length in range(1, self.max_length + 1):
            path_prob *= stats.acceptance
            expected_tokens += path_prob
            seconds = _expected_base_s(base_s, batch, bucket_size(length + 1)) + length * stats.step_s
            rate = expected_tokens / max(1e-9, seconds)
            if rate > best_rate:
                best, best_rate = length, rate
        return best, best_rate


def _expected_base_s(base_s: Mapping[int, float], num_rows: int, num_nodes: int) -> float:
    """Seconds of a round of so many nodes: as measured, else so little that a size which may pay is tried.

    A larger size is taken to cost as much as the nearest that was measured; a smaller one less, in proportion to its
    positions, as on a CPU.
    """
    if not base_s:
        return 0.0
    nearest = min(base_s, key=lambda size: abs(size - num_nodes))
    return base_s[nearest] * min(1.0, assumed_cost(num_rows * num_nodes) / assumed_cost(num_rows * nearest))
