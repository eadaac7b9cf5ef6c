"""Gzipped lists within limits: a few bytes may stand for any number of lines, and each line is work."""

from __future__ import annotations

import gzip
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
        UsageError: while it is read: it has more bytes than a file of its size may have.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "rb")
        self._path, self._left = path, FREE_BYTES + MAX_GZIP_RATIO * path.stat().st_size

    def read1(self, size: int = -1) -> bytes:
        """As of any file."""
        data = super().read1(size)
        self._left -= len(data)
        if self._left < 0:
            raise UsageError(
                f"list {self._path} unpacks to too much for a file of its size, which is more than {FREE_BYTES} bytes: "
                "unpack it if you trust it"
            )
        return data
