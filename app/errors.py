"""Errors that end a command with one line. Imports nothing heavy, so that every module may import it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from mmspec.messages import one_line as one_line

EXIT_IO_ERROR = 74
"""Exit code for output that cannot be written (`EX_IOERR` of sysexits.h)."""
WRITE_ONLY_ERRORS = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space or raise the quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EROFS: "make it writable",
}
"""errno that only a write can cause -> what to do about it."""
WRITE_ERRORS = {
    **WRITE_ONLY_ERRORS,
    errno.EACCES: "make it writable",
    errno.EPERM: "make it writable",
    errno.EIO: "check the device",
}
SHORTAGES = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""errno of what the machine lacks for a moment, whatever file is opened."""
RERUN = "run the same command again: it continues where it stopped"


class UsageError(Exception):
    """The command cannot be carried out as given; the message says what was received and what to do. Exit code 2."""


class OutputError(Exception):
    """A file cannot be written: disk full, read-only, a limit on the size. Exit code `EXIT_IO_ERROR`.

    The message names the file, the reason and what to do.
    """

    def __init__(self, path: str | os.PathLike[str], error: OSError) -> None:
        reason = error.strerror or one_line(error)
        advice = WRITE_ERRORS.get(error.errno or 0, "remove the cause")
        super().__init__(f"cannot write {os.fspath(path)}: {reason}; {advice}, then {RERUN}")


class MachineError(OutputError):
    """The machine lacks something, and no input is to blame. Exit code `EXIT_IO_ERROR`, as the remedy is the same."""

    def __init__(self, error: BaseException) -> None:
        Exception.__init__(self, f"{one_line(error, 200)}: remove the cause, then {RERUN}")


def is_shortage(error: BaseException | None) -> bool:
    """Whether the machine lacked something, here or in what caused it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in SHORTAGES:
            return True
        error = error.__cause__
    return False


@contextmanager
def explain_write(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an error of the file system into an `OutputError` about `path`; a closed pipe or a lock stays as it is."""
    try:
        yield
    except (BrokenPipeError, BlockingIOError):
        raise
    except OSError as error:
        raise OutputError(path, error) from error


def find_write_error(error: BaseException) -> OutputError | None:
    """The `OutputError` for an exception of a failed write anywhere in a command, or None.

    Libraries wrap such errors: safetensors in a type of its own, with "(os error 28)" in its text.
    """
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, OSError) and current.errno in WRITE_ONLY_ERRORS:
            return OutputError(current.filename or "the output", current)
        for number in WRITE_ONLY_ERRORS:
            if f"(os error {number})" in str(current):
                return OutputError("the output", OSError(number, os.strerror(number)))
        current = current.__cause__ or current.__context__
    return None
