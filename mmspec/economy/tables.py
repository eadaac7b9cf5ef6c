"""What was measured: seconds by (what, rows, size), and yields by (source, depth)."""

from __future__ import annotations

import bisect
import logging
import math
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from mmspec.forks import Locked

logger = logging.getLogger("mmspec")

WINDOW = 9
"""Last measurements of one kind, of which the fastest third ends at the estimate: stalls only ever add time."""
AGREE = 1.25
"""Ratio of the two fastest measurements up to which they are believed: first runs and stalls hardly ever agree."""
STALE = 64
"""Measurements of other sizes after which one that was not measured is predicted again: the machine was another then.
Else a size that was measured while the machine was busy would never be tried again."""
SAME = 0.01
"""Fraction by which an estimate must move to be another one."""
NODE_COST = {"cpu": 0.11, "other": 0.01}
"""Assumed cost of one more node by device, as a fraction of a one-node forward, until it is measured."""


def is_measured(seconds: float) -> bool:
    """Whether a clock that runs can have shown it; the first one that stands or goes backwards is logged."""
    if not 0 < seconds < math.inf:
        _log_clock_fault()
    return 0 < seconds < math.inf


@cache
def _log_clock_fault() -> None:
    logger.info("mmspec: a clock of this machine stood still or went backwards; what it showed is left out")


def cost_rows(num_rows: int, batch: int) -> int:
    """The number of rows under which costs of rounds with `num_rows` rows that have not ended are kept.

    It is the next power of two, at most the whole `batch`: there are few such numbers, and each has measurements soon.
    """
    return min(batch, 1 << max(0, num_rows - 1).bit_length())


@dataclass
class _Measured:
    """What was measured of one kind and number of rows, by size.

    Attributes:
        last: the last measurements.
        points: the estimates.
        known: sizes whose measurements agree.
        curve: (size, seconds) that follow from the estimates.
        lately: sizes that were measured since the last ones were let go.
    """

    last: dict[int, deque[float]] = field(default_factory=dict)
    points: dict[int, float] = field(default_factory=dict)
    known: set[int] = field(default_factory=set)
    curve: list[tuple[int, float]] = field(default_factory=list)
    lately: list[int] = field(default_factory=list)

    def forget_stale(self, size: int) -> bool:
        """Count `size`; let go of sizes that were not measured lately, but of the smallest and the largest one."""
        self.lately.append(size)
        if len(self.lately) < STALE:
            return False
        stale = self.last.keys() - {*self.lately, min(self.last), max(self.last)}
        self.lately.clear()
        for one in stale:
            del self.last[one], self.points[one]
            self.known.discard(one)
        return bool(stale)


_NOTHING = _Measured()


class Seconds(Locked):
    """Seconds of what is done in rounds. Sizes that were not measured are predicted from those that were.

    Attributes:
        step: fraction of the smallest size's seconds that one more is assumed to take.
    """

    def __init__(self, step: float = NODE_COST["cpu"]) -> None:
        self.step = step
        self._measured: dict[tuple[Hashable, int], _Measured] = {}
        self._memo: dict[Hashable, dict[tuple[int, int], float | None]] = {}
        super().__init__()

    def add(self, what: Hashable, rows: int, size: int, seconds: float) -> None:
        """Add a measurement; what no clock that runs can show is left out."""
        if not is_measured(seconds):
            return
        with self.lock:
            one = self._measured.get((what, rows)) or _Measured()
            last = one.last.setdefault(size, deque(maxlen=WINDOW))
            last.append(seconds)
            changed = one.forget_stale(size)
            runs = sorted(last)
            value, agrees = runs[(len(runs) - 1) // 3], len(runs) > 1 and runs[1] <= AGREE * runs[0]
            if abs(value - one.points.get(size, math.inf)) > SAME * value or agrees != (size in one.known):
                one.points[size], changed = value, True
                (one.known.add if agrees else one.known.discard)(size)
            if changed:  # most measurements change nothing: this is done in each round
                one.curve = self._curve(rows, one.points, one.known)
                self._measured[what, rows], self._memo[what] = one, {}

    def count(self, what: Hashable, rows: int, size: int | None = None) -> int:
        """Measurements that the estimate is of; of all sizes together without one."""
        sizes = self._measured.get((what, rows), _NOTHING).last
        return sum(map(len, list(sizes.values()))) if size is None else len(sizes.get(size, ()))

    def is_known(self, what: Hashable, rows: int, size: int | None = None) -> bool:
        """Whether an estimate is of measurements that agree; of any size without one."""
        known = self._measured.get((what, rows), _NOTHING).known
        return bool(known) if size is None else size in known

    def get(self, what: Hashable, rows: int, size: int) -> float | None:
        """The estimate; None if nothing of the kind was measured, whatever the rows and size."""
        try:
            return self._memo[what][rows, size]
        except KeyError:
            found = self._memo.setdefault(what, {})[rows, size] = self._estimate(what, rows, size)
            return found

    def _estimate(self, what: Hashable, rows: int, size: int) -> float | None:
        own = self._measured.get((what, rows))
        value = math.inf if own is None else self._on(own.curve, rows, size)
        if not self.is_known(what, rows):  # nothing worse than other numbers of rows let expect follows from first runs
            others = [other for kind, other in list(self._measured) if kind == what and other != rows]
            known = [other for other in others if self.is_known(what, other)] or (others if own is None else [])
            if known:
                nearest = min(known, key=lambda other: abs(math.log(other / rows)))
                ratio = self.assumed(rows, size) / self.assumed(nearest, size)
                value = min(value, ratio * self._on(self._measured[what, nearest].curve, nearest, size))
        return None if value == math.inf else value

    def assumed(self, rows: int, size: int) -> float:
        """What a size is assumed to take, in units of one row of size 1."""
        return max(self.step, 1 + self.step * (rows * size - 1))

    def _on(self, curve: list[tuple[int, float]], rows: int, size: int) -> float:
        """The value of a rising curve, which goes on as it rises on the whole, or as is assumed."""
        first, first_s = curve[0]
        last, last_s = curve[-1]
        if size <= first or len(curve) == 1:
            return first_s * self.assumed(rows, size) / self.assumed(rows, first)
        if size > last:
            slope = (last_s - first_s) / (last - first)
            usual = last_s * self.step * rows / self.assumed(rows, last)
            return last_s + (size - last) * (usual if last < 2 * first else max(slope, usual / 4))
        index = bisect.bisect_left(curve, (size, 0.0))
        (below, below_s), (above, above_s) = curve[index - 1], curve[index]
        return below_s + (above_s - below_s) * (size - below) / (above - below)

    def _curve(self, rows: int, measured: Mapping[int, float], known: Collection[int]) -> list[tuple[int, float]]:
        """(size, seconds), rising in both: a cheaper larger size shows that the runs of a smaller one were slow.

        First runs are slow, since kernels are selected and memory is allocated then: nothing that is worse than assumed
        follows from runs that do not agree.
        """
        points = sorted(measured.items())
        for index, (size, seconds) in enumerate(points):
            if size not in known:
                smaller = points[: index + 1]
                others = [one for one in smaller if one[0] in known] or smaller
                likely = [s * self.assumed(rows, size) / self.assumed(rows, other) for other, s in others]
                points[index] = size, min(seconds, *likely, seconds)
        for index in range(len(points) - 2, -1, -1):
            points[index] = (points[index][0], min(points[index][1], points[index + 1][1]))
        return points

    def snapshot(self) -> list[list[Any]]:
        """[what, rows, size, seconds] of the estimates, ready for JSON."""
        with self.lock:
            return [[what, rows, *point] for (what, rows), one in self._measured.items() for point in one.curve]

    def restore(self, measured: Iterable[Sequence[Any]]) -> None:
        """Take over what another process measured, as one measurement each, where nothing was measured here.

        Raises:
            ValueError, TypeError: it is something else.
        """
        for what, rows, size, seconds in measured:
            if not (isinstance(what, str) and type(rows) is type(size) is int and min(rows, size) > 0):
                raise ValueError(
                    f"a measurement is of a name, rows and a size; got {what!r:.40}, {rows!r:.40}, {size!r:.40}"
                )
            if not self.count(what, rows, size):
                self.add(what, rows, size, checked(seconds))


def checked(value: Any) -> float:
    """A number that a measurement can be.

    Raises:
        ValueError: it is none.
    """
    if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0):
        raise ValueError(f"a measurement is a finite number that is not negative; got {value!r:.40}")
    return value


