"""Controller of the number of draft levels per round: the highest expected tokens per second.

One forward of the draft head computes one *level* of the draft tree, which extends paths by `tokens_per_level` tokens;
the forward of the first level also reads the tokens that were accepted since. Costs and acceptance are learned from the
decoding rounds themselves; one object serves all calls of a drafter. Affects speed only.
"""

from __future__ import annotations

import copy
import threading
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from mmspec.control.ema import ema

EVIDENCE_DECAY = 0.97
"""Factor on the acceptance counts in each round."""
PROBE_EVERY = 24
"""Every so many rounds one level more than the best is drafted, to measure its acceptance."""
PRIOR_COUNT = 2.0
"""Weight of the prior acceptance, in rows."""


@dataclass
class DepthStats:
    """Measurements at one batch size.

    Attributes:
        num_accepted: [d] decayed number of rows whose draft token at depth d + 1 was accepted.
        num_reached: [d] decayed number of rows whose draft tokens up to depth d were all accepted.
        level_s: seconds of one level after the first.
        base_s: seconds of a round without the levels after the first.
        rounds: number of `choose` calls.
    """

    num_accepted: list[float]
    num_reached: list[float]
    level_s: float = 0.0
    base_s: float = 0.0
    rounds: int = 0


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
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """An independent controller of the same class with the same measurements."""
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin.lock = threading.Lock()
        with self.lock:
            for name, value in vars(self).items():
                if name != "lock":
                    setattr(twin, name, copy.deepcopy(value, memo))
        return twin

    def snapshot(self) -> dict[str, Any]:
        """The measurements, ready for JSON."""
        with self.lock:
            return {str(batch): asdict(stats) for batch, stats in self.by_batch.items()}

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
            if not stats.level_s or not stats.base_s:
                return self.max_levels
            best, best_rate = 1, 0.0
            expected_tokens = path_probability = 1.0
            for level in range(self.max_levels):
                for depth in range(level * self.tokens_per_level, (level + 1) * self.tokens_per_level):
                    path_probability *= stats.num_accepted[depth] / stats.num_reached[depth]
                    expected_tokens += path_probability
                rate = expected_tokens / (stats.base_s + level * stats.level_s)
                if rate > best_rate:
                    best, best_rate = level + 1, rate
            return min(self.max_levels, best + (stats.rounds % PROBE_EVERY == 0))

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
            for depth in range(min(num_levels, self.max_levels) * self.tokens_per_level):
                if reached := sum(count >= depth for count in num_accepted):
                    accepted = sum(count > depth for count in num_accepted)
                    stats.num_reached[depth] = EVIDENCE_DECAY * stats.num_reached[depth] + reached
                    stats.num_accepted[depth] = EVIDENCE_DECAY * stats.num_accepted[depth] + accepted
            if level_s:
                stats.level_s = ema(stats.level_s, level_s, 0.1, restart_below=0.5)
            stats.base_s = ema(stats.base_s, base_s, 0.1, restart_below=0.5)

    def _stats(self, batch: int) -> DepthStats:
        if batch not in self.by_batch:
            max_depth = self.max_levels * self.tokens_per_level
            prior = PRIOR_COUNT * self.prior_acceptance
            self.by_batch[batch] = DepthStats([prior] * max_depth, [PRIOR_COUNT] * max_depth)
        return self.by_batch[batch]


__all__ = ["DepthController", "DepthStats"]
