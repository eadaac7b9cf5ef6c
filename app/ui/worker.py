"""One thread that does all work with models, one job at a time, and ways to end a job early.

Two runs at once would falsify both measurements and share the random generator, so there is a single thread per device.
Knows nothing of what a job does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYetError
from typing import Any, TypeVar

from mmspec.app.errors import UsageError

T = TypeVar("T")
LEASE_S = 15.0
"""A run that nobody has looked at for so long is ended."""
MOST_WAITING = 20
"""Runs that may wait for the device."""
POLL_S = 0.25
"""Seconds between two looks at a run. Each costs the run a little time, since Python runs one thread at a time."""


class LeftError(Exception):
    """A run was halted before it began."""


class Halt:
    """Whether a run should end: because someone said so, or because nobody looks at it any more."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self._event, self._lease_s, self._seen = threading.Event(), lease_s, time.monotonic()

    def ask(self) -> None:
        """End the run at its next token."""
        self._event.set()

    def touch(self) -> None:
        """Somebody still looks."""
        self._seen = time.monotonic()

    @property
    def said(self) -> bool:
        """Whether somebody said so."""
        return self._event.is_set()

    @property
    def asked(self) -> bool:
        """Whether the run should end now."""
        return self.said or time.monotonic() - self._seen > self._lease_s


class Worker:
    """The thread, and how to follow what it does."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mmspec-device")
        self._line: list[Future[Any]] = []
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do `work` when all that was asked before is done."""
        with self._lock:
            future = self._pool.submit(work)
            self._line = [one for one in self._line if not one.done()] + [future]
            return future

    def ahead(self, future: Future[Any]) -> int:
        """How many must end before this one begins."""
        if future.running() or future.done():
            return 0
        with self._lock:
            before = self._line[: self._line.index(future)]
        return sum(not one.done() for one in before)

    def follow(
        self, work: Callable[[], T], halt: Halt, every: float = POLL_S, first: bool = False
    ) -> Generator[int, None, T]:
        """Do `work`, yielding now and then until it is done how many are ahead of it; returns its result.

        Whoever stops iterating ends the run: `halt` is asked as soon as this generator is closed. first: yield at once.

        Raises:
            LeftError: the run was halted while it waited; it leaves the line at once.
            UsageError: too many wait already.
        """
        with self._lock:
            waiting = sum(not one.done() for one in self._line)
        if waiting > MOST_WAITING:
            raise UsageError(f"{MOST_WAITING} questions are waiting already, which is the limit; try again later.")
        halt.touch()
        future = self.submit(work)
        try:
            if first:
                yield self.ahead(future)
            while True:
                try:
                    return future.result(timeout=every)
                except NotYetError:
                    if future.done():  # the work itself has timed out
                        raise
                if halt.said and future.cancel():
                    raise LeftError
                halt.touch()
                yield self.ahead(future)
        finally:
            halt.ask()
            future.cancel()

    def close(self) -> None:
        """Start nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Sessions:
    """The run of each open page; a page has one at a time."""

    def __init__(self) -> None:
        self._running: dict[str, Halt] = {}
        self._left: dict[str, Any] = {}
        self._lock = threading.Lock()

    def begin(self, session: str) -> Halt:
        """A run of this page begins.

        Raises:
            UsageError: it has one already.
        """
        with self._lock:
            old = self._running.get(session)
            if old is not None and not old.said:  # one that waits in the queue is looked at by nobody
                raise UsageError("A run of this page is still going; wait for it, or stop it.")
            halt = self._running[session] = Halt()
            return halt

    def of(self, session: str) -> Halt:
        """The run that was begun, or, should there be none, a new one."""
        with self._lock:
            return self._running.setdefault(session, Halt())

    def stop(self, session: str | None) -> None:
        """End the run of this page, if it has one."""
        with self._lock:
            halt = self._running.get(session or "")
        if halt is not None:
            halt.ask()

    def stop_all(self) -> None:
        """End all runs."""
        with self._lock:
            halts = list(self._running.values())
        for halt in halts:
            halt.ask()

    def leave(self, session: str, made: Any) -> None:
        """Keep what came of the run of this page until it is taken, or the run is ended."""
        with self._lock:
            if session in self._running:  # the page may be gone
                self._left[session] = made

    def take(self, session: str) -> Any:
        """What was left, once; None if nothing was."""
        with self._lock:
            return self._left.pop(session, None)

    def end(self, session: str) -> None:
        """The run is over."""
        with self._lock:
            halt = self._running.pop(session, None)
            self._left.pop(session, None)
        if halt is not None:
            halt.ask()


__all__ = ["MOST_WAITING", "Halt", "LeftError", "Sessions", "Worker"]
