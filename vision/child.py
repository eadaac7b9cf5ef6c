"""The process in which videos are decoded for `mmspec.vision.isolated`. It may die at any moment: that is its purpose.

Requests come in and answers go out as a line of JSON and, behind it, bytes: what is in a file, or the colours of
pictures. Nothing is unpickled on either side. Knows readers; knows neither samplers nor torch nor who asks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import IO, Any

from mmspec.vision.readers import READERS, EndedEarlyError, NoFramesError, Reader, Source

LINE = 1 << 26
"""A line is no longer than that."""
GRACE_S = 10.0
"""The process ends itself so long after it should have been ended: whoever started it may be dead."""
KINDS: dict[type[Exception], str] = {
    NoFramesError: "nothing",
    EndedEarlyError: "early",
    ImportError: "missing",
    MemoryError: "memory",
}
"""What sort of failure is told; all others are "unreadable"."""


def send(stream: IO[bytes], head: Mapping[str, Any], parts: Iterable[bytes] = ()) -> None:
    """Write one message."""
    stream.write(json.dumps(head).encode() + b"\n")
    for part in parts:
        stream.write(part)
    stream.flush()


def receive(stream: IO[bytes]) -> dict[str, Any] | None:
    """The head of the next message, or None if there is no more.

    Raises:
        ValueError: not a message.
    """
    line = stream.readline(LINE)
    if not line:
        return None
    head = json.loads(line)
    if not isinstance(head, dict):
        raise ValueError(f"a message begins with an object; got {line[:40]!r}.")
    return head


def exactly(stream: IO[bytes], count: int) -> bytes:
    """The next `count` bytes.

    Raises:
        EOFError: there are fewer.
    """
    data = stream.read(count)
    if len(data) < count:
        raise EOFError(f"{len(data)} of {count} bytes")
    return data


def main(limit_s: float, memory: int) -> None:
    """Answer requests until there are no more.

    Args:
        limit_s: seconds that one request may take. memory: bytes that the process may have.
    """
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints must not come between two answers
    _bound(memory)
    with suppress(BrokenPipeError, EOFError):
        _answer_all(requests, answers, limit_s)
    os._exit(0)  # at once: decoders have been seen to crash while they tidy up


def _answer_all(requests: IO[bytes], answers: IO[bytes], limit_s: float) -> None:
    reader: Reader | None = None
    while (asked := receive(requests)) is not None:
        content: Source = exactly(requests, asked["bytes"]) if "bytes" in asked else str(asked.get("path"))
        _alarm(limit_s + GRACE_S)
        head: dict[str, Any] = {}
        parts: Iterable[bytes] = ()
        try:
            if asked["do"] == "open":
                reader = READERS[asked["reader"]](content)
                head = asdict(reader.about)
            elif reader is not None and asked["do"] == "read":
                images, times = reader.read(asked["chosen"], (asked["width"], asked["height"]))
                head, parts = {"times": times}, (image.convert("RGB").tobytes() for image in images)
            elif reader is not None:
                reader.close()
                reader = None
        except Exception as error:  # decoders raise anything
            head = _failure(error)
        send(answers, head, parts)
        _alarm(0)


def _failure(error: Exception) -> dict[str, Any]:
    """How an error is told."""
    kind = next((kind for one, kind in KINDS.items() if isinstance(error, one)), "unreadable")
    told = str(error).strip() or type(error).__name__
    return {"failed": kind, "told": told[-2000:], "total": getattr(error, "total", 0)}


def _bound(memory: int) -> None:
    """No more memory than that, and no core files. Where the system cannot bound a process, it is not bound."""
    try:
        import resource
    except ImportError:
        return
    for what, most in ((resource.RLIMIT_DATA, memory), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError, OSError):  # a lower limit holds already
            resource.setrlimit(what, (most, most))


def _alarm(seconds: float) -> None:
    """End the process, in whatever code it is by then, unless told otherwise in time; 0 tells otherwise."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


__all__ = ["exactly", "main", "receive", "send"]
