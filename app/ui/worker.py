"""One thread that runs all model work, one job at a time, and signals that end a job early.

Two concurrent runs would distort both timings and share torch's random generator, so each device has a single thread.
This module does not know what a job computes.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYetError
from dataclasses import dataclass
from typing import Any, TypeVar

from mmspec.app.errors import UsageError

T = TypeVar("T")
LEASE_S = 15.0
"""Seconds without a poll after which a run is ended."""
MAX_QUEUED_RUNS = 20
"""Runs that may wait for the device."""
MAX_QUEUED_PER_SESSION = 3
"""Waiting runs of one session, so that one client leaves room for others."""
MAX_QUEUED_PER_ADDRESS = 10
"""Waiting runs of one network address, which may open any number of sessions. Clients behind one proxy share it."""
POLL_INTERVAL_S = 0.25
"""Seconds between two polls of a run. Each poll slows the run a little, since Python runs one thread at a time."""


class LeftQueueError(Exception):
    """A run was cancelled before it started."""


@dataclass(frozen=True)
class Client:
    """Who submits a run.

    Attributes:
        session: name of the page or of the `gradio_client` session.
        address: network address; empty if unknown, which is then not limited.
    """

    session: str
    address: str = ""


@dataclass(frozen=True)
class QueuedRun:
    """An entry of the worker's queue."""

    future: Future[Any]
    client: Client | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether the run has not started yet."""
        return not self.future.done() and not self.future.running()


class CancelSignal:
    """Whether a run should end: because it was cancelled, or because its lease expired (nobody polls it any more)."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self._event = threading.Event()
        self._lease_s = lease_s
        self._renewed_at = time.monotonic()
        self._listeners: list[Callable[[float], None]] = []
        self._lock = threading.Lock()

    def cancel(self) -> None:
        """End the run at its next token."""
        self._event.set()
        self._publish_deadline()

    def renew(self) -> None:
        """Extend the lease: somebody still polls the run."""
        self._renewed_at = time.monotonic()
        self._publish_deadline()

    def on_deadline(self, listener: Callable[[float], None]) -> None:
        """Call `listener` now and at every change with the `time.time()` when the run should end; -inf is at once."""
        with self._lock:
            self._listeners.append(listener)
        self._publish_deadline()

    def _publish_deadline(self) -> None:
        with self._lock:  # a deadline that was computed before `cancel` must not replace its -inf
            deadline = -math.inf if self.cancel_requested else time.time() + self._lease_s
            for listener in self._listeners:
                listener(deadline)

    @property
    def cancel_requested(self) -> bool:
        """Whether `cancel` was called."""
        return self._event.is_set()

    @property
    def should_stop(self) -> bool:
        """Whether the run should end now."""
        return self.cancel_requested or time.monotonic() - self._renewed_at > self._lease_s


