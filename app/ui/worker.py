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
MAX_QUEUED_RUNS = 20
"""Runs that may wait for the device."""
POLL_INTERVAL_S = 0.25
"""Seconds between two looks at a run. Each costs the run a little time, since Python runs one thread at a time."""


class LeftQueueError(Exception):
    """A run was halted before it began."""


class CancelSignal:
    """Whether a run should end: because someone said so, or because nobody looks at it any more."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self._event, self._lease_s, self._renewed_at = threading.Event(), lease_s, time.monotonic()

    def cancel(self) -> None:
        """End the run at its next token."""
        self._event.set()

    def renew(self) -> None:
        """Somebody still looks."""
        self._renewed_at = time.monotonic()

    @property
    def cancel_requested(self) -> bool:
        """Whether somebody said so."""
        return self._event.is_set()

    @property
    def should_stop(self) -> bool:
        """Whether the run should end now."""
        return self.cancel_requested or time.monotonic() - self._renewed_at > self._lease_s


class Worker:
    """The thread, and how to follow what it does."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mmspec-device")
        self._queue: list[Future[Any]] = []
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do `work` when all that was asked before is done."""
        with self._lock:
            future = self._pool.submit(work)
            self._queue = [one for one in self._queue if not one.done()] + [future]
            return future

    def num_ahead(self, future: Future[Any]) -> int:
        """How many must end before this one begins."""
        if future.running() or future.done():
            return 0
        with self._lock:
            before = self._queue[: self._queue.index(future)]
        return sum(not one.done() for one in before)

    def submit_and_poll(
        self,
        work: Callable[[], T],
        cancel_signal: CancelSignal,
        interval_s: float = POLL_INTERVAL_S,
        yield_first: bool = False,
    ) -> Generator[int, None, T]:
        """Do `work`, yielding now and then until it is done how many are ahead of it; returns its result.

        Whoever stops iterating ends the run: `halt` is asked as soon as this generator is closed. first: yield at once.

        Raises:
            LeftError: the run was halted while it waited; it leaves the line at once.
            UsageError: too many wait already.
        """
        with self._lock:
            waiting = sum(not one.done() for one in self._queue)
        if waiting > MAX_QUEUED_RUNS:
            raise UsageError(f"{MAX_QUEUED_RUNS} questions are waiting already, which is the limit; try again later.")
        cancel_signal.renew()
        future = self.submit(work)
        try:
            if yield_first:
                yield self.num_ahead(future)
            while True:
                try:
                    return future.result(timeout=interval_s)
                except NotYetError:
                    if future.done():  # the work itself has timed out
                        raise
                if cancel_signal.cancel_requested and future.cancel():
                    raise LeftQueueError
                cancel_signal.renew()
                yield self.num_ahead(future)
        finally:
            cancel_signal.cancel()
            future.cancel()

    def close(self) -> None:
        """Start nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class SessionRegistry:
    """The run of each open page; a page has one at a time."""

    def __init__(self) -> None:
        self._signals: dict[str, CancelSignal] = {}
        self._results: dict[str, Any] = {}
        self._lock = threading.Lock()

    def begin(self, session: str) -> CancelSignal:
        """A run of this page begins.

        Raises:
            UsageError: it has one already.
        """
        with self._lock:
            old = self._signals.get(session)
            if old is not None and not old.cancel_requested:  # one that waits in the queue is looked at by nobody
                raise UsageError("A run of this page is still going; wait for it, or stop it.")
            halt = self._signals[session] = CancelSignal()
            return halt

    def get_signal(self, session: str) -> CancelSignal:
        """The run that was begun, or, should there be none, a new one."""
        with self._lock:
            return self._signals.setdefault(session, CancelSignal())

    def cancel(self, session: str | None) -> None:
        """End the run of this page, if it has one."""
        with self._lock:
            halt = self._signals.get(session or "")
        if halt is not None:
            halt.cancel()

    def cancel_all(self) -> None:
        """End all runs."""
        with self._lock:
            halts = list(self._signals.values())
        for halt in halts:
            halt.cancel()

    def store_result(self, session: str, result: Any) -> None:
        """Keep what came of the run of this page until it is taken, or the run is ended."""
        with self._lock:
            if session in self._signals:  # the page may be gone
                self._results[session] = result

    def take_result(self, session: str) -> Any:
        """What was left, once; None if nothing was."""
        with self._lock:
            return self._results.pop(session, None)

    def end(self, session: str) -> None:
        """The run is over."""
        with self._lock:
            halt = self._signals.pop(session, None)
            self._results.pop(session, None)
        if halt is not None:
            halt.cancel()


__all__ = ["MAX_QUEUED_RUNS", "CancelSignal", "LeftQueueError", "SessionRegistry", "Worker"]
