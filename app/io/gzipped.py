"""Gzipped lists within limits: a few bytes may stand for any number of lines, and each line is work."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

from mmspec.app.errors import UsageError

FREE_BYTES = 64 << 20
"""Bytes that a gzipped list may unpack to, whatever its size."""
FREE_LINES = 1 << 16
"""The same of lines or records."""
MAX_GZIP_RATIO = 250
"""Bytes beyond these, per byte of the file."""
MAX_LINES_PER_BYTE = 4
"""Lines beyond these, per byte of the file: names that differ take two bytes each."""


def max_lines(path: Path) -> int:
    """Lines or records that a list of its size may have; one that is not gzipped never has more."""
    return FREE_LINES + MAX_LINES_PER_BYTE * path.stat().st_size


class UnpackedList(gzip.GzipFile):
    """The text of a gzipped list.

    Raises:
        UsageError: while it is read: it has more bytes or lines than a file of its size may have.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "rb")
        self._path, self._max_lines = path, max_lines(path)
        self._max_bytes = FREE_BYTES + MAX_GZIP_RATIO * path.stat().st_size
        self._num_bytes = self._num_lines = 0

    def read(self, size: int | None = -1) -> bytes:
        """As of any file."""
        return self._counted(super().read(size))

    def read1(self, size: int = -1) -> bytes:
        """As of any file."""
        return self._counted(super().read1(size))

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As of any file; from its start it is counted anew."""
        if (offset, whence) == (0, os.SEEK_SET):
            self._num_bytes = self._num_lines = 0
        return super().seek(offset, whence)

    def _counted(self, data: bytes) -> bytes:
        self._num_bytes += len(data)
        self._num_lines += max(data.count(b"\n"), data.count(b"\r"))
        if self._num_bytes > self._max_bytes or self._num_lines > self._max_lines:
            raise UsageError(
                f"list {self._path} unpacks to more than {self._max_bytes} bytes or {self._max_lines} lines, too much "
                "for a file of its size: unpack it if you trust it"
            )
        return data
