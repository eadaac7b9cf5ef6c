"""How much time learning may take: a share of the time that the calls took, less where drafts save little.

Learning that no draft makes use of is waste: in large batches plain decoding may be the fastest. What drafts save is
measured by the controller of the tree size, so the share follows it, batch size by batch size, and back again.
"""

from __future__ import annotations

from mmspec.control.ema import ema

DEFAULT_SHARE = 0.03
"""Largest share of the time of the calls."""
MIN_SHARE_FACTOR = 1 / 8
"""The share is not reduced below this factor, so that a change of domain is noticed."""
SAVINGS_FOR_ALL = 0.12
"""Share of the calls that drafts must save for the whole budget; four times the default one. Else in proportion."""
SAVINGS_WEIGHT = 0.2
"""Weight of a call in the running mean of what drafts save."""
FOLLOWED_BY = {"step": ("publish", "save"), "solve": ("save",)}
"""What a kind of work entails."""
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
        factor: of `share` that is used now, by the loss.
        savings: running mean of the time that drafts save, as a share of the calls; None before anything is known.
        earned_s, spent_s: so far.
    """

    def __init__(self, share: float = DEFAULT_SHARE) -> None:
        self.share = share
        self.factor = 1.0
        self.savings: float | None = None
        self.earned_s = 0.0
        self.spent_s = 0.0
        self._num_calls = 0
        self._call_s = 0.0
        self._cost_s: dict[str, float] = {}
        self._first_s: dict[str, float] = {}
        self._losses: list[float] = []
        self._last_loss: float | None = None
        self._best_loss: float | None = None

    @property
    def current_share(self) -> float:
        """The share that is used now: less than `share` where the loss does not fall or drafts save little."""
        factor = self.factor
        if self.savings is not None:
            factor = min(factor, max(MIN_SHARE_FACTOR, self.savings / SAVINGS_FOR_ALL))
        return self.share * factor

    @property
    def is_overdrawn(self) -> bool:
        """Whether more was spent than earned."""
        return self.spent_s > self.earned_s

    def earn(self, call_s: float) -> None:
        """A call took so many seconds."""
        self.earned_s += self.current_share * call_s
        self._num_calls += 1
        self._call_s += call_s

    def add_savings(self, saved_s: float, call_s: float) -> None:
        """Drafts saved so many seconds in a call of so many."""
        if call_s > 0:
            known = SAVINGS_FOR_ALL if self.savings is None else self.savings  # full share at first
            self.savings = known + SAVINGS_WEIGHT * (max(0.0, saved_s) / call_s - known)

    def spend(self, seconds: float, work: str | None = None) -> None:
        """So many seconds were spent, on a kind of work whose cost is to be remembered."""
        self.spent_s += seconds
        if work is not None:
            self._cost_s[work] = ema(self._cost_s.get(work), seconds, 0.2, restart_below=0.5)

    def expect(self, work: str, num_calls: float) -> None:
        """Until a unit of this kind of work was measured it is taken to cost so many mean calls."""
        self._first_s[work] = num_calls * self._call_s / max(1, self._num_calls)

    def can_afford(self, work: str) -> bool:
        """Whether a unit of this work fits, with what it entails."""
        cost_s = self._cost_s.get(work, self._first_s.get(work, 0.0))
        return self.earned_s - self.spent_s > cost_s + sum(
            self._cost_s.get(other, 0.0) for other in FOLLOWED_BY.get(work, ())
        )

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
