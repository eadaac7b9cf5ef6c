"""Rounds of a bench in several processes, one after the other.

Where a process has its code and weights in memory makes plain `generate` up to 8% faster or slower for its whole life,
which no number of rounds in that process averages out. So the rounds are spread over fresh processes.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, TypeVar

from mmspec.app.errors import UsageError

T = TypeVar("T")


class DeadProcessError(UsageError):
    """A process of the bench has died."""


@dataclass(frozen=True)
class Part:
    """A share of the rounds of a series.

    Attributes:
        number, count: which of how many, from 0.
    """

    number: int
    count: int

    def of(self, requests: Sequence[T]) -> list[T]:
        """The first request, which warms up, and this part's share of the others, in their order."""
        rounds = requests[1:]
        start, end = (len(rounds) * edge // self.count for edge in (self.number, self.number + 1))
        return [requests[0], *rounds[start:end]]


def run_in_processes(
    task: Callable[..., dict[str, list[Any]]],
    args: tuple[Any, ...],
    count: int,
    tick: Callable[[], object],
    joined: dict[str, list[Any]] | None = None,
) -> dict[str, list[Any]]:
    """`task(*args, part)` for each part, each in a fresh process; the lists of its results joined.

    Args:
        task: a function of a module; its results may hold tensors.
        count: parts.
        tick: called after each part.
        joined: filled part by part, for whoever stops it; then also returned.

    Raises:
        DeadProcessError: a process died.
    """
    joined = {} if joined is None else joined
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        for number in range(count):
            try:
                values = pool.submit(_run_part, task, args, Part(number, count)).result()
            except BrokenProcessPool as error:
                raise DeadProcessError(
                    f"process {number + 1} of {count} of the bench died; try --processes 1"
                ) from error
            for name, found in pickle.loads(values).items():  # bytes of our own process
                joined.setdefault(name, []).extend(found)
            tick()
    return joined


def _run_part(task: Callable[..., dict[str, list[Any]]], args: tuple[Any, ...], part: Part) -> bytes:
    """Tensors as bytes: torch would share their memory, which ends with this process."""
    from mmspec.app.cli.arguments import hide_progress_bars

    hide_progress_bars(False)
    return pickle.dumps(task(*args, part))
