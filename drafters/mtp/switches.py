"""Switches of a drafter on which sources disagree: both values are tried on the user's own calls, the better one stays.

Each value of the first undecided switch drafts for `TRIAL_ROUNDS` rounds, whole calls at a time; the value with more
accepted tokens per round is kept, the default on a tie. Affects speed only.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Self

from mmspec.forks import new_lock

TRIAL_ROUNDS = 64
"""Drafts with each value of a switch, before one of them is kept."""

Trial = tuple[str, str]
"""A switch and the value that a call tries."""


class Switches:
    """The values of all switches. Threads may share the object."""

    def __init__(self, values: Mapping[str, Sequence[str]]) -> None:
        """
        Args:
            values: {switch: its values, the default first}, in the order in which they are tried.
        """
        self.values = {name: tuple(one) for name, one in values.items()}
        self.counts = {(name, value): [0, 0] for name, one in self.values.items() for value in one}
        self._lock = new_lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self)(self.values)
        memo[id(self)] = twin
        with self._lock:
            twin.counts = copy.deepcopy(self.counts)
        return twin

    def is_decided(self, name: str) -> bool:
        """Whether every value of a switch has been tried."""
        return len(self.values[name]) < 2 or all(self.counts[name, one][0] >= TRIAL_ROUNDS for one in self.values[name])

    def value(self, name: str) -> str:
        """The value that is kept, or so far the default."""
        values = self.values[name]
        if not self.is_decided(name) or len(values) < 2:
            return values[0]
        return max(values, key=lambda value: self.counts[name, value][1] / self.counts[name, value][0])

    def next_trial(self, applicable: Sequence[str]) -> Trial | None:
        """What a call tries: the next value of its first undecided switch; None if all are decided.

        Args:
            applicable: the switches that this call depends on.
        """
        with self._lock:
            for name in self.values:
                if name in applicable and not self.is_decided(name):
                    return name, next(one for one in self.values[name] if self.counts[name, one][0] < TRIAL_ROUNDS)
        return None

    def record(self, trial: Trial, num_accepted: Sequence[int]) -> None:
        """Count the accepted tokens of the rows of a round."""
        with self._lock:
            counts = self.counts[trial]
            counts[0] += len(num_accepted)
            counts[1] += sum(num_accepted)

    def snapshot(self) -> dict[str, Any]:
        """The counts, ready for JSON."""
        with self._lock:
            return {f"{name}={value}": list(counts) for (name, value), counts in self.counts.items()}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Take over the counts of another process for switches of which nothing was counted here.

        Raises:
            ValueError: they are of other switches.
        """
        if set(snapshot) != {f"{name}={value}" for name, value in self.counts}:
            raise ValueError("the counts are of other switches")
        with self._lock:
            if not any(rounds for rounds, _ in self.counts.values()):
                self.counts = {
                    (name, value): [int(count) for count in snapshot[f"{name}={value}"]] for name, value in self.counts
                }
