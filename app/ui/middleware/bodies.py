"""Limits of request bodies that Starlette and Gradio lack: the time they take, and the disk that uploads fill."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio.route_utils
from gradio.route_utils import GradioMultiPartParser
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

MB = 1_000_000
STORAGE_CHECK_BYTES = 16 * MB
"""Bytes of one upload between two measurements of the upload folder."""
FILE_BYTES = 4096
"""What a stored file takes besides its content."""


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one server.

    Attributes:
        max_request_bytes: body of one upload request, all files together.
        max_stored_bytes: all stored uploads.
        min_free_bytes: free disk space that uploads leave.
        max_json_bytes: any other body.
        idle_timeout_s: seconds without a byte of the body.
        base_timeout_s: seconds that a body of any size may take.
        min_bytes_per_s: rate at which larger bodies must arrive.
    """

    max_request_bytes: int = 1000 * MB
    max_stored_bytes: int = 4000 * MB
    min_free_bytes: int = 200 * MB
    max_json_bytes: int = 1 * MB
    idle_timeout_s: float = 15.0
    base_timeout_s: float = 30.0
    min_bytes_per_s: int = 50_000


def receive_in_time(receive: Receive, limits: RequestLimits) -> Receive:
    """A `receive` that raises `HTTPException` once the body is later than the limits allow."""
    start_time, size, is_complete = time.monotonic(), 0, False

    async def receive_checked() -> Message:
        nonlocal size, is_complete
        if is_complete:  # waits for the client to leave
            return await receive()
        left = limits.base_timeout_s + size / limits.min_bytes_per_s - (time.monotonic() - start_time)
        try:
            message = await asyncio.wait_for(receive(), min(limits.idle_timeout_s, left))
        except TimeoutError:
            raise HTTPException(408, "The body arrives too slowly.") from None
        size += len(message.get("body", b""))
        is_complete = not message.get("more_body", False)
        return message

    return receive_checked


class UploadFolder:
    """Gradio's upload folder: each stored upload in a folder of its own, incomplete ones directly in it."""

    def __init__(self, folder: Path, request_limits: RequestLimits) -> None:
        self.folder = folder
        self.request_limits = request_limits
        self._num_active = 0

    @contextmanager
    def uploading(self, receive: Receive, announced: int = 0) -> Iterator[Receive]:
        """Within this block an upload is received, by the `receive` that this returns.

        After the last one, incomplete files are removed.

        Args:
            receive: see ASGI.
            announced: bytes of the upload, 0 if unknown.

        Raises:
            HTTPException: the folder is full; also raised by the returned `receive`.
        """
        unchecked = 0
        self._refuse_if_full(announced)

        async def receive_stored() -> Message:
            nonlocal unchecked
            message = await receive()
            unchecked += len(message.get("body", b""))
            if unchecked > STORAGE_CHECK_BYTES:
                unchecked = 0
                self._refuse_if_full()
            return message

        self._num_active += 1
        try:
            yield receive_stored
        finally:
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
                stored += file.stat().st_size + FILE_BYTES if file.is_file() else 0
        existing = self.folder if self.folder.is_dir() else self.folder.parent
        free_on_disk = shutil.disk_usage(existing).free
        return min(self.request_limits.max_stored_bytes - stored, free_on_disk - self.request_limits.min_free_bytes)

    def _refuse_if_full(self, announced: int = 0) -> None:
        if self.free_bytes() <= announced:
            raise HTTPException(413, "The app holds as many uploads as it may; try again later.")


@contextmanager
def limit_upload_parts(max_files: int) -> Iterator[None]:
    """Within this block an upload has at most `max_files` parts, all of them files.

    Gradio takes 1000, and holds parts that are no files in memory, whatever their size.
    """

    class UploadParser(GradioMultiPartParser):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "max_files": max_files, "max_fields": 0})

    gradio.route_utils.GradioMultiPartParser = UploadParser
    try:
        yield
    finally:
        gradio.route_utils.GradioMultiPartParser = GradioMultiPartParser
