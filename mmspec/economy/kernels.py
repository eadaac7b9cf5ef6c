"""Which of several kernels computes a product fastest on this machine: timed once, never by a first run, and kept.

`fastest` compares alternatives: each runs once unmeasured, since libraries build or load kernels then; after that all
run in turn, and the fastest run of each counts, since a shared machine only adds time. `KernelChoices` asks it within a
budget and remembers the answers; `mmspec.costs` keeps them with the costs of the machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from mmspec.economy.tables import is_measured
from mmspec.forks import new_lock

CaseT = TypeVar("CaseT")

PLAIN, TRANSPOSED, IN_C, ONEDNN = "plain", "transposed", "c", "onednn"
MIN_REPEATS, MAX_REPEATS = 3, 5
"""Measured runs of each alternative; fewer than the first decide nothing."""
MUCH_SLOWER = 4.0
"""Ratio of fastest runs from which an alternative is out of the question, and not run in further cases."""
DECISION_S = 0.02
"""Seconds of measured runs from which no more than `MIN_REPEATS` are made."""
PROCESS_S, TOTAL_S = 0.05, 0.2
"""Seconds that one process, and all processes together, may take to time kernels."""
MAX_CHOICES = 4096
"""Choices that are taken from a file."""

KEY_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ProductKey = tuple[int, torch.dtype, int, int, int]
"""(threads, dtype, largest number of rows, out features, in features), of which the last two may be rounded"""


def fastest(
    names: Sequence[str],
    cases: Sequence[CaseT],
    run: Callable[[str, CaseT], object],
    limit_s: float = math.inf,
    clock: Callable[[], float] | None = None,
) -> str | None:
    """The alternative with the smallest product of times over all cases, so that each case counts the same.

    Args:
        names: the alternatives; of equal ones the first wins.
        cases: what each is run with, the cheapest first.
        run: runs an alternative with a case; None if it cannot.
        limit_s: seconds of measured runs after which it is given up.
        clock: seconds; None for `time.perf_counter`.

    Returns:
        The fastest; None if the time did not suffice to measure `MIN_REPEATS` runs of each, or the clock does not run.
    """
    clock = time.perf_counter if clock is None else clock
    left, measured_s = dict.fromkeys(names, 1.0), 0.0
    for case in cases:
        left = {name: score for name, score in left.items() if run(name, case) is not None}
        shortest = dict.fromkeys(left, math.inf)
        for repeat in range(MAX_REPEATS if len(left) > 1 else 0):
            if repeat >= MIN_REPEATS and measured_s > DECISION_S:
                break
            if measured_s > limit_s:
                return None
            for name in left:
                start = clock()
                run(name, case)
                seconds = clock() - start
                if not is_measured(seconds):
                    return None
                shortest[name], measured_s = min(shortest[name], seconds), measured_s + seconds
        if len(left) > 1:
            limit = MUCH_SLOWER * min(shortest.values())
            left = {name: score * shortest[name] for name, score in left.items() if shortest[name] <= limit}
    return min(left, key=lambda name: left[name], default=None)


class KernelChoices:
    """The kernel of each kind of product. One for all models of a process; thread-safe.

    A choice holds as long as the process: kernels differ by a rounding, which is large enough in half precision to
    decide near-ties. What cannot be timed within the budget is computed as the most alike product that is known, else
    by the default, and timed in a later process.

    Attributes:
        known: {key: kernel} as timed, here or in earlier processes.
        spent_s: seconds that this process has taken for it.
        earlier_s: seconds that earlier processes have taken.
        is_loaded: whether the choices of earlier processes were asked for.
        has_news: whether there is something that is not stored.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """`clock` is that of `fastest`."""
        self.known: dict[ProductKey, str] = {}
        self.spent_s = self.earlier_s = 0.0
        self.is_loaded = self.has_news = False
        self._used: dict[ProductKey, str] = {}
        self._longest_s = 0.0
        self._clock = clock
        self._lock = new_lock()

    def used(self, key: ProductKey) -> str | None:
        """The kernel that computes such products in this process; None before the first one."""
        return self._used.get(key)

    def choose(
        self, key: ProductKey, names: Sequence[str], cases: Sequence[CaseT], run: Callable[[str, CaseT], object]
    ) -> str:
        """The kernel of such products, timed if it is not known.

        Args:
            key: of the products.
            names: the kernels, the default first.
            cases: as for `fastest`.
            run: as for `fastest`.
        """
        with self._lock:  # timed once: two threads could find different answers
            known = [self._used.get(key), self.known.get(key)]
            found = next((kernel for kernel in known if kernel in names), None)
            found = found or self._time(key, names, cases, run) or self._alike(key, names) or names[0]
            self._used[key] = found
            return found

    def _time(
        self, key: ProductKey, names: Sequence[str], cases: Sequence[CaseT], run: Callable[[str, CaseT], object]
    ) -> str | None:
        """The fastest kernel; None where there is no time to find it."""
        left_s = min(PROCESS_S, TOTAL_S - self.earlier_s) - self.spent_s
        if len(names) < 2 or left_s < max(DECISION_S, self._longest_s):
            return None
        clock = time.perf_counter if self._clock is None else self._clock
        start = clock()
        found = fastest(names, cases, run, left_s, clock)
        seconds = max(0.0, clock() - start)
        self.spent_s, self._longest_s, self.has_news = self.spent_s + seconds, max(self._longest_s, seconds), True
        if found is not None:
            self.known[key] = found
        return found

    def _alike(self, key: ProductKey, names: Sequence[str]) -> str | None:
        """The kernel of the known products that differ in their features alone, the nearest in size; None for none."""
        alike = {other: kernel for other, kernel in self.known.items() if other[:3] == key[:3] and kernel in names}
        size = key[3] * key[4]
        nearest = min(alike, key=lambda other: abs(math.log(other[3] * other[4] / size)), default=None)
        return None if nearest is None else alike[nearest]

    def snapshot(self) -> dict[str, Any]:
        """What is known, ready for JSON."""
        with self._lock:
            return {
                "kernels": [[key[0], str(key[1])[6:], *key[2:], kernel] for key, kernel in self.known.items()],
                "spent_s": self.earlier_s + min(PROCESS_S, self.spent_s),  # a busy machine uses up no more
            }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Add what earlier processes have found.

        Raises:
            ValueError, TypeError, KeyError: it is something else.
        """
        spent_s, found = float(snapshot["spent_s"]), dict[ProductKey, str]()
        for threads, dtype, rows, out_features, in_features, kernel in snapshot["kernels"][:MAX_CHOICES]:
            sizes = (threads, rows, out_features, in_features)
            are_sizes = all(type(size) is int and size > 0 for size in sizes)
            if kernel not in (PLAIN, TRANSPOSED, IN_C, ONEDNN) or not are_sizes:
                raise ValueError("a choice is four sizes, a type and a kernel")
            found[threads, KEY_DTYPES[dtype], rows, out_features, in_features] = kernel
        if not (math.isfinite(spent_s) and spent_s >= 0):
            raise ValueError(f"the seconds spent must be finite and not negative; got {spent_s}")
        with self._lock:
            self.known = found | self.known
            self.earlier_s = spent_s


KERNEL_CHOICES = KernelChoices()
"""Those of this process."""
