"""Content of a row: what to read and from where, as small values that can be sent to other processes.

Every reader has a limit on bytes and raises `ImageError`. Nothing is decoded here, and nothing is read that the user
has not named: who creates a `Content` checks that (`mmspec.app.io.cells`, `mmspec.app.io.tars`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.web import fetch
from mmspec.hints import install_hint
from mmspec.vision.images import ImageError
from mmspec.vision.video.containers import FileBelow, open_regular_file

MAX_CONTENT_BYTES = 256 << 20
"""Largest picture or clip that is read from an archive, a table or an address."""
DRIVER_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
"""Scheme of an address -> extra of mmspec that installs its fsspec driver."""


class Content(Protocol):
    """Bytes of a picture or clip that are read when they are needed."""

    @property
    def num_bytes(self) -> int:
        """Memory that the value itself holds."""

    def read(self) -> bytes:
        """The bytes.

        Raises:
            ImageError: they cannot be read, or exceed `MAX_CONTENT_BYTES`.
        """


@dataclass(frozen=True, slots=True)
class InlineBytes:
    """Bytes at hand, from a column of a table."""

    data: bytes = field(repr=False)

    @property
    def num_bytes(self) -> int:
        return len(self.data)

    def read(self) -> bytes:
        return check_size(self.data)


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A part of a file: a member of a tar archive, which is never extracted.

    Attributes:
        url: a local path, or an address that fsspec opens.
        file: where the path has to lie when it is opened; None: anywhere.
        size: in bytes; None: to the end.
    """

    url: str
    start: int = 0
    size: int | None = None
    num_bytes: int = 0
    file: FileBelow | None = None

    def read(self) -> bytes:
        if self.size is not None:
            check_num_bytes(self.size)
        try:
            data = self._read(MAX_CONTENT_BYTES + 1 if self.size is None else self.size)
        except ImageError:
            raise
        except UsageError as error:
            raise ImageError("Unreadable", str(error)) from error
        except FileNotFoundError as error:
            raise ImageError("Missing", f"no such file: {self.url}") from error
        except Exception as error:  # drivers raise types of their own
            raise ImageError("Unreadable", one_line(error)) from error
        if self.size is not None and len(data) < self.size:
            raise ImageError("Truncated", f"{len(data)} of {self.size} bytes")
        return check_size(data)

    def _read(self, size: int) -> bytes:
        """As many bytes, or fewer at the end."""
        if is_local(self.url):
            with open_source(self.file or self.url) as file:
                if self.size is None:
                    check_num_bytes(os.fstat(file.fileno()).st_size - self.start)
                file.seek(self.start)
                return file.read(size)
        system, path = open_file_system(self.url)
        return bytes(system.cat_file(path, start=self.start, end=self.start + size))

    def read_start(self, size: int) -> bytes:
        """The first bytes of a local file, as far as there are.

        Raises:
            OSError: it cannot be read.
        """
        with open_source(self.file or self.url) as file:
            file.seek(self.start)
            return file.read(size if self.size is None else min(size, self.size))


@dataclass(frozen=True, slots=True)
class WebAddress:
    """A picture at an http or https address.

    Attributes:
        public_only: refuse addresses of private networks and of this machine.
    """

    url: str
    public_only: bool = True
    num_bytes: int = 0

    def read(self) -> bytes:
        return check_size(fetch(self.url, MAX_CONTENT_BYTES, public_only=self.public_only))


@dataclass(frozen=True, slots=True)
class Pictures:
    """Several pictures of one prompt."""

    parts: tuple[Content, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def read(self) -> bytes:
        if len(self.parts) == 1:
            return self.parts[0].read()
        raise ImageError("SeveralPictures", f"the row has {len(self.parts)} pictures, one is wanted here")


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A row whose picture cannot be read: reading it raises this error, which becomes an error row."""

    kind: str
    message: str
    num_bytes: int = 0

    def read(self) -> bytes:
        raise ImageError(self.kind, self.message)


def check_num_bytes(size: int) -> None:
    """Refuse content of that size before it is read.

    Raises:
        ImageError: it is empty or exceeds `MAX_CONTENT_BYTES`.
    """
    if size == 0:
        raise ImageError("Empty", "empty (0 bytes)")
    if size > MAX_CONTENT_BYTES:
        raise ImageError("TooLarge", f"{size} bytes; the limit is {MAX_CONTENT_BYTES} bytes")


def check_size(data: bytes) -> bytes:
    """`data`, if its size is allowed."""
    check_num_bytes(len(data))
    return data


def is_local(url: str) -> bool:
    """Whether `url` is a path of this machine's file system and not an address."""
    return "://" not in url


def open_source(url: str | FileBelow) -> IO[bytes]:
    """A file of this machine, or one at an address of fsspec, for reading from its start.

    Raises:
        OSError: it cannot be opened; drivers raise types of their own.
        UsageError: as `open_file_system`.
    """
    if isinstance(url, FileBelow) or is_local(url):
        return os.fdopen(open_regular_file(url), "rb")
    system, path = open_file_system(url)
    opened: IO[bytes] = system.open(path, "rb", block_size=1 << 20, cache_type="readahead")
    return opened


def open_file_system(url: str) -> tuple[Any, str]:
    """The fsspec file system of an address, and the path in it.

    Raises:
        UsageError: an unknown scheme, or its driver is not installed.
    """
    import fsspec

    scheme = url.partition("://")[0]
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        extra = DRIVER_EXTRAS.get(scheme)
        hint = install_hint(extra) if extra else "install its fsspec driver"
        raise UsageError(f"{url}: {one_line(error)} ({hint})") from error
    except ValueError as error:
        raise UsageError(f"{url}: {one_line(error)}") from error
