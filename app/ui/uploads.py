"""Files of visitors: each under a random name in a temporary folder, which is removed at the end."""

from __future__ import annotations

import asyncio
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from mmspec.app.errors import UsageError
from mmspec.app.scenes.examples import list_example_files

MAX_STORED_BYTES = 2_000_000_000
"""Of all files together."""
FILE_BYTES = 4096
"""What a stored file takes besides its content."""
MAX_AGE_S = 3600.0
IDLE_S = 15.0
"""Seconds without a byte after which an upload ends."""


@dataclass(frozen=True)
class StoredFile:
    """A picture or clip.

    Attributes:
        path: of the file.
        name: as the visitor sees it.
        time: when it came.
    """

    path: Path
    name: str
    time: float


class Uploads:
    """The stored files, and the examples, by the ids that pages use."""

    def __init__(self, max_file_bytes: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mmspec-demo-"))
        self.max_file_bytes = max_file_bytes
        self._files = {path.name: StoredFile(path, path.name, float("inf")) for path in list_example_files()}

    async def save(self, chunks: AsyncIterator[bytes], name: str) -> str:
        """Store a file; returns its id.

        Raises:
            UsageError: it is too large, there is no room, or it comes too slowly.
        """
        self._remove_old()
        room = MAX_STORED_BYTES - sum(file.stat().st_size + FILE_BYTES for file in self.folder.iterdir())
        file_id, shown = secrets.token_urlsafe(16), clean_name(name)
        path = self.folder / (file_id + re.sub(r"[^a-z0-9.]", "", Path(shown).suffix.lower())[:8])
        size = 0
        try:
            with path.open("xb") as stream:
                while True:
                    self.check_size(name, size)
                    if size + FILE_BYTES > room:
                        raise UsageError("The demo holds as many files as it may; try again later.")
                    chunk = await asyncio.wait_for(anext(chunks, b""), IDLE_S)
                    if not chunk:
                        break
                    size += len(chunk)
                    stream.write(chunk)
        except TimeoutError:
            path.unlink()
            raise UsageError(f"{shown} cannot be used: it comes too slowly.") from None
        except BaseException:
            path.unlink()
            raise
        self._files[file_id] = StoredFile(path, shown, time.monotonic())
        return file_id

    def check_size(self, name: str, size: int) -> None:
        """Refuse a file of more bytes than allowed.

        Raises:
            UsageError: it has more.
        """
        if size > self.max_file_bytes:
            limit = f"{self.max_file_bytes // 1_000_000} MB"
            raise UsageError(f"{clean_name(name)} cannot be used: it has more than {limit}.")

    def find(self, file_id: object) -> StoredFile:
        """The file of an id.

        Raises:
            UsageError: there is none.
        """
        found = self._files.get(file_id) if isinstance(file_id, str) else None
        if found is None:
            raise UsageError("Please choose a picture or a clip first; this one is no longer there.")
        return found

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _remove_old(self) -> None:
        for file_id, file in list(self._files.items()):
            if time.monotonic() - file.time > MAX_AGE_S:
                del self._files[file_id]
                file.path.unlink(missing_ok=True)


def clean_name(name: str) -> str:
    """A name that a page gives, to be shown, never opened: the last part, without control characters."""
    last = re.split(r"[/\\]", name)[-1]
    return "".join(char for char in last if char.isprintable())[:200] or "file"
