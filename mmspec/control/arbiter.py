"""Which of several ways to draft a round is to use: the one with the most tokens per second, as measured.

A bandit over arms whose rates change with the text and over time. Rates are running means over the rounds of each arm,
within the call and over all calls. An arm that is not the best is tried again the less often the worse it was, so that
trials cost at most about `MAX_TRIAL_COST` of the time; a trial that does better than the best is continued. One object
serves all calls and threads; it affects speed only. Knows neither drafters nor trees.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mmspec.forks import new_lock

MAX_TRIAL_COST = 0.015
"""Largest fraction of the time that trials of all worse arms may cost together."""
MIN_TRIAL_INTERVAL = 16
"""Rounds between two trials of an arm that is nearly as good as the best."""
MAX_TRIAL_INTERVAL = 512
CALL_DECAY = 0.97
"""Factor on the evidence of an arm in a call at each new round of it."""
TOTAL_DECAY = 0.998
"""The same over all calls."""
PRIOR_ROUNDS = 32.0
"""Rounds that the evidence of earlier calls counts for at the start of a call."""
MIN_CONTINUED = 1.5
"""A trial is continued if its round had at least this multiple of the best arm's rate: the text may have changed."""
MIN_KNOWN_ROUNDS = 8
"""Rounds of an arm before it is compared with others: single rounds tell little."""
FIRST_ROUNDS = 64
"""Rounds of the first arm, times rows, before others are tried: arms need some text to show what they earn."""
STALL_RATIO = 4.0
"""Ratio of a round's seconds to the mean of an arm's other rounds beyond which it says nothing."""
WARM_UP_ROUNDS = 2
"""First rounds of an arm at a number of rows, which are slow (kernels are selected) and not counted."""


@dataclass
class ArmRate:
    """Decayed sums over the rounds of one arm.

    Attributes:
        tokens: emitted per active row.
        seconds: of the rounds.
        rounds: number of rounds.
        has_stalled: whether the last round was left out.
    """

    tokens: float = 0.0
    seconds: float = 0.0
    rounds: float = 0.0
    has_stalled: bool = False

    @property
    def rate(self) -> float | None:
        """Tokens per second and row; None before the first round."""
        return self.tokens / self.seconds if self.seconds else None

    def add(self, tokens: float, seconds: float, decay: float) -> None:
        """One more round. One alone that took many times as long as the others says nothing: the machine stalled."""
        limit_s = STALL_RATIO * self.seconds / self.rounds if self.rounds else seconds
        self.has_stalled = seconds > limit_s and not self.has_stalled
        if self.has_stalled:
            return
        seconds = min(seconds, limit_s)
        if STALL_RATIO * STALL_RATIO * seconds < limit_s:  # so did all rounds before
            self.seconds = seconds * self.rounds
        self.tokens = decay * self.tokens + tokens
        self.seconds = decay * self.seconds + seconds
        self.rounds = decay * self.rounds + 1

    def scaled(self, rounds: float) -> ArmRate:
        """The same rate with the evidence of at most so many rounds."""
        factor = min(1.0, rounds / self.rounds) if self.rounds else 0.0
        return ArmRate(factor * self.tokens, factor * self.seconds, factor * self.rounds)


@dataclass
class CallRates:
    """The arms within one call, at one number of rows.

    Attributes:
        batch: rows that are drafted for (`cost_rows`): as rows end, which arm pays changes.
        arms: evidence of each arm, that of earlier calls included.
        last: arm of the last round, or None.
        continues: whether the last round was a trial that did better than the best arm.
    """

    batch: int
    arms: list[ArmRate]
    last: int | None = None
    continues: bool = False


@dataclass
class _BatchRates:
    """All calls at one number of rows."""

    arms: list[ArmRate]
    num_rounds: list[int]
    idle_rounds: list[int] = field(default_factory=list)


