"""How much time learning may take: a share of the time that the calls took, less once it stops paying."""

from __future__ import annotations

from mmspec.control.ema import ema

DEFAULT_SHARE = 0.03
"""Largest share of the time of the calls."""
MIN_SHARE_FACTOR = 1 / 8
"""The share is not reduced below this factor, so that a change of domain is noticed."""
WINDOW = 40
"""Steps whose mean loss is compared with that of the steps before."""
MIN_IMPROVEMENT = 0.01
"""Relative improvement of the loss from window to window below which the share is halved."""
MAX_REGRESSION = 0.1
"""Relative increase of the loss over its best window from which on the whole share is used again."""


class LearningBudget:
    """Time that learning has earned and spent, and the expected seconds of its kinds of work.

    Attributes:
        share: of the time of the calls.
        factor: of `share` that is used now.
        earned_s, spent_s: so far.
    """

    def __init__(self, share: float = DEFAULT_SHARE) -> None:
        self.share = share
        self.factor = 1.0
        self.earned_s = 0.0
        self.spent_s = 0.0
        self._cost_s: dict[str, float] = {}
        self._losses: list[float] = []
        self._last_loss: float | None = None
        self._best_loss: float | None = None

    def earn(self, call_s: float) -> None:
        """A call took so many seconds."""
        self.earned_s += self.share * self.factor * call_s

    def spend(self, seconds: float, work: str | None = None) -> None:
        """So many seconds were spent, on a kind of work whose cost is to be remembered."""
        self.spent_s += seconds
        if work is not None:
            self._cost_s[work] = ema(self._cost_s.get(work), seconds, 0.2, restart_below=0.5)

    def can_afford(self, work: str) -> bool:
        """Whether a unit of this work fits. The first of its kind needs a balance above zero only."""
        return self.earned_s - self.spent_s > self._cost_s.get(work, 0.0)

    def add_loss(self, loss: float) -> None:
        """Adapt the share to the loss of one more step."""
        self._losses.append(loss)
        if len(self._losses) < WINDOW:
            return
        mean = sum(self._losses) / WINDOW
        self._losses.clear()
        if self._best_loss is not None and mean > (1 + MAX_REGRESSION) * self._best_loss:
            self.factor, self._best_loss = 1.0, mean
        elif self._last_loss is not None and mean > (1 - MIN_IMPROVEMENT) * self._last_loss:
            self.factor = max(MIN_SHARE_FACTOR, self.factor / 2)
        self._last_loss = mean
        self._best_loss = mean if self._best_loss is None else min(mean, self._best_loss)


__all__ = ["DEFAULT_SHARE", "LearningBudget"]
