"""How many levels to draft: as many as pay, by what levels were reached and what a level costs here.

Learns from the rounds themselves; one object serves all calls of a drafter. Choosing wrongly costs time, never a token.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from mmspec.control.draft_cost import ema

MEMORY = 0.97
"""What is left of the evidence at each new round."""
LOOK = 24
"""Every so many rounds one level more is drafted, to see whether it would be reached."""


@dataclass
class Tally:
    """What is known at one batch size.

    Attributes:
        tried: [d] faded count of rows that kept d drafted tokens and were offered another. reached: of those, how many
            kept that too.
        pass_s: seconds of a level behind the first, which reading gives. rest_s: seconds of a round without those.
    """

    reached: list[float]
    tried: list[float]
    pass_s: float = 0.0
    rest_s: float = 0.0
    rounds: int = 0


@dataclass
class Depth:
    """Chooses 1 to `most` levels.

    Attributes:
        each: tokens that a level drafts one behind the other.
        hope: share of rows that are thought to go on from one level to the next before anything is known.
    """

    most: int
    each: int = 1
    hope: float = 0.75
    tallies: dict[int, Tally] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __deepcopy__(self, memo: dict[int, object]) -> Depth:
        return Depth(self.most, self.each, self.hope)

    def _tally(self, batch: int) -> Tally:
        if batch not in self.tallies:
            steps = self.most * self.each
            self.tallies[batch] = Tally([2 * self.hope] * steps, [2.0] * steps)
        return self.tallies[batch]

    def choose(self, batch: int) -> int:
        """Levels for the coming round: the most tokens per second."""
        with self.lock:
            tally = self._tally(batch)
            tally.rounds += 1
            if not tally.pass_s or not tally.rest_s:
                return self.most
            best, best_rate, tokens, so_far = 1, 0.0, 1.0, 1.0
            for level in range(self.most):
                for step in range(level * self.each, (level + 1) * self.each):
                    so_far *= tally.reached[step] / tally.tried[step]
                    tokens += so_far
                rate = tokens / (tally.rest_s + level * tally.pass_s)
                if rate > best_rate:
                    best, best_rate = level + 1, rate
            return min(self.most, best + (tally.rounds % LOOK == 0))

    def learn(self, batch: int, levels: int, kept: list[int], pass_s: float, rest_s: float) -> None:
        """After a round: how many drafted tokens each row kept, and what the round cost.

        Args:
            pass_s: of a level behind the first; 0 if there was none. rest_s: without those.
        """
        with self.lock:
            tally = self._tally(batch)
            for step in range(min(levels, self.most) * self.each):
                if there := sum(count >= step for count in kept):
                    tally.tried[step] = MEMORY * tally.tried[step] + there
                    tally.reached[step] = MEMORY * tally.reached[step] + sum(count > step for count in kept)
            if pass_s:
                tally.pass_s = ema(tally.pass_s, pass_s, 0.1)
            tally.rest_s = ema(tally.rest_s, rest_s, 0.1)


__all__ = ["Depth", "Tally"]
