"""`GracefulStop`: a job that is interrupted finishes its batch."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

SignalHandler = Callable[[int, FrameType | None], object] | int | None
"""What `signal.signal` takes and returns."""


class GracefulStop:
    """First SIGINT or SIGTERM: finish the batch. Second: KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self.signal = 0
        self._previous_handlers: dict[int, SignalHandler] = {}

    def __enter__(self) -> GracefulStop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous_handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal:
            raise KeyboardInterrupt
        self.signal = number
        os.write(_stderr_number(), b"\nmmspec: finishing this batch; once more to stop at once\n")


def _stderr_number() -> int:
    """The file descriptor of standard error; a signal handler must not use its buffer."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return 2
