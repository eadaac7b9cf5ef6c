"""Worker process that decodes files for `mmspec.vision.video.decoder_pool`. It is expected to crash on hostile files.

Requests and answers are one line of JSON, followed by bytes: the content of a file, or the pixels of images. Neither
side unpickles anything. While a file is decoded the process can open nothing else (`mmspec.vision.video.sandbox`). It
uses readers, and knows neither samplers nor torch.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from typing import IO, Any

from PIL import Image

from mmspec.vision import images
from mmspec.vision.video import sandbox
from mmspec.vision.video.containers import FileBelow
from mmspec.vision.video.pyav_reader import PyavReader
from mmspec.vision.video.reader import NoFramesError, RecountedError, VideoSource

MAX_HEADER_BYTES = 1 << 26
"""Limit on the JSON line of a message."""
READY: Mapping[str, Any] = {"ready": True}
"""The first message: what ends the process before is no file."""
READ_ARGUMENTS = ("numbers", "by_time", "max_pixels")
"""Of `VideoReader.read`, in order."""
END = b"\n"
"""What follows the bytes of an answer, so that one of another size is noticed at once."""
GRACE_S = 10.0
"""Seconds after its deadline at which the process ends itself, in case its parent is dead."""
AV_MODULES = ("error", "logging", "stream", "subtitles.stream", "video.reformatter")
PREPARE: Mapping[str, Callable[[], object]] = {
    "open": lambda: [importlib.import_module(f"av.{name}") for name in AV_MODULES],
    "image": images.available_formats,
    "table": lambda: importlib.import_module("mmspec.vision.video.table_reader"),
}
"""What is asked -> what is imported before a file is opened; `deny_open` prevents imports afterwards."""
IMAGE_BASE_BYTES = 512 << 20
"""Memory for an image independent of its size: the process and the structures of the file."""
DECODE_BYTES_PER_PIXEL = 32
"""Memory per pixel of an image: five RGBA copies and the answer; 23 bytes were measured."""
TABLE_BASE_BYTES = 1 << 30
"""Memory for a table, whatever its size: a picture of the largest size that compresses well, and its copies."""
TABLE_BYTES_PER_BYTE = 4
"""Memory per byte of the file: a page that does not compress, its values, and their copies."""
OPEN_BYTES_PER_PIXEL = 10
"""Memory per pixel of the largest allowed image to open it: the two canvases of WebP."""
FAILURE_KINDS: dict[type[Exception], str] = {
    NoFramesError: "no_frames",
    RecountedError: "recounted",
    images.ImageError: "image",
    ImportError: "not_installed",
    MemoryError: "memory",
}
"""Kinds of failures in an answer; all others are "unreadable"."""


def write_message(stream: IO[bytes], header: Mapping[str, Any], parts: Iterable[bytes] = ()) -> None:
    """Write a message: `header` as a line of JSON, then `parts`."""
    stream.write(json.dumps(header).encode() + b"\n")
    for part in parts:
        stream.write(part)
    stream.flush()


def read_message(stream: IO[bytes]) -> dict[str, Any] | None:
    """The header of the next message, or None at the end of the stream.

    Raises:
        ValueError: The line is not a JSON object.
    """
    line = stream.readline(MAX_HEADER_BYTES)
    if not line:
        return None
    header = json.loads(line)
    if not isinstance(header, dict):
        raise ValueError(f"a message begins with a JSON object; got {line[:40]!r}.")
    return header


def read_exactly(stream: IO[bytes], count: int) -> bytes:
    """The next `count` bytes.

    Raises:
        EOFError: The stream has fewer.
    """
    data = stream.read(count)
    if len(data) < count:
        raise EOFError(f"{len(data)} of {count} bytes")
    return data


def run_worker(timeout_s: float, memory: int) -> None:
    """Answer requests on standard input until it is closed.

    Args:
        timeout_s: Limit on the seconds of one request.
        memory: Limit on the bytes of the process.
    """
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # output of libraries must not mix with the answers
    os.dup2(1, 2)  # decoders log errors there; the answers contain them
    sandbox.limit_process(memory)
    write_message(answers, READY)
    with suppress(BrokenPipeError, EOFError):
        _RequestHandler(memory, timeout_s).serve(requests, answers)
    os._exit(0)  # without cleanup: decoders can crash in theirs


class _RequestHandler:
    """Answers requests; one video or table is open at a time."""

    def __init__(self, memory: int, timeout_s: float) -> None:
        self._memory = memory
        self._timeout_s = timeout_s
        self._reader: Any = None
        self._table: Any = None

    def serve(self, requests: IO[bytes], answers: IO[bytes]) -> None:
        """Answer until the end of `requests`."""
        self._requests, self._answers = requests, answers
        while (request := read_message(requests)) is not None:
            content: VideoSource
            content = read_exactly(requests, request["bytes"]) if "bytes" in request else str(request.get("path"))
            if "folder" in request:
                content = FileBelow(str(request["folder"]), str(content))
            _set_alarm(self._timeout_s + GRACE_S)
            sandbox.limit_cpu_time((self._timeout_s + GRACE_S) * (os.cpu_count() or 1))
            try:
                PREPARE.get(request["op"], dict)()
                with sandbox.deny_open():
                    header, parts = self._answer(request, content)
            except Exception as error:  # decoders raise exceptions of any type
                header, parts = _describe_failure(error), []
            if self._table is None:
                sandbox.limit_memory(self._memory)
            write_message(answers, header, chain(map(_to_bytes, parts), (END,)))
            parts = []
            _set_alarm(0)

    def _answer(
        self, request: Mapping[str, Any], content: VideoSource
    ) -> tuple[Mapping[str, Any], Sequence[Image.Image | bytes]]:
        """The header of an answer, and images or bytes."""
        match request["op"]:
            case "image":
                image = self._decode_image(content, request["max_pixels"])
                return {"width": image.width, "height": image.height}, [image]
            case "open":
                self._reader = PyavReader(content)
                return asdict(self._reader.info), []
            case "read":
                indices, timestamps, frames = self._reader.read(*(request[name] for name in READ_ARGUMENTS))
                width, height = frames[0].size
                return {"indices": indices, "timestamps": timestamps, "width": width, "height": height}, frames
            case "table":
                return self._open_table(request["kind"], request["size"]), []
            case "group_bytes":
                return {"bytes": self._table.group_bytes(request["group"], request["columns"])}, []
            case "rows":
                self._table.start(request["group"], request["columns"])
                return self._next_rows()
            case "more":
                return self._next_rows()
        if self._reader is not None:
            self._reader.close()
        self._reader = self._table = None
        return {}, []

    def _open_table(self, kind: str, size: int) -> dict[str, Any]:
        from mmspec.vision.video.table_reader import TableReader

        sandbox.limit_memory(min(self._memory, TABLE_BASE_BYTES + TABLE_BYTES_PER_BYTE * size))
        self._table = TableReader(kind, size, self._read_range)
        return {"columns": self._table.columns, "group_rows": self._table.group_rows}

    def _next_rows(self) -> tuple[Mapping[str, Any], Sequence[bytes]]:
        found: tuple[Mapping[str, Any], Sequence[bytes]] = self._table.next_rows()
        return found

    def _read_range(self, start: int, size: int) -> bytes:
        """Bytes of the file that the other side has opened.

        Raises:
            OSError: They cannot be read.
            EOFError: The other side has ended.
        """
        write_message(self._answers, {"need": [start, size]})
        reply = read_message(self._requests)
        if reply is None:
            raise EOFError
        if "failed" in reply:
            raise OSError(reply["failed"])
        return read_exactly(self._requests, reply["bytes"])

    def _decode_image(self, content: VideoSource, max_pixels: int) -> Image.Image:
        with images.pixel_limit(max_pixels, strict=False):
            data = content if isinstance(content, bytes) else images.read_image_bytes(content)
            base = IMAGE_BASE_BYTES + len(data)
            sandbox.limit_memory(min(self._memory, base + OPEN_BYTES_PER_PIXEL * max_pixels))

            def raise_limit(num_pixels: int) -> None:
                needed = base + DECODE_BYTES_PER_PIXEL * min(num_pixels, max_pixels)
                sandbox.limit_memory(min(self._memory, needed))

            return images.decode_image(data, max_pixels, raise_limit)


def _to_bytes(part: Image.Image | bytes) -> bytes:
    return part if isinstance(part, bytes) else part.convert("RGB").tobytes()


def _describe_failure(error: Exception) -> dict[str, Any]:
    """The header of an answer that reports `error`."""
    kind = next((kind for error_type, kind in FAILURE_KINDS.items() if isinstance(error, error_type)), "unreadable")
    message = str(error).strip() or type(error).__name__
    return {
        "failed": kind,
        "message": message[-2000:],
        "num_frames": getattr(error, "num_frames", 0),
        "kind": getattr(error, "kind", ""),
    }


def _set_alarm(seconds: float) -> None:
    """End the process after `seconds`, whatever code it runs by then; 0 cancels the alarm."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)
