"""What Ray prints goes to a file while a job runs, its native code included; our own lines stay on standard error."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STDERR = 2
"""The file descriptor of standard error, to which native code writes."""


@contextmanager
def ray_messages_in_file() -> Iterator[Path]:
    """Within the context the descriptor of standard error is a file, and `sys.stderr` what standard error was.

    Yields:
        The file. It is removed if nothing was written.
    """
    number, name = tempfile.mkstemp(prefix="mmspec-ray-", suffix=".log")
    before, kept = sys.stderr, os.dup(STDERR)
    before.flush()
    own = os.fdopen(kept, "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    os.dup2(number, STDERR)
    if _writes_to(before, STDERR):  # else somebody has replaced it, as tests do
        sys.stderr = own
    try:
        yield Path(name)
    finally:
        own.flush()
        os.dup2(kept, STDERR)
        sys.stderr = before
        own.close()
        os.close(number)
        if os.path.getsize(name) == 0:
            os.unlink(name)


def _writes_to(stream: object, number: int) -> bool:
    try:
        return bool(stream.fileno() == number)  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False


def quiet_loggers() -> None:
    """What Ray's loggers print to standard error goes where its native code prints."""
    for name in ["ray", *(name for name in logging.root.manager.loggerDict if name.startswith("ray."))]:
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
                handler.setStream(os.fdopen(os.dup(STDERR), "w", buffering=1, encoding="utf-8"))
