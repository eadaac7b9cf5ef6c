"""Content that is read once: what is decoded and captioned is what is stored beside the caption."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from typing import IO, Any

from mmspec.app.errors import UsageError
from mmspec.app.io.content import Content, InlineBytes, Pictures
from mmspec.app.io.images import ImageError, check_file
from mmspec.app.io.item import Item

MAX_BYTES_IN_MEMORY = 4 << 20
"""Larger content waits in a temporary file until its row is written."""


@dataclass(frozen=True, slots=True)
class _TemporaryBytes:
    """A part of a file without a name, which ends with the process, however that ends."""

    file: IO[bytes]
    start: int
    size: int
    num_bytes: int = 0

    def read(self) -> bytes:
        return os.pread(self.file.fileno(), self.size, self.start)

    def __reduce__(self) -> tuple[Any, ...]:
        return InlineBytes, (self.read(),)


class Spool:
    """Rows that are needed again and again: bytes from tables wait in one temporary file, not in memory."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._end = 0

    def keep(self, item: Item) -> Item:
        """The item; bytes that it holds are in the file from here on.

        Raises:
            UsageError: the disk of the temporary files is full.
        """
        try:
            if isinstance(item.content, Pictures):
                return replace(item, content=Pictures(tuple(map(self._kept, item.content.parts))))
            return item if item.content is None else replace(item, content=self._kept(item.content))
        except OSError as error:
            folder, size = tempfile.gettempdir(), self._end >> 20
            raise UsageError(
                f"pictures of tables wait in {folder}, which is full after {size} MiB ({error.strerror}): set TMPDIR"
            ) from error

    def _kept(self, content: Content) -> Content:
        if not isinstance(content, InlineBytes):
            return content
        self._file = self._file or tempfile.TemporaryFile()  # noqa: SIM115  # as long as the rows
        start, self._end = self._end, self._end + self._file.write(content.data)
        self._file.flush()
        return _TemporaryBytes(self._file, start, self._end - start)


def hold(item: Item) -> Item:
    """The item with the bytes of its picture or clip.

    Raises:
        ImageError: they cannot be read, or are more than can be stored.
    """
    if item.content is None:
        check_file(item.path)
    content = item.bytes_of_file
    parts = content.parts if isinstance(content, Pictures) else (content,)
    try:
        held = tuple(_held(part.read()) for part in parts)
    except ImageError as error:
        if error.kind != "TooLarge":
            raise
        hint = "other formats than webdataset do not store it" if item.content is None else "cut or compress it"
        raise ImageError("TooLarge", f"{error}: {hint}") from error
    return replace(item, content=Pictures(held) if isinstance(content, Pictures) else held[0])


def _held(data: bytes) -> Content:
    if len(data) <= MAX_BYTES_IN_MEMORY:
        return InlineBytes(data)
    file = tempfile.TemporaryFile()  # noqa: SIM115  # open until the row is written
    file.write(data)
    file.flush()
    return _TemporaryBytes(file, 0, len(data))
