"""WebDataset tar archives: members with one key, `000012.jpg` and `000012.txt`, are a row. Nothing is extracted.

Headers are read and members are remembered as ranges of bytes, so an archive of any size takes little memory. Of a
truncated or damaged archive the rows before the damage are read, then one error row tells of it.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.cells import MEDIA_SUFFIXES, local_name
from mmspec.app.io.content import ByteRange, Content, Unreadable, is_local, open_file_system
from mmspec.app.io.item import Item, Skip, SourceOptions
from mmspec.vision.images import ImageError

MAX_TAR_HEADER_BYTES = 1 << 20
"""Largest extended header of a member."""
MAX_TEXT_BYTES = 1 << 16
"""Largest member that is read as a prompt, or as JSON with the prompt."""
MAX_SAMPLE_MEMBERS = 64
_BLOCK = tarfile.BLOCKSIZE


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


def read_members(file: IO[bytes]) -> Iterator[TarMember]:
    """The regular members of an uncompressed archive, in its order.

    Raises:
        DamagedTarError: it ends early or is damaged, after the members before that.
    """
    try:
        archive: Any = tarfile.TarFile(fileobj=_HeaderFile(file))
        while (member := archive.next()) is not None:
            archive.members = []  # else it holds every header
            if member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse():
                yield TarMember(member.name, member.offset_data, member.size)
        file.seek(archive.offset)
        end = file.read(_BLOCK)
    except (tarfile.TarError, OSError, ValueError, OverflowError) as error:
        raise DamagedTarError(one_line(error)) from error
    except EOFError as error:
        raise DamagedTarError("unexpected end of data") from error
    if end != bytes(_BLOCK):
        raise DamagedTarError("ends early, without its end mark" if len(end) < _BLOCK else "no header where one is due")


class TarSource:
    """Rows of one archive, local or remote."""

    is_listed = False

    def __init__(self, url: str, options: SourceOptions) -> None:
        self.url, self.options = url, options
        self.name = local_name(url, options.base)

    def count(self) -> int | None:
        return None

    def check(self) -> None:
        try:
            with self._open() as file:
                header = file.read(_BLOCK)
        except Exception as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"cannot read {self.url}: {one_line(error)}") from error
        if not header:
            raise UsageError(f"{self.url} is empty")
        try:
            if header != bytes(_BLOCK):
                tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except tarfile.TarError as error:
            raise UsageError(f"{self.url} is not an uncompressed tar archive: {one_line(error)}") from error

    def rows(self, skip: Skip) -> Iterator[Item]:
        try:
            with self._open() as file:
                sample: list[TarMember] = []
                for member in read_members(file):
                    if sample and (member.key != sample[0].key or len(sample) == MAX_SAMPLE_MEMBERS):
                        yield from self._row(file, sample)
                        sample = []
                    sample.append(member)
                yield from self._row(file, sample)
        except DamagedTarError as error:
            yield from self._row(file, sample)
            yield self._failure("DamagedTar", f"{self.name}: {error}")
        except Exception as error:  # drivers raise types of their own
            yield self._failure("Unreadable", f"{self.name}: {one_line(error)}")

    def _open(self) -> Any:
        if is_local(self.url):
            return open(self.url, "rb")
        system, path = open_file_system(self.url)
        return system.open(path, "rb", block_size=1 << 20, cache_type="readahead")

    def _failure(self, kind: str, message: str) -> Item:
        return Item(Path(self.name), f"{self.name}#rest", self.name, content=Unreadable(kind, message))

    def _row(self, file: IO[bytes], sample: list[TarMember]) -> Iterator[Item]:
        """The row of a sample; none for a sample without a picture, as a README."""
        if not sample:
            return
        key, wanted = sample[0].key, self.options.image_column
        media = [m for m in sample if (m.extension == wanted if wanted else _suffix(m) in MEDIA_SUFFIXES)]
        if not media and not wanted:
            return
        content: Content
        extensions = [m.extension for m in sample]
        if len(set(extensions)) < len(extensions):
            content = Unreadable("DuplicateKey", f"the archive has two members {key}.{_repeated(extensions)} in a row")
        elif not media:
            content = Unreadable("Missing", f"no member {key}.{wanted}; it has {', '.join(extensions)}")
        else:
            content = ByteRange(self.url, media[0].start, media[0].size)
        try:
            prompt, ident = (
                self._text(file, sample, name) for name in (self.options.prompt_column, self.options.id_column)
            )
        except ImageError as error:
            content, prompt, ident = Unreadable(error.kind, str(error)), None, None
        name = media[0].name if media else key
        yield Item(Path(name), ident or f"{self.name}/{key}", f"{self.name}/{name}", prompt, content=content)

    def _text(self, file: IO[bytes], sample: list[TarMember], column: str | None) -> str | None:
        """The text of a member, or of a key of the member `json`; None without it."""
        if column is None:
            return None
        found = next((m for m in sample if m.extension == column.lower()), None)
        container = found or next((m for m in sample if m.extension == "json"), None)
        if container is None:
            return None
        if container.size > MAX_TEXT_BYTES:
            raise ImageError("TooLarge", f"{container.name} has {container.size} bytes; the limit is {MAX_TEXT_BYTES}")
        file.seek(container.start)
        try:
            text = file.read(container.size).decode("utf-8-sig")
            value = text.strip() if found else json.loads(text).get(column)
        except (ValueError, AttributeError, RecursionError) as error:
            raise ImageError("BadText", f"{container.name}: {one_line(error)}") from error
        if value is not None and not isinstance(value, str | int):
            raise ImageError("BadText", f"{container.name}: {column!r} is text, got {type(value).__name__}")
        return None if value is None else str(value)


def _suffix(member: TarMember) -> str:
    return "." + member.extension.rpartition(".")[2]


def _repeated(values: list[str]) -> str:
    return next(value for value in values if values.count(value) > 1)


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


__all__ = ["DamagedTarError", "TarMember", "TarSource", "read_members", "read_whole_members"]
