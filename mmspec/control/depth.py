"""How many levels to draft: as many as pay, by what levels were reached and what a level costs here.

Learns from the rounds themselves; one object serves all calls of a drafter. Choosing wrongly costs time, never a token.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from mmspec.control.draft_cost import ema

EVIDENCE_DECAY = 0.97
"""What is left of the evidence at each new round."""
PROBE_EVERY = 24
"""Every so many rounds one level more is drafted, to see whether it would be reached."""


@dataclass
class DepthStats:
    """What is known at one batch size.

    Attributes:
        tried: [d] faded count of rows that kept d drafted tokens and were offered another. reached: of those, how many
            kept that too.
        pass_s: seconds of a level behind the first, which reading gives. rest_s: seconds of a round without those.
    """

    num_accepted: list[float]
    num_offered: list[float]
    pass_s: float = 0.0
    base_s: float = 0.0
    rounds: int = 0


@dataclass
class DepthController:
    """Chooses 1 to `most` levels.

    Attributes:
        each: tokens that a level drafts one behind the other.
        hope: share of rows that are thought to go on from one level to the next before anything is known.
    """

    max_levels: int
    steps_per_level: int = 1
    prior_acceptance: float = 0.75
    by_batch: dict[int, DepthStats] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __deepcopy__(self, memo: dict[int, object]) -> DepthController:
        return DepthController(self.max_levels, self.steps_per_level, self.prior_acceptance)

    def _tally(self, batch: int) -> DepthStats:
        if batch not in self.by_batch:
            steps = self.max_levels * self.steps_per_level
            self.by_batch[batch] = DepthStats([2 * self.prior_acceptance] * steps, [2.0] * steps)
        return self.by_batch[batch]

    def choose(self, batch: int) -> int:
        """Levels for the coming round: the most tokens per second."""
        with self.lock:
            tally = self._tally(batch)
            tally.rounds += 1
            if not tally.pass_s or not tally.base_s:
                return self.max_levels
            best, best_rate, tokens, so_far = 1, 0.0, 1.0, 1.0
            for level in range(self.max_levels):
                for step in range(level * self.steps_per_level, (level + 1) * self.steps_per_level):
                    so_far *= tally.num_accepted[step] / tally.num_offered[step]
                    tokens += so_far
                rate = tokens / (tally.base_s + level * tally.pass_s)
                if rate > best_rate:
                    best, best_rate = level + 1, rate
            return min(self.max_levels, best + (tally.rounds % PROBE_EVERY == 0))

    def record(self, batch: int, levels: int, accepted: list[int], pass_s: float, base_s: float) -> None:
        """After a round: how many drafted tokens each row kept, and what the round cost.

        Args:
            pass_s: of a level behind the first; 0 if there was none. rest_s: without those.
        """
        with self.lock:
            tally = self._tally(batch)
            for step in range(min(levels, self.max_levels) * self.steps_per_level):
                if there := sum(count >= step for count in accepted):
                    tally.num_offered[step] = EVIDENCE_DECAY * tally.num_offered[step] + there
                    tally.num_accepted[step] = EVIDENCE_DECAY * tally.num_accepted[step] + sum(
                        count > step for count in accepted
                    )
            if pass_s:
                tally.pass_s = ema(tally.pass_s, pass_s, 0.1)
            tally.base_s = ema(tally.base_s, base_s, 0.1)


__all__ = ["DepthController", "DepthStats"]
