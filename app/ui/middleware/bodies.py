"""What a request may carry: how many bytes, how slowly, how many files, what JSON. Judged before Gradio reads it."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmspec.app.ui.middleware.hosts import ErrorResponse

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
MB = 1_000_000
STORAGE_CHECK_BYTES = 16 * MB
"""Bytes of one upload between two looks at how much the folder holds."""


REMOTE_PATH = re.compile(r"\s*([a-z][a-z0-9+.-]*:|[/\\]{2})", re.IGNORECASE)
"""A path with a scheme, or of another machine."""


@dataclass(frozen=True)
class RequestLimits:
    """What the server takes.

    Attributes:
        request: bytes of one upload of several files. held: bytes of all uploads at any time. spare: bytes of the disk
            that stay free. json: bytes of a JSON body. header: bytes of all header lines and the path.
        idle_s: seconds without a byte of a body. slow_s: seconds that a body of any size may take; each 50 kB add one.
    """

    max_request_bytes: int = 1000 * MB
    max_stored_bytes: int = 4000 * MB
    min_free_bytes: int = 200 * MB
    max_json_bytes: int = 1 * MB
    max_header_bytes: int = 32_768
    idle_timeout_s: float = 15.0
    base_timeout_s: float = 30.0
    min_bytes_per_s: int = 50_000


class RefusedError(Exception):
    """The request is refused; `refusal` is its answer."""

    def __init__(self, refusal: ErrorResponse) -> None:
        super().__init__(refusal.text)
        self.response = refusal


class UploadFolder:
    """The folder that uploads lie in: each in a folder of its own, and those that still arrive directly in it."""

    def __init__(self, folder: Path, bounds: RequestLimits, files: int) -> None:
        self.folder, self.request_limits, self.max_files = folder, bounds, files
        self._arriving = 0

    def begin(self) -> None:
        """An upload begins."""
        self._arriving += 1

    def end(self) -> None:
        """An upload is over, in whatever way. Files that nobody will ask for are removed."""
        self._arriving -= 1
        if self._arriving == 0 and self.folder.is_dir():
            for file in self.folder.iterdir():
                if file.is_file():
                    with suppress(OSError):
                        file.unlink()

    def free_bytes(self) -> int:
        """Bytes that may still be stored."""
        held = 0
        for file in self.folder.rglob("*"):
            with suppress(OSError):
                held += file.stat().st_size if file.is_file() else 0
        place = self.folder if self.folder.is_dir() else self.folder.parent
        return min(
            self.request_limits.max_stored_bytes - held,
            shutil.disk_usage(place).free - self.request_limits.min_free_bytes,
        )


class BodyReader:
    """The body of one request as it arrives; raises `RefusedError` as soon as it is too much."""

    def __init__(self, receive: Receive, bounds: RequestLimits, limit: int, told: int | None) -> None:
        """limit: bytes. told: what `Content-Length` says.

        Raises:
            RefusedError: it says more than the limit.
        """
        self._receive, self.request_limits, self.limit = receive, bounds, limit
        self.size, self._start_time, self.complete = 0, time.monotonic(), False
        if told is not None and told > limit:
            raise RefusedError(body_too_large(limit))

    async def read_chunk(self) -> bytes:
        """The next part; empty at the end perhaps.

        Raises:
            RefusedError: too large, too slow, or the client has gone.
        """
        try:
            message = await asyncio.wait_for(self._receive(), self.request_limits.idle_timeout_s)
        except TimeoutError:
            raise RefusedError(
                ErrorResponse(408, f"No byte of the body in {self.request_limits.idle_timeout_s:g} s.")
            ) from None
        if message["type"] == "http.disconnect":
            raise RefusedError(ErrorResponse(400, "The client left before its body was complete."))
        part: bytes = message.get("body", b"")
        self.complete = not message.get("more_body", False)
        self.size += len(part)
        if self.size > self.limit:
            raise RefusedError(body_too_large(self.limit))
        if (
            time.monotonic() - self._start_time
            > self.request_limits.base_timeout_s + self.size / self.request_limits.min_bytes_per_s
        ):
            raise RefusedError(ErrorResponse(408, "The body arrives too slowly."))
        return part

    async def read_all(self) -> bytes:
        """All of it."""
        parts = [await self.read_chunk()]
        while not self.complete:
            parts.append(await self.read_chunk())
        return b"".join(parts)


class PartCounter:
    """Counts the parts of a multipart body as it passes."""

    def __init__(self, boundary: bytes, most: int) -> None:
        self._mark, self._most, self._count, self._tail = b"--" + boundary, most, 0, b""

    def feed(self, part: bytes) -> None:
        """One more piece of the body.

        Raises:
            RefusedError: it has more parts than are taken.
        """
        piece = self._tail + part
        self._count += piece.count(self._mark)
        self._tail = piece[-(len(self._mark) - 1) :]
        if self._count > self._most + 1:  # the last one ends the body
            raise RefusedError(ErrorResponse(413, f"More than {self._most} files in one request."))


def body_too_large(limit: int) -> ErrorResponse:
    """The answer to a body above the limit."""
    return ErrorResponse(413, f"The body has more than {limit} bytes, which is the limit.")


def parse_json_object(body: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        RefusedError: it is none, or holds what cannot be written as UTF-8.
    """
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_reject_constant)
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # lone surrogates
    except (ValueError, RecursionError):
        raise RefusedError(ErrorResponse(400, "The body is not JSON, or is nested too deeply.")) from None
    if not isinstance(value, dict):
        raise RefusedError(ErrorResponse(400, "The body must be a JSON object."))
    return value


def has_remote_path(value: Any) -> bool:
    """Whether a file in it has the address of another server for its path, which Gradio would fetch.

    value: of `parsed`, which bounds its depth.
    """
    stack = [value]
    while stack:
        one = stack.pop()
        path = one.get("path") if isinstance(one, dict) else None
        if isinstance(path, str) and REMOTE_PATH.match(path):
            return True
        stack += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    return False


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


__all__ = [
    "BodyReader",
    "Message",
    "PartCounter",
    "Receive",
    "RefusedError",
    "RequestLimits",
    "UploadFolder",
    "body_too_large",
    "has_remote_path",
    "parse_json_object",
]
