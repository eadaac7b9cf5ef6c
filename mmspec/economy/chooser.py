"""The action of each round: which source drafts how many levels, and how many nodes are scored.

One rule (renewal reward): of all actions the one with the largest

    expected tokens - rate * expected seconds

where `rate` is the tokens per second that the best action brings. Tokens and seconds are those of the rounds of a
source so far, in this call and before; of a source that has not drafted, what its levels are expected to bring and
take. Actions that might be better than they are known to be are tried within `TRIAL_SHARE` of the time. No separate
timing pass, no effect on the output. Knows neither models nor drafters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from mmspec.economy.known import MAX_CREDIT, Economy, Offer, Option, Rounds, Source
from mmspec.economy.tables import cost_rows
from mmspec.engine.tree import BUCKETS, DraftTree, bucket_size

TRIAL_SHARE = 0.01
"""Fraction of the time that trials may lose."""
CALL_CREDIT = 2.0
"""Those of `MAX_CREDIT` that trials of one call may lose."""
CALL_DECAY, TOTAL_DECAY = 0.97, 0.98
"""Factors on the evidence of a source at each round of it, within the call and over all calls."""
CONTRADICTED = 0.1
"""Factor on the counted yields of a source whose last rounds contradict those before."""
PRIOR_ROUND = 3.0
"""Rounds that the expectation from yields and seconds counts for."""
MIN_GAIN = 1.02
"""Factor by which a larger tree must bring more than decoding otherwise in the same time."""
DEFAULT_TREE_SIZE = 8
"""Tree size with `deterministic=True`, and upper bound before anything is measured."""
TRIED_TRUST, TRIED_NODES = 0.7, 4
"""Least trust in the scores of a source that is tried, and most nodes."""
FIRST_LEVELS = 3
"""Levels of the first draft, before anything is measured."""
PLAN_EVERY = 8
"""Rounds after which what is expected of sources that have not drafted is found anew; the first few each do so."""
REMEASURE_EVERY = 128
"""Rounds after which plain decoding is measured again."""
ASSUMED_ACCEPTANCE = 0.3
"""Of a node whose score is not read; trust corrects it."""
DEVICES_WITH_SCORES = frozenset({"cpu"})
"""Types of devices on which a drafter's scores are read; others would have to wait."""


