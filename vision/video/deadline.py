"""Time limits that do not count what a process spends suspended: by SIGSTOP, a frozen container, a closed laptop."""

from __future__ import annotations

import threading
import time

TICK_S = 1.0
"""Longest wait at a time."""
MAX_STEP_S = 2.0
"""Most that counts of such a wait; where more has passed this process did not run."""


class Deadline:
    """A number of seconds, spent while one thread waits for the end of what another does.

    Attributes:
        seconds: As many as there were at first.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._left_s, self._lock = seconds, threading.Lock()
        self._waiting_since: float | None = None
        self._has_lost = False

    @property
    def left_s(self) -> float:
        """Seconds that are left, as of the last tick."""
        return self._left_s

    @property
    def was_suspended(self) -> bool:
        """Whether there was time that did not count."""
        since = self._waiting_since
        return self._has_lost or (since is not None and time.monotonic() - since > MAX_STEP_S)

    def extend(self, seconds: float) -> None:
        """Allow more seconds."""
        with self._lock:
            self._left_s += seconds

    def wait(self, done: threading.Event) -> bool:
        """Wait until `done` is set or no time is left; returns whether it was set."""
        while self._left_s > 0:
            self._waiting_since = start = time.monotonic()
            is_done = done.wait(min(TICK_S, self._left_s))
            passed = time.monotonic() - start
            self._has_lost = self._has_lost or passed > MAX_STEP_S
            self.extend(-min(passed, MAX_STEP_S))
            if is_done:
                break
        self._waiting_since = None
        return done.is_set()
