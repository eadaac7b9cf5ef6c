"""Content that is read once: what is decoded and captioned is what is stored beside the caption."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
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
    """Bytes of rows that wait in one temporary file, not in memory."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._end = 0

    def keep(self, item: Item) -> Item:
        """The item; bytes that it holds are in the file from here on.

        Raises:
            UsageError: the disk of the temporary files is full.
        """
        try:
            return item if item.content is None else _with_content(item, self._kept)
        except OSError as error:
            folder, size = tempfile.gettempdir(), self._end >> 20
            raise UsageError(
                f"pictures of tables wait in {folder}, which is full after {size} MiB ({error.strerror}): set TMPDIR"
            ) from error

    def _kept(self, content: Content) -> Content:
        return self.add(content.data) if isinstance(content, InlineBytes) else content

    def add(self, data: bytes) -> Content:
        """Where the bytes are in the file."""
        self._file = self._file or tempfile.TemporaryFile()  # noqa: SIM115  # as long as the rows
        start, self._end = self._end, self._end + self._file.write(data)
        self._file.flush()
        return _TemporaryBytes(self._file, start, self._end - start)


def hold(item: Item) -> Item:
    """The item with the bytes of its picture or clip.

    Raises:
        ImageError: they cannot be read, or are more than can be stored.
    """
    if item.content is None:
        check_file(item.path)
    try:
        return _with_content(item, _held)
    except ImageError as error:
        if error.kind != "TooLarge":
            raise
        hint = "other formats than webdataset do not store it" if item.content is None else "cut or compress it"
        raise ImageError("TooLarge", f"{error}: {hint}") from error


def _held(content: Content) -> Content:
    data = content.read()
    return InlineBytes(data) if len(data) <= MAX_BYTES_IN_MEMORY else Spool().add(data)


def _with_content(item: Item, change: Callable[[Content], Content]) -> Item:
    """The item with each of its pictures changed."""
    found = tuple(map(change, item.contents))
    return replace(item, content=found[0] if len(found) == 1 else Pictures(found))
