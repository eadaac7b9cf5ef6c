"""Controller of the number of draft levels per round: the highest expected tokens per second.

One forward of the draft head computes one *level* of the draft tree, which extends paths by `tokens_per_level` tokens;
the forward of the first level also reads the tokens that were accepted since. Costs and acceptance are learned from the
decoding rounds themselves; one object serves all calls of a drafter. Affects speed only.
"""

from __future__ import annotations

import copy
import threading
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from mmspec.control.ema import ema
from mmspec.forks import new_lock

EVIDENCE_DECAY = 0.97
"""Factor on the acceptance counts in each round."""
PROBE_EVERY = 24
"""Every so many rounds one level more than the best is drafted, to measure its acceptance."""
ROUNDS_OF_A_KIND = 8
"""Rounds with all levels, then with half of them, until the cost of a level is known from their difference."""
MIN_LEVEL_S = 1e-6
"""Smallest cost of a level."""
PRIOR_COUNT = 2.0
"""Weight of the prior acceptance, in rows."""


@dataclass
class WholeRounds:
    """Rounds of one kind.

    Attributes:
        mean_s: mean seconds.
        count: how many.
        last: `DepthStats.rounds` at the last one.
    """

    mean_s: float = 0.0
    count: int = 0
    last: int = 0


@dataclass
class DepthStats:
    """Measurements at one batch size.

    Attributes:
        num_accepted: [d] decayed number of rows whose draft token at depth d + 1 was accepted.
        num_reached: [d] decayed number of rows whose draft tokens up to depth d were all accepted.
        level_s: seconds of one level after the first.
        base_s: seconds of a round without the levels after the first.
        rounds: number of `choose` calls.
        whole_s: {(levels, nodes): rounds whose levels are not timed}. Of this process.
    """

    num_accepted: list[float]
    num_reached: list[float]
    level_s: float = 0.0
    base_s: float = 0.0
    rounds: int = 0
    whole_s: dict[tuple[int, int], WholeRounds] = field(default_factory=dict)