class Worker:
    """The device thread and its queue.

    Attributes:
        on_busy: called in the device thread with True before each job and with False after it.
    """

    def __init__(self) -> None:
        self.on_busy: Callable[[bool], None] = lambda is_busy: None
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mmspec-device")
        self._queue: list[QueuedRun] = []
        self._background: CancelSignal | None = None
        self._lock = threading.Lock()

    def submit_background(self, work: Callable[[], T], cancel_signal: CancelSignal) -> Future[T]:
        """Run `work` after all jobs submitted before it; the first run of a client sets `cancel_signal`."""
        with self._lock:
            self._background = cancel_signal
            return self._submit(work, None)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` after all jobs submitted before it, without a limit on the queue."""
        with self._lock:
            return self._submit(work, None)

    def _submit(self, work: Callable[[], T], client: Client | None) -> Future[T]:
        future = self._pool.submit(self._run, work)
        self._queue = [run for run in self._queue if not run.future.done()] + [QueuedRun(future, client)]
        return future

    def _run(self, work: Callable[[], T]) -> T:
        self.on_busy(True)
        try:
            return work()
        finally:
            self.on_busy(False)

    def num_ahead(self, future: Future[Any]) -> int:
        """Number of jobs that must end before this one starts."""
        if future.running() or future.done():
            return 0
        with self._lock:
            futures = [run.future for run in self._queue]
        return sum(not other.done() for other in futures[: futures.index(future)])

    def submit_and_poll(
        self,
        work: Callable[[], T],
        cancel_signal: CancelSignal,
        interval_s: float = POLL_INTERVAL_S,
        yield_first: bool = False,
        client: Client | None = None,
    ) -> Generator[int, None, T]:
        """Run `work`; yields the number of jobs ahead of it at every poll, and returns its result.

        Closing this generator ends the run: it sets `cancel_signal`.

        Args:
            work: the job.
            cancel_signal: what the job itself checks; renewed at every poll.
            interval_s: seconds between two polls.
            yield_first: yield once before the first wait.
            client: who submits; None is not limited per client.

        Raises:
            LeftQueueError: the run was cancelled while it waited.
            UsageError: the queue is full, or holds too many runs of this client.
        """
        cancel_signal.renew()
        with self._lock:
            self._check_queue(client)
            if self._background is not None:
                self._background.cancel()
            future = self._submit(work, client)
        try:
            if yield_first:
                yield self.num_ahead(future)
            while True:
                try:
                    return future.result(timeout=interval_s)
                except NotYetError:
                    if future.done():  # the job itself raised a TimeoutError
                        raise
                if cancel_signal.cancel_requested and future.cancel():
                    raise LeftQueueError
                cancel_signal.renew()
                yield self.num_ahead(future)
        finally:
            cancel_signal.cancel()
            future.cancel()

    def _check_queue(self, client: Client | None) -> None:
        """Refuse a run for which there is no room. Called with the lock held."""
        if sum(not run.future.done() for run in self._queue) > MAX_QUEUED_RUNS:
            raise UsageError(f"{MAX_QUEUED_RUNS} runs are waiting already, which is the limit; try again later.")
        if client is None:
            return
        waiting = [run.client for run in self._queue if run.client is not None and run.is_waiting]
        if sum(other.session == client.session for other in waiting) >= MAX_QUEUED_PER_SESSION:
            raise UsageError(
                f"{MAX_QUEUED_PER_SESSION} runs of this session are waiting already, which is the limit for one "
                "session; wait for one of them to end, or cancel it."
            )
        if client.address and sum(other.address == client.address for other in waiting) >= MAX_QUEUED_PER_ADDRESS:
            raise UsageError(
                f"{MAX_QUEUED_PER_ADDRESS} runs from your network address are waiting already, which is the limit; "
                "try again later."
            )

    def close(self) -> None:
        """Start no further job."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class SessionRegistry:
    """The active run of each open page. A page has one at a time."""

    def __init__(self) -> None:
        self._signals: dict[str, CancelSignal] = {}
        self._results: dict[str, Any] = {}
        self._failures: dict[str, Exception] = {}
        self._lock = threading.Lock()

    def begin(self, session: str) -> CancelSignal:
        """Register a run of this page.

        Raises:
            UsageError: the page has an active run.
        """
        with self._lock:
            previous = self._signals.get(session)
            # Not `should_stop`: the lease of a run that waits in Gradio's queue is renewed by nobody.
            if previous is not None and not previous.cancel_requested:
                raise UsageError("A run of this page is still active; wait for it to end, or stop it.")
            self._signals[session] = CancelSignal()
            self._failures.pop(session, None)
            return self._signals[session]

    def get_signal(self, session: str) -> CancelSignal:
        """The signal of the page's run, created if there is none."""
        with self._lock:
            return self._signals.setdefault(session, CancelSignal())

    def has_run(self, session: str) -> bool:
        """Whether the page has a run, active or about to end."""
        with self._lock:
            return session in self._signals

    def cancel(self, session: str | None) -> None:
        """Cancel the run of this page, if it has one."""
        with self._lock:
            cancel_signal = self._signals.get(session or "")
        if cancel_signal is not None:
            cancel_signal.cancel()

    def cancel_all(self) -> None:
        """Cancel all runs."""
        with self._lock:
            cancel_signals = list(self._signals.values())
        for cancel_signal in cancel_signals:
            cancel_signal.cancel()

    def store_result(self, session: str, result: Any) -> None:
        """Store the result of the page's run until it is taken, or the run is ended."""
        with self._lock:
            if session in self._signals:  # otherwise the page was closed
                self._results[session] = result

    def take_result(self, session: str) -> Any:
        """The stored result, removed from the registry; None if there is none."""
        with self._lock:
            return self._results.pop(session, None)

    def store_failure(self, session: str, error: Exception) -> None:
        """Store why the page's run failed or did not start, until it is taken, or the page begins or ends a run."""
        with self._lock:
            self._failures[session] = error

    def take_failure(self, session: str) -> Exception | None:
        """Why the page's run failed, removed from the registry; None if nothing is stored."""
        with self._lock:
            return self._failures.pop(session, None)

    def end(self, session: str) -> None:
        """Cancel and forget the run of this page."""
        with self._lock:
            cancel_signal = self._signals.pop(session, None)
            self._results.pop(session, None)
            self._failures.pop(session, None)
        if cancel_signal is not None:
            cancel_signal.cancel()