class Yields(Locked):
    """The share of what was expected that came true, by key, with forgetting.

    A key is, for instance, (source, depth): of the drafts that were right so far, how many go on to be right.

    Attributes:
        rates: {key: estimate}; a key that is not there has `prior`.
    """

    DEFAULT = 0.1

    def __init__(
        self, priors: Mapping[Hashable, float] | None = None, weight: float = 2.0, decay: float = 0.99
    ) -> None:
        """
        Args:
            priors: {key: what it is taken to be before anything is counted}.
            weight: what the prior counts for.
            decay: factor on the evidence of a key at each new observation of it.
        """
        self.weight, self.decay = weight, decay
        self.rates: dict[Hashable, float] = dict(priors or {})
        self._priors = dict(priors or {})
        self._counts: dict[Hashable, tuple[float, float]] = {}
        super().__init__()

    def add(self, outcomes: Iterable[tuple[Hashable, float, float]]) -> None:
        """Count (key, what came true, what might have)."""
        decay, weight, counts = self.decay, self.weight, self._counts
        with self.lock:
            for key, hits, total in outcomes:
                old_hits, old_total = counts.get(key, (0.0, 0.0))
                hits, total = old_hits * decay + hits, old_total * decay + total
                counts[key] = hits, total
                self.rates[key] = (hits + weight * self._priors.get(key, self.DEFAULT)) / (total + weight)

    def fade(self, source: str, factor: float) -> None:
        """Let what was counted of a source weigh less."""
        with self.lock:
            for key, (hits, total) in self._counts.items():
                if isinstance(key, tuple) and key[0] == source:
                    self._counts[key] = factor * hits, factor * total

    def rate(self, key: Hashable, prior: float) -> float:
        """The estimate of a key, with a prior that may itself have been learned."""
        hits, total = self._counts.get(key, (0.0, 0.0))
        return (hits + self.weight * prior) / (total + self.weight)

    @property
    def counted(self) -> list[Any]:
        """All keys that were counted."""
        return list(self._counts)

    def snapshot(self) -> list[list[Any]]:
        """[*key, hits, total] of all, ready for JSON."""
        with self.lock:
            return [[*key, *counts] for key, counts in self._counts.items() if isinstance(key, tuple)]

    def restore(self, counted: Iterable[Sequence[Any]], limit: float) -> None:
        """Take over the counts of another process, as at most `limit` observations each.

        Raises:
            ValueError, TypeError: it is something else.
        """
        for source, depth, hits, total in counted:
            if not (isinstance(source, str) and isinstance(depth, (str, int))):
                raise ValueError(f"a yield is of a source and a depth; got {source!r:.40}, {depth!r:.40}")
            factor = min(1.0, limit / max(checked(total), 1e-9))
            self.add([((source, depth), factor * checked(hits), factor * total)])