class Chooser:
    """Chooses in one call. Per round: `plan`; `choose_size` if it says that there is a draft; `record`.

    Attributes:
        sources: those that may draft; the drafter of the call enters its own when it begins.
        offer: what may be made once; None for nothing.
        source: that drafts the current round; None if none does.
        levels: of its draft, as planned; a drafter that stops earlier enters what it drafted.
        rate: tokens per second and row that decoding brings at present; 0 before anything is known.
    """

    def __init__(
        self,
        economy: Economy,
        batch: int,
        *,
        sources: Sequence[Source],
        max_tree_size: int = 16,
        fixed_tree_size: int | None = None,
    ) -> None:
        """
        Args:
            economy: what is known.
            batch: B; `follow_rows` lowers it as rows end.
            sources: that may draft; empty for plain decoding.
            max_tree_size: largest tree to consider, root included.
            fixed_tree_size: size of every tree, whose shapes must not depend on timing; None to choose.
        """
        self.economy, self.sources = economy, list(sources)
        self.offer: Offer | None = None
        self.batch = self._most_rows = batch
        self.fixed_tree_size = fixed_tree_size
        self.max_tree_size = fixed_tree_size or max_tree_size
        self.source: Source | None = None
        self.levels, self.rate = 1, 0.0
        self._is_trial, self._gain, self._made_s, self._since_plain, self._number = False, 0.0, 0.0, 0, 0
        self._kept_credit = max(0.0, economy.credit - CALL_CREDIT)
        self._tried: set[str | None] = {None}
        self._rounds: dict[str, Rounds] = {}
        self._drafted: set[str] = set()
        self._plans: dict[tuple[int, str], tuple[int, float, float]] = {}
        self._options: dict[tuple[int, str], Option] = {}

    def follow_rows(self, num_rows: int) -> None:
        """From the coming round on only `num_rows` rows of the batch are scored: it costs what a smaller batch does."""
        self.batch = cost_rows(num_rows, self._most_rows)

    def plan(self) -> bool:
        """Choose the source of the coming round and its levels; whether it is drafted at all.

        What would have paid by now is made before, once, which takes long.
        """
        self.source, self.levels, self._is_trial = None, 1, False
        if not self.sources:
            return False
        self._number += 1
        if self.fixed_tree_size is None:
            self._take_offer()
        plain_s = self.economy.round_s(self.batch, 1)
        if self.fixed_tree_size is not None or plain_s is None:
            if self._number > 1 and self.fixed_tree_size is None:  # rounds of drafts are not measured in parts
                return False
            self.source = self.sources[0]
            first = self.source.max_levels if self.fixed_tree_size else min(FIRST_LEVELS, self.source.max_levels)
            self.levels = max(self.source.min_levels, first)
            return True
        options = self.options(plain_s)
        best = max(options, key=lambda option: option.rate)
        self.rate = best.rate
        hopeful = [one for one in options if one is not best and self._may_be_better(one, best)]
        for option in sorted(hopeful, key=lambda one: (one.tokens + one.spread) / one.seconds, reverse=True):
            if option.seconds - option.tokens / best.rate <= (self.economy.credit - self._kept_credit) * plain_s:
                best, self._is_trial = option, True
                break
        self.source, self.levels = best.source, best.levels
        self._tried.add(None if best.source is None else best.source.name)
        return self.source is not None

    def _may_be_better(self, one: Option, best: Option) -> bool:
        """Each call tries anew what it has not tried: no text says much of the next one."""
        is_new = one.source is not None and one.source.name not in self._tried
        return is_new or (one.tokens + one.spread) / one.seconds > best.rate

    def options(self, plain_s: float) -> list[Option]:
        """All actions, where plain decoding's round takes so many seconds."""
        if self._number <= PLAN_EVERY or self._number % PLAN_EVERY == 0:
            self._plans, self._options = {}, {}
            self._rounds = {name: one.faded(self.economy.num_rounds) for name, one in self._rounds.items()}
        plain = Option(None, 1, 1.0, plain_s, self._plain_spread())
        return [*(self._option(source) for source in self.sources), plain]

    @property
    def min_prob(self) -> float:
        """A further token is worth its time if it is accepted with this probability."""
        if self.source is None or self.fixed_tree_size:
            return 0.0
        return self.rate * self.economy.draft_s(self.source, self.batch, self.levels) / self.levels

    @property
    def waits_for(self) -> str | None:
        """What may yet be made, for people; None for nothing."""
        if self.offer is None or self.fixed_tree_size is not None:
            return None
        cost_s = self.economy.make_s(self.batch)
        return f"{self.offer.what}: would have saved {self.economy.saved_s:.1f} s so far, takes {cost_s:.1f} s to make"

    def _take_offer(self) -> None:
        """Make what would have paid for itself by now (rent or buy)."""
        offer = self.offer
        if offer is None or self.economy.saved_s < self.economy.make_s(self.batch):
            return
        self.offer, start = None, time.perf_counter()
        self.sources += offer.make()
        self._plans, self._options = {}, {}
        self._made_s = time.perf_counter() - start
        self.economy.rounds_s.add("make", 1, 1, self._made_s)

    def _count_offer(self, seconds: float) -> None:
        """What an offer would have saved in a round of so many seconds: drafts in it are guided by those of now."""
        plain_s = self.economy.round_s(self.batch, 1)
        if self.offer is None or not plain_s or self.fixed_tree_size is not None:
            return
        rate = max(self.rate, 1 / plain_s)
        likely = self._option(replace(self.offer.source, step_s=self.offer.source.step_s / (rate * plain_s)))
        self.economy.saved_s += seconds * max(0.0, 1 - rate / likely.rate)

    def _plain_spread(self) -> float:
        """Plain decoding brings one token; what it takes may be less than is known."""
        table, key = self.economy.rounds_s, ("score", self.batch, 1)
        if not table.count(*key):
            return 1.0
        return 0.0 if table.is_known(*key) and self._since_plain < REMEASURE_EVERY else 0.3

    def _option(self, source: Source) -> Option:
        """What a source is expected to bring and take; kept until it drafts."""
        key = self.batch, source.name
        if key in self._options:
            return self._options[key]
        economy, rounds = self.economy, self._known(source)
        count = rounds.count
        if key not in self._plans or count < PLAN_EVERY:
            self._plans[key] = economy.best_levels(source, self.batch, self.max_tree_size)
        levels, tokens, seconds = self._plans[key]
        weight = count + PRIOR_ROUND
        variance = max(0.0, rounds.squares / count - (rounds.tokens / count) ** 2) if count else 0.0
        total_s = PRIOR_ROUND * seconds
        for (used, size), times in rounds.sizes.items():
            total_s += times * ((economy.round_s(self.batch, size) or 0.0) + economy.draft_s(source, self.batch, used))
        tokens = (rounds.tokens + PRIOR_ROUND * tokens) / weight
        spread = math.sqrt((count * variance + PRIOR_ROUND * tokens * tokens) / weight / weight)
        found = self._options[key] = Option(source, levels, tokens, total_s / weight, spread)
        return found

    def _known(self, source: Source) -> Rounds:
        """The rounds of a source in this call, which begin with those of earlier calls."""
        if source.name not in self._rounds:
            known = self.economy.rounds.get(source.name, Rounds())
            self._rounds[source.name] = known.for_a_call(self.economy.num_rounds)
        return self._rounds[source.name]

    # --- the size of the tree -----------------------------------------------------------------------------------------

    def choose_size(self, tree: DraftTree, num_active: int, max_gain: float = math.inf) -> int:
        """Number of nodes of `tree` worth scoring; 1 is plain decoding. The draft's own cost is spent either way.

        Args:
            tree: the draft.
            num_active: rows that are still being decoded.
            max_gain: upper bound of the tokens beyond one each that these rows may still emit.
        """
        is_read = tree.num_nodes > 1 and not self.fixed_tree_size
        return self.choose_nodes(expected_gains(tree, num_active) if is_read else [], num_active, max_gain)

    def choose_size_in_advance(self, device: torch.device, num_active: int, max_gain: float = math.inf) -> int | None:
        """`choose_size` before the draft; None where it depends on the draft, whose scores are read on a CPU only.

        Args:
            device: of the draft.
            num_active: as in `choose_size`.
            max_gain: as in `choose_size`.
        """
        if device.type in DEVICES_WITH_SCORES and not self.fixed_tree_size:
            return None
        return self.choose_nodes(_assumed_gains(self.max_tree_size, num_active), num_active, max_gain)

    def choose_nodes(self, gains: Sequence[float], num_active: int, max_gain: float = math.inf) -> int:
        """`choose_size` by the expected tokens: the number of nodes with the largest tokens - rate * seconds.

        Args:
            gains: [N] of `expected_gains`; empty where nothing was drafted.
            num_active: as in `choose_size`.
            max_gain: as in `choose_size`.
        """
        self._gain = 0.0
        if self.fixed_tree_size or not gains:
            return self.fixed_tree_size or 1
        assert self.source is not None
        if self._is_trial and self.source.max_levels > 1:  # of what is planned
            planned = min(len(gains), bucket_size(min(BUCKETS[-1], 1 + self.levels * self.source.tokens_per_level)))
            self._gain = min(gains[planned - 1], max_gain)
            return planned
        economy, trust = self.economy, self.economy.trust(self.source)
        plain_s = economy.round_s(self.batch, 1)
        limit = min(len(gains), self.max_tree_size if plain_s else DEFAULT_TREE_SIZE)
        if self._is_trial:  # what was wrong before may be true by now
            trust, limit = max(TRIED_TRUST, trust), min(TRIED_NODES, limit)
        rate = MIN_GAIN * num_active * self.rate
        best, best_value = 1, 0.0
        for size in (size for size in BUCKETS if 1 < size <= limit):
            seconds = (economy.round_s(self.batch, size) or 0.0) - (plain_s or 0.0)
            value = min(gains[size - 1] * trust, max_gain) - rate * seconds
            if value > best_value:
                best, best_value = size, value
        self._gain = min(gains[best - 1], max_gain)
        return best

    # --- what came of it ----------------------------------------------------------------------------------------------

    def record(
        self,
        num_nodes: int,
        *,
        draft_s: float,
        score_s: float,
        overhead_s: float,
        num_accepted: Sequence[int],
        is_whole: bool = False,
    ) -> None:
        """Add the measurements of one round.

        Args:
            num_nodes: size of the scored tree.
            draft_s: seconds of the draft, and of `observe`.
            score_s: seconds of the target's forward, sampling and acceptance.
            overhead_s: seconds of everything else.
            num_accepted: tokens emitted beyond one by each row that was not finished.
            is_whole: `score_s` has the draft in it, which takes what the round is longer than is known without it.
        """
        economy, source = self.economy, self.source
        if not self.sources:
            return
        if is_whole:
            draft_s += max(0.0, score_s - (economy.rounds_s.get("score", self.batch, num_nodes) or score_s))
        else:
            economy.rounds_s.add("score", self.batch, num_nodes, score_s)
        economy.rounds_s.add("rest", self.batch, num_nodes, overhead_s)
        self._since_plain = 0 if num_nodes == 1 else self._since_plain + 1
        with economy.lock:
            economy.num_rounds += 1
            plain_s = economy.round_s(self.batch, 1) or 0.0
            seconds = economy.round_s(self.batch, num_nodes) or 0.0
            tokens = 1 + sum(num_accepted) / max(1, len(num_accepted))
            if source is not None:
                if (own_s := draft_s - self._made_s) > 0 or not is_whole:  # a difference tells nothing of the clock
                    economy.drafts_s.add(source.name, self.batch, self.levels, own_s)
                seconds += economy.draft_s(source, self.batch, self.levels)
                self._count(source, num_nodes, tokens, num_accepted)
            earned_s = tokens / self.rate - seconds if self._is_trial and self.rate else TRIAL_SHARE * seconds
            self._count_offer(seconds)
            earned = earned_s / plain_s if plain_s else 0.0
            economy.credit = min(MAX_CREDIT, economy.credit + earned)
        self.source, self._gain, self._made_s = None, 0.0, 0.0

    def _count(self, source: Source, num_nodes: int, tokens: float, num_accepted: Sequence[int]) -> None:
        """What a source has brought."""
        economy, size = self.economy, (self.levels, num_nodes)
        known = self._rounds[source.name] = self._known(source).faded(economy.num_rounds - 1)
        if known.add(tokens, size, CALL_DECAY):
            economy.yields.fade(source.name, CONTRADICTED)
        self._options.pop((self.batch, source.name), None)
        total = economy.rounds.setdefault(source.name, Rounds())
        total.calls += source.name not in self._drafted
        self._drafted.add(source.name)
        total.add(tokens, size, TOTAL_DECAY)
        total.last = known.last = economy.num_rounds
        outcomes: list[tuple[Any, float, float]] = []
        if self._gain > 0:
            economy.count_trust(source, sum(num_accepted), self._gain)
        if source.max_levels * source.tokens_per_level > 1:
            drafted = min(self.levels * source.tokens_per_level, num_nodes - 1)
            for depth in range(source.max_levels * source.tokens_per_level):
                reached = sum(count >= depth for count in num_accepted) if depth < drafted else 0
                outcomes.append(
                    ((source.name, depth), sum(count > depth for count in num_accepted) if reached else 0, reached)
                )
        economy.yields.add(outcomes)


def expected_gains(tree: DraftTree, num_active: int) -> list[float]:
    """[N] expected tokens beyond one per row if the first n + 1 nodes are scored, summed over rows."""
    if tree.scores is None or tree.scores.device.type not in DEVICES_WITH_SCORES:
        return _assumed_gains(tree.num_nodes, num_active)
    scores = torch.where(tree.node_mask, tree.scores, 0.0)
    scores[:, 0] = 0.0
    return scores.sum(0).cumsum(0).tolist()


def _assumed_gains(num_nodes: int, num_active: int) -> list[float]:
    """[N] `expected_gains` of a tree whose scores are not read."""
    return [ASSUMED_ACCEPTANCE * num_active * node for node in range(num_nodes)]
