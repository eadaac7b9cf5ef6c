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
        left_s: Seconds that are left, as of the last tick.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = self.left_s = seconds

    def wait(self, done: threading.Event) -> bool:
        """Wait until `done` is set or no time is left; returns whether it was set."""
        while self.left_s > 0:
            start = time.monotonic()
            is_done = done.wait(min(TICK_S, self.left_s))
            self.left_s -= min(time.monotonic() - start, MAX_STEP_S)
            if is_done:
                break
        return done.is_set()
