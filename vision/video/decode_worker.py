"""The process in which files are decoded for `mmspec.vision.video.decoder_pool`. It may die at any moment: that is its purpose.

Requests come in and answers go out as a line of JSON and, behind it, bytes: what is in a file, or the colours of
pictures. Nothing is unpickled on either side. While a file is decoded nothing else can be opened (`bounds`). Knows
readers; knows neither samplers nor torch nor who asks.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import IO, Any

from PIL import Image

from mmspec.vision.video import sandbox as bounds
from mmspec.vision.video.backends import READERS, EndedEarlyError, NoFramesError, Reader, Source

LINE = 1 << 26
"""A line is no longer than that."""
GRACE_S = 10.0
"""The process ends itself so long after it should have been ended: whoever started it may be dead."""
LIBRARIES = {
    "decord": ("decord",),
    "torchcodec": ("torchcodec.decoders",),
    "pyav": ("av", "av.error", "av.stream", "av.subtitles.stream", "av.video.reformatter"),
    "picture": ("mmspec.vision.images",),
}
"""What is imported before a file is opened: afterwards nothing can be."""
STILL_BYTES, STILL_BYTES_A_PIXEL, OPEN_BYTES_A_PIXEL = 512 << 20, 32, 10
"""Memory for a picture: of the process as such and the file's structures; for each pixel (five images in RGBA and what
is sent; 23 bytes were measured); and to open one of the largest size (the two canvases of WebP)."""
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
    os.dup2(1, 2)  # decoders talk; what is wrong is in the answers
    bounds.confine(memory)
    with suppress(BrokenPipeError, EOFError):
        _Desk(memory, limit_s).answer_all(requests, answers)
    os._exit(0)  # at once: decoders have been seen to crash while they tidy up


class _Desk:
    """Answers requests: one video is open at a time."""

    def __init__(self, memory: int, limit_s: float) -> None:
        self._memory, self._limit_s = memory, limit_s
        self._reader: Reader | None = None

    def answer_all(self, requests: IO[bytes], answers: IO[bytes]) -> None:
        """Until there are no more."""
        while (asked := receive(requests)) is not None:
            content: Source = exactly(requests, asked["bytes"]) if "bytes" in asked else str(asked.get("path"))
            _alarm(self._limit_s + GRACE_S)
            bounds.cpu((self._limit_s + GRACE_S) * (os.cpu_count() or 1))
            try:
                head, images = self._answer(asked, content)
            except Exception as error:  # decoders raise anything
                head, images = _failure(error), []
            send(answers, head, (image.convert("RGB").tobytes() for image in images))
            _alarm(0)

    def _answer(self, asked: Mapping[str, Any], content: Source) -> tuple[dict[str, Any], list[Image.Image]]:
        """The head of an answer, and pictures."""
        if asked["do"] == "picture":
            return self._picture(content, asked["max_pixels"])
        if asked["do"] == "open":
            self._import(asked["reader"])
            with bounds.sealed():
                self._reader = READERS[asked["reader"]](content)
            return asdict(self._reader.about), []
        if self._reader is not None and asked["do"] == "read":
            with bounds.sealed():
                images, times = self._reader.read(asked["chosen"], (asked["width"], asked["height"]))
            return {"times": times}, images
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        return {}, []

    def _picture(self, content: Source, max_pixels: int) -> tuple[dict[str, Any], list[Image.Image]]:
        self._import("picture")
        from mmspec.vision import images as stills

        stills.formats()
        try:
            with bounds.sealed(), stills.pixel_limit(max_pixels, strict=False):
                held = content if isinstance(content, bytes) else stills.content_of(content)
                room = STILL_BYTES + len(held)
                bounds.memory(min(self._memory, room + OPEN_BYTES_A_PIXEL * max_pixels))

                def grant(pixels: int) -> None:
                    bounds.memory(min(self._memory, room + STILL_BYTES_A_PIXEL * min(pixels, max_pixels)))

                image = stills.read_still(held, max_pixels, grant)
        except stills.ImageError as error:
            return {"failed": "picture", "kind": error.kind, "told": str(error)}, []
        finally:
            bounds.memory(self._memory)
        return {"width": image.width, "height": image.height}, [image]

    def _import(self, what: str) -> None:
        """Import what a reader uses; one that is not known here imports by itself."""
        for name in LIBRARIES.get(what, ()):
            importlib.import_module(name)


def _failure(error: Exception) -> dict[str, Any]:
    """How an error is told."""
    kind = next((kind for one, kind in KINDS.items() if isinstance(error, one)), "unreadable")
    told = str(error).strip() or type(error).__name__
    return {"failed": kind, "told": told[-2000:], "total": getattr(error, "total", 0)}


def _alarm(seconds: float) -> None:
    """End the process, in whatever code it is by then, unless told otherwise in time; 0 tells otherwise."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


__all__ = ["exactly", "main", "receive", "send"]
