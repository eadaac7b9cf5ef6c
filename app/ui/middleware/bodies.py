"""Limits of request bodies: bytes, rate, number of files, JSON. Checked before Gradio reads the body."""

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
"""Bytes of one upload between two measurements of the upload folder."""
REMOTE_PATH = re.compile(r"\s*([a-z][a-z0-9+.-]*:|[/\\]{2})", re.IGNORECASE)
"""A path with a URL scheme, or a network path (`//host`)."""


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one server.

    Attributes:
        max_request_bytes: body of one upload request, all files together.
        max_stored_bytes: all stored uploads.
        min_free_bytes: free disk space that uploads leave.
        max_json_bytes: a JSON body.
        max_header_bytes: all header lines, the path and the query.
        idle_timeout_s: seconds without a byte of the body.
        base_timeout_s: seconds that a body of any size may take.
        min_bytes_per_s: rate at which larger bodies must arrive.
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
    """The request is refused with `response`."""

    def __init__(self, response: ErrorResponse) -> None:
        super().__init__(response.text)
        self.response = response


class UploadFolder:
    """Gradio's upload folder: each stored upload in a folder of its own, incomplete ones directly in it."""

    def __init__(self, folder: Path, request_limits: RequestLimits, max_files: int) -> None:
        self.folder = folder
        self.request_limits = request_limits
        self.max_files = max_files
        self._num_active = 0

    def begin(self) -> None:
        """Register the start of an upload."""
        self._num_active += 1

    def end(self) -> None:
        """Register the end of an upload, complete or not. After the last one, incomplete files are removed."""
        self._num_active -= 1
        if self._num_active == 0 and self.folder.is_dir():
            for file in self.folder.iterdir():
                if file.is_file():
                    with suppress(OSError):
                        file.unlink()

    def free_bytes(self) -> int:
        """Bytes that may still be stored; negative above the limit."""
        stored = 0
        for file in self.folder.rglob("*"):
            with suppress(OSError):
                stored += file.stat().st_size if file.is_file() else 0
        existing = self.folder if self.folder.is_dir() else self.folder.parent
        free_on_disk = shutil.disk_usage(existing).free
        return min(self.request_limits.max_stored_bytes - stored, free_on_disk - self.request_limits.min_free_bytes)


class BodyReader:
    """Reads the body of one request and raises `RefusedError` as soon as it exceeds a limit."""

    def __init__(
        self, receive: Receive, request_limits: RequestLimits, max_bytes: int, content_length: int | None
    ) -> None:
        """Start the clock of the body.

        Args:
            receive: see ASGI.
            request_limits: timeouts and rate.
            max_bytes: limit of the body.
            content_length: of the header; None if absent.

        Raises:
            RefusedError: `content_length` exceeds the limit.
        """
        self._receive = receive
        self.request_limits = request_limits
        self.max_bytes = max_bytes
        self.size = 0
        self.complete = False
        self._start_time = time.monotonic()
        if content_length is not None and content_length > max_bytes:
            raise RefusedError(body_too_large(max_bytes))

    async def read_chunk(self) -> bytes:
        """The next chunk; the last one may be empty.

        Raises:
            RefusedError: too large, too slow, or the client disconnected.
        """
        limits = self.request_limits
        try:
            message = await asyncio.wait_for(self._receive(), limits.idle_timeout_s)
        except TimeoutError:
            raise RefusedError(ErrorResponse(408, f"No byte of the body in {limits.idle_timeout_s:g} s.")) from None
        if message["type"] == "http.disconnect":
            raise RefusedError(ErrorResponse(400, "The client disconnected before its body was complete."))
        chunk: bytes = message.get("body", b"")
        self.complete = not message.get("more_body", False)
        self.size += len(chunk)
        if self.size > self.max_bytes:
            raise RefusedError(body_too_large(self.max_bytes))
        if time.monotonic() - self._start_time > limits.base_timeout_s + self.size / limits.min_bytes_per_s:
            raise RefusedError(ErrorResponse(408, "The body arrives too slowly."))
        return chunk

    async def read_all(self) -> bytes:
        """The whole body.

        Raises:
            RefusedError: see `read_chunk`.
        """
        chunks = [await self.read_chunk()]
        while not self.complete:
            chunks.append(await self.read_chunk())
        return b"".join(chunks)


class PartCounter:
    """Counts the parts of a multipart body chunk by chunk."""

    def __init__(self, boundary: bytes, max_parts: int) -> None:
        self._delimiter = b"--" + boundary
        self._max_parts = max_parts
        self._count = 0
        self._tail = b""

    def feed(self, chunk: bytes) -> None:
        """Count the delimiters of one more chunk; one may be split between two chunks.

        Raises:
            RefusedError: more parts than allowed.
        """
        text = self._tail + chunk
        self._count += text.count(self._delimiter)
        self._tail = text[-(len(self._delimiter) - 1) :]
        if self._count > self._max_parts + 1:  # the last delimiter closes the body
            raise RefusedError(ErrorResponse(413, f"More than {self._max_parts} files in one request."))


def body_too_large(max_bytes: int) -> ErrorResponse:
    """The response to a body above the limit."""
    return ErrorResponse(413, f"The body has more than {max_bytes} bytes, which is the limit.")


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        RefusedError: it is not an object, is nested too deeply, or holds text that is not valid Unicode.
    """
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_reject_constant)
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # raises on lone surrogates
    except (ValueError, RecursionError):
        raise RefusedError(ErrorResponse(400, "The body is not JSON, or is nested too deeply.")) from None
    if not isinstance(value, dict):
        raise RefusedError(ErrorResponse(400, "The body must be a JSON object."))
    return value


def has_remote_path(value: Any) -> bool:
    """Whether a file in the inputs has the address of another server as its path, which Gradio would fetch.

    Args:
        value: from `parse_json_object`, which bounds its depth.
    """
    stack = [value]
    while stack:
        item = stack.pop()
        path = item.get("path") if isinstance(item, dict) else None
        if isinstance(path, str) and REMOTE_PATH.match(path):
            return True
        stack += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
    return False


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
