"""The members of uncompressed tar archives: names and ranges of bytes, from headers alone. Nothing is extracted."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from mmspec.app.errors import one_line

MAX_TAR_HEADER_BYTES = 1 << 20
"""Largest extended header of a member."""
MAX_PADDING_BYTES = 64 << 20
"""Zeros behind an end mark, up to which another archive is looked for."""
_BLOCK = tarfile.BLOCKSIZE
_CHUNK = 2048 * _BLOCK


@dataclass(frozen=True, slots=True)
class TarMember:
    """A regular member: its name and its range of bytes."""

    name: str
    start: int
    size: int

    @property
    def key(self) -> str:
        """The name up to the first dot of its last part, as in WebDataset."""
        folder, slash, last = self.name.rpartition("/")
        return folder + slash + last.partition(".")[0]

    @property
    def extension(self) -> str:
        """What follows that dot."""
        return self.name[len(self.key) + 1 :].lower()


class DamagedTarError(Exception):
    """An archive that ends early or holds what is no header."""


class _HeaderFile(io.RawIOBase):
    """A file whose single reads are limited: `tarfile` reads an extended header of any claimed size in one."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        if size < 0 or size > MAX_TAR_HEADER_BYTES:
            raise DamagedTarError(f"a header of {size} bytes; the limit is {MAX_TAR_HEADER_BYTES}")
        return self._file.read(size)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def read_members(file: IO[bytes], on_link: Callable[[str], None] = lambda name: None) -> Iterator[TarMember]:
    """The regular members of an uncompressed archive, in its order.

    Args:
        on_link: called with the name of each member without content of its own: links, and sparse files.

    Raises:
        DamagedTarError: it ends early or is damaged, after the members before that.
    """
    try:
        more = True
        while more:
            yield from _read_archive(file, on_link)
            more = _skip_zeros(file)
    except (tarfile.TarError, OSError, ValueError, OverflowError) as error:
        raise DamagedTarError(one_line(error)) from error
    except EOFError as error:
        raise DamagedTarError("unexpected end of data") from error


def _read_archive(file: IO[bytes], on_link: Callable[[str], None]) -> Iterator[TarMember]:
    """The members up to the end mark, behind which `file` is then."""
    archive: Any = tarfile.TarFile(fileobj=_HeaderFile(file))
    while (member := archive.next()) is not None:
        archive.members = []  # else it holds every header
        if member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse():
            yield TarMember(member.name, member.offset_data, member.size)
        elif not member.isdir():
            on_link(member.name)
    file.seek(archive.offset)
    end = file.read(_BLOCK)
    if end != bytes(_BLOCK):
        raise DamagedTarError("ends early, without its end mark" if len(end) < _BLOCK else "no header where one is due")


def _skip_zeros(file: IO[bytes]) -> bool:
    """Go to the next block that is not empty: archives joined by `cat` go on behind an end mark.

    Returns:
        Whether there is one, within `MAX_PADDING_BYTES`.
    """
    for _ in range(MAX_PADDING_BYTES // _CHUNK):
        if not (block := file.read(_CHUNK)):
            return False
        if rest := block.lstrip(b"\0"):
            skipped = (len(block) - len(rest)) // _BLOCK * _BLOCK
            file.seek(skipped - len(block), os.SEEK_CUR)
            return True
    return False


def read_whole_members(file: IO[bytes]) -> Iterator[tuple[TarMember, int]]:
    """The members of a growing archive that are there to the last byte, each with its end; none after a torn one."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    with suppress(DamagedTarError):  # a growing archive has no end mark
        for member in read_members(file):
            end = member.start + -(-member.size // _BLOCK) * _BLOCK
            if end > size:
                return
            yield member, end