@dataclass
class DepthController:
    """Chooses 1 to `max_levels` levels.

    Attributes:
        max_levels: largest number of levels of a draft.
        tokens_per_level: tokens by which a level extends a path (block drafters: more than one).
        prior_acceptance: assumed acceptance of each token before anything is measured.
        by_batch: {batch size: measurements}.
    """

    max_levels: int
    tokens_per_level: int = 1
    prior_acceptance: float = 0.75
    by_batch: dict[int, DepthStats] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=new_lock, repr=False)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """An independent controller of the same class with the same measurements."""
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin.lock = new_lock()
        with self.lock:
            for name, value in vars(self).items():
                if name != "lock":
                    setattr(twin, name, copy.deepcopy(value, memo))
        return twin

    def snapshot(self) -> dict[str, Any]:
        """The measurements, ready for JSON."""
        with self.lock:
            return {str(batch): asdict(replace(stats, whole_s={})) for batch, stats in self.by_batch.items()}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Take over the measurements of another process at batch sizes that were not measured here.

        Raises:
            ValueError: they are of a controller with another number of levels.
        """
        restored = {}
        for batch, values in snapshot.items():
            stats = restored[int(batch)] = DepthStats(
                [float(count) for count in values["num_accepted"]],
                [float(count) for count in values["num_reached"]],
                float(values["level_s"]),
                float(values["base_s"]),
                int(values["rounds"]),
            )
            lengths = {len(stats.num_accepted), len(stats.num_reached)}
            if lengths != {self.max_levels * self.tokens_per_level} or min(stats.num_reached) <= 0:
                raise ValueError(f"a controller of {self.max_levels} levels has other measurements")
        with self.lock:
            self.by_batch = restored | self.by_batch

    def choose(self, batch: int) -> int:
        """Number of levels of the coming round, for the highest expected tokens per second."""
        with self.lock:
            stats = self._stats(batch)
            stats.rounds += 1
            if not stats.level_s or not stats.base_s:  # whole rounds: half the levels now and then, for a difference
                is_half = stats.whole_s and stats.rounds // ROUNDS_OF_A_KIND % 2
                return max(1, self.max_levels // 2) if is_half else self.max_levels
            best, best_rate = 1, 0.0
            expected_tokens = path_probability = 1.0
            for level in range(self.max_levels):
                for depth in range(level * self.tokens_per_level, (level + 1) * self.tokens_per_level):
                    path_probability *= stats.num_accepted[depth] / stats.num_reached[depth]
                    expected_tokens += path_probability
                rate = expected_tokens / (stats.base_s + level * stats.level_s)
                if rate > best_rate:
                    best, best_rate = level + 1, rate
            if stats.rounds % PROBE_EVERY == 0:
                best += -1 if best == self.max_levels and stats.whole_s else 1  # or no difference would be seen
            return max(1, min(self.max_levels, best))

    def record(self, batch: int, num_levels: int, num_accepted: list[int], level_s: float, base_s: float) -> None:
        """Update after a round.

        Args:
            batch: batch size.
            num_levels: levels that were drafted and scored.
            num_accepted: number of accepted draft tokens of each row.
            level_s: seconds of one level after the first; 0 if there was none.
            base_s: seconds of the round without those levels.
        """
        with self.lock:
            stats = self._stats(batch)
            self._count(stats, num_levels, num_accepted)
            if level_s:
                stats.level_s = ema(stats.level_s, level_s, 0.1, restart_below=0.5)
            stats.base_s = ema(stats.base_s, base_s, 0.1, restart_below=0.5)

    def record_whole(
        self, batch: int, num_levels: int, num_nodes: int, num_accepted: list[int], round_s: float
    ) -> None:
        """`record` for a round whose levels are not timed: a level costs what rounds of more levels take longer.

        Args:
            batch: batch size.
            num_levels: levels that were drafted.
            num_nodes: nodes that were scored: only rounds of equal trees are compared.
            num_accepted: as in `record`.
            round_s: seconds of the round.
        """
        with self.lock:
            stats = self._stats(batch)
            self._count(stats, min(num_levels, -(-(num_nodes - 1) // self.tokens_per_level)), num_accepted)
            own = stats.whole_s.setdefault((num_levels, num_nodes), WholeRounds())
            own.mean_s = ema(own.mean_s, round_s, 0.2, restart_below=0.5)
            own.count, own.last = own.count + 1, stats.rounds
            differences = [
                (other.mean_s - own.mean_s) / (levels - num_levels)
                for (levels, nodes), other in stats.whole_s.items()
                if nodes == num_nodes
                and levels != num_levels
                and stats.rounds - other.last <= PROBE_EVERY
                and (stats.level_s or min(own.count, other.count) >= ROUNDS_OF_A_KIND // 2)
            ]
            if differences:
                level_s = max(MIN_LEVEL_S, sum(differences) / len(differences))
                stats.level_s = ema(stats.level_s, level_s, 0.1)
            if stats.level_s:
                base_s = max(MIN_LEVEL_S, own.mean_s - (num_levels - 1) * stats.level_s)
                stats.base_s = ema(stats.base_s, base_s, 0.1, restart_below=0.5)

    def _count(self, stats: DepthStats, num_levels: int, num_accepted: list[int]) -> None:
        """Update the acceptance by depth."""
        for depth in range(min(num_levels, self.max_levels) * self.tokens_per_level):
            if reached := sum(count >= depth for count in num_accepted):
                accepted = sum(count > depth for count in num_accepted)
                stats.num_reached[depth] = EVIDENCE_DECAY * stats.num_reached[depth] + reached
                stats.num_accepted[depth] = EVIDENCE_DECAY * stats.num_accepted[depth] + accepted

    def _stats(self, batch: int) -> DepthStats:
        if batch not in self.by_batch:
            max_depth = self.max_levels * self.tokens_per_level
            prior = PRIOR_COUNT * self.prior_acceptance
            self.by_batch[batch] = DepthStats([prior] * max_depth, [PRIOR_COUNT] * max_depth)
        return self.by_batch[batch]