class DraftArbiter:
    """Chooses among `num_arms` arms."""

    def __init__(self, num_arms: int, first: int | None = None) -> None:
        """
        Args:
            num_arms: number of arms.
            first: the arm that drafts the first `FIRST_ROUNDS` rounds while it is available; None for none.
        """
        self.num_arms = num_arms
        self.first = first
        self.retried: int | None = None
        self._by_batch: dict[int, _BatchRates] = {}
        self._lock = new_lock()

    def start(self, batch: int) -> CallRates:
        """The state of a call at one number of rows."""
        with self._lock:
            return CallRates(batch, [arm.scaled(PRIOR_ROUNDS) for arm in self._rates(batch).arms])

    def retry(self, arm: int) -> None:
        """Try an arm soon, before other new ones, and forget its rates: it has changed."""
        with self._lock:
            self.retried = arm
            for rates in self._by_batch.values():
                rates.arms[arm] = ArmRate()

    def best_tokens(self, call: CallRates, available: list[bool]) -> float:
        """Mean tokens of a round of the best arm that is available; 1 before anything is known."""
        known = [arm for arm, on in zip(call.arms, available, strict=True) if on and arm.rate is not None]
        best = max(known, key=lambda arm: arm.rate or 0.0, default=None)
        return 1.0 if best is None else best.tokens / best.rounds

    def choose(self, call: CallRates, available: list[bool]) -> int:
        """The arm of the coming round, of those that are available (at least one)."""
        with self._lock:
            rates = self._rates(call.batch)
            rates.idle_rounds = [idle + 1 for idle in rates.idle_rounds]
            candidates = [arm for arm in range(self.num_arms) if available[arm]]
            if call.continues and call.last in candidates:
                return call.last
            num_first = max(MIN_KNOWN_ROUNDS, FIRST_ROUNDS // call.batch)
            if self.first is not None and self.first in candidates and rates.num_rounds[self.first] < num_first:
                return self.first
            unknown = [arm for arm in candidates if rates.num_rounds[arm] <= WARM_UP_ROUNDS or self._is_new(call, arm)]
            if unknown:
                return self.retried if self.retried in unknown else unknown[0]
            best = max(candidates, key=lambda arm: call.arms[arm].rate or 0.0)
            best_rate = call.arms[best].rate or 0.0
            for arm in candidates:
                if arm != best and rates.idle_rounds[arm] >= self._interval(
                    call.arms[arm].rate, best_rate, len(candidates)
                ):
                    return arm
            return best

    def record(self, call: CallRates, arm: int, tokens: float, seconds: float, available: list[bool]) -> None:
        """Add one round.

        Args:
            call: of the round.
            arm: that drafted.
            tokens: emitted per active row.
            seconds: of the whole round.
            available: as for `choose`.
        """
        with self._lock:
            rates = self._rates(call.batch)
            rates.num_rounds[arm] += 1
            rates.idle_rounds[arm] = 0
            if rates.num_rounds[arm] <= WARM_UP_ROUNDS:
                return
            others = [other for other in range(self.num_arms) if other != arm and available[other]]
            best = max((call.arms[other].rate or 0.0 for other in others), default=0.0)
            is_known = call.arms[arm].rounds > 0
            call.continues = is_known and (call.arms[arm].rate or 0.0) < best < tokens / seconds / MIN_CONTINUED
            call.last = arm
            call.arms[arm].add(tokens, seconds, CALL_DECAY)
            rates.arms[arm].add(tokens, seconds, TOTAL_DECAY)

    def _is_new(self, call: CallRates, arm: int) -> bool:
        """Whether an arm has drafted too few rounds to be judged."""
        return call.arms[arm].rounds < MIN_KNOWN_ROUNDS

    def _interval(self, rate: float | None, best_rate: float, num_arms: int) -> float:
        """Rounds between two trials of an arm: a trial loses 1 - rate / best_rate of a round."""
        loss = 1 - (rate or 0.0) / best_rate if best_rate else 0.0
        interval = loss * (num_arms - 1) / MAX_TRIAL_COST
        return min(MAX_TRIAL_INTERVAL, max(MIN_TRIAL_INTERVAL, interval))

    def _rates(self, batch: int) -> _BatchRates:
        if batch not in self._by_batch:
            n = self.num_arms
            self._by_batch[batch] = _BatchRates([ArmRate() for _ in range(n)], [0] * n, [0] * n)
        return self._by_batch[batch]

    def __deepcopy__(self, memo: dict[int, object]) -> DraftArbiter:
        """An empty arbiter: a deep copy of a drafter may run on another device."""
        return DraftArbiter(self.num_arms, self.first)
