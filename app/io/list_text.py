"""The text of a list: its encoding and its lines. UTF-8 is read, and UTF-16 and UTF-32; what is neither is not guessed
in silence: text that can only be Western is read as Windows-1252 and counted, other text is refused.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mmspec.app.errors import UsageError
from mmspec.app.io.cells import FILE_COLUMNS
from mmspec.app.io.fields import normalized
from mmspec.app.io.gzipped import UnpackedList, max_lines
from mmspec.app.io.item import SourceOptions
from mmspec.app.io.left_out import LeftOut
from mmspec.app.io.text import is_valid, text_encoding

Numbered = Iterator[tuple[int, dict[str, Any]]]
"""Records with their numbers."""
MAX_LINE_CHARS = 64 << 20
"""Longest line of a list, or record of a JSON list: a picture of 48 MB in base64."""
_MARK = "\ufeff"
"""Byte order mark."""
MAX_WESTERN_RUN = 2
"""Bytes above 127 that follow each other in text of Western Europe; other alphabets and scripts have more."""


@dataclass
class ListText:
    """An open list.

    Attributes:
        path: of the file, for messages.
        kind: its suffix without `.gz`.
        stream: its text; what is not UTF-8 in a table or text is there as surrogates (`surrogateescape`).
        options: how its rows are read.
        found: what is not read, or read with a doubt, is added to it.
        max_rows: lines or records that it may have.
        unit: what its rows are called in messages.
    """

    path: Path
    kind: str
    stream: IO[str]
    options: SourceOptions
    found: LeftOut
    max_rows: int
    unit: str = "line"

    @property
    def file_columns(self) -> tuple[str, ...]:
        """Normalized names of the columns that may name files, in the order of preference."""
        wanted = self.options.image_column
        return (normalized(wanted),) if wanted else FILE_COLUMNS

    def where(self, number: int) -> str:
        """A row of it, for messages."""
        return f"{self.path} {self.unit} {number}"

    def check(self, number: int) -> None:
        """Refuse a line or record of that number if a list of its size has no such.

        Raises:
            UsageError: it has none.
        """
        if number > self.max_rows:
            raise UsageError(f"list {self.path} has more than {self.max_rows} lines or records: too many for its size")

    def note(self, kind: str, number: int) -> None:
        """Count a row of it for one line about all rows of that kind (`SENTENCES`)."""
        self.found.add(kind, f"{self.unit} {number}", where=str(self.path))

    def raw_lines(self) -> Iterator[tuple[int, str]]:
        """Numbered lines of limited length.

        Raises:
            UsageError: a longer line, or too many.
        """
        number = 0
        while line := self.stream.readline(MAX_LINE_CHARS + 1):
            number += 1
            self.check(number)
            if len(line) > MAX_LINE_CHARS:
                raise UsageError(f"{self.path} line {number} is longer than {MAX_LINE_CHARS} characters")
            yield number, line.removeprefix(_MARK)  # also of lists joined by `cat`

    def lines(self) -> Iterator[tuple[int, str]]:
        """The same, decoded.

        Raises:
            UsageError: a longer line, or one of an unknown encoding.
        """
        return ((number, self.decoded(number, line)) for number, line in self.raw_lines())

    def decoded(self, number: int, line: str) -> str:
        """A line of `raw_lines`; one that is not UTF-8 as Windows-1252, which is counted.

        Raises:
            UsageError: it is not that either.
        """
        if is_valid(line):
            return line
        data = line.encode("utf-8", "surrogateescape")
        longest = max(map(len, re.findall(rb"[\x80-\xff]+", data)))
        try:
            if longest > MAX_WESTERN_RUN:
                raise UnicodeError
            text = data.decode("cp1252")
        except UnicodeError:
            raise UsageError(
                f"{self.path} line {number} is not UTF-8, and not text of Western Europe: save the list as UTF-8 (in "
                "Excel as 'CSV UTF-8'; with iconv -f GBK -t UTF-8, where GBK is the encoding that it has)"
            ) from None
        self.note("encoding", number)
        return text


@contextmanager
def open_list(path: Path, kind: str, options: SourceOptions, found: LeftOut) -> Iterator[ListText]:
    """Open a list.

    Raises:
        OSError: it cannot be read.
    """

    def binary() -> Any:
        return UnpackedList(path) if path.suffix.lower() == ".gz" else path.open("rb")

    with binary() as file:
        encoding = text_encoding(file.read(4))
    errors = "surrogateescape" if encoding.startswith("utf-8") and not kind.startswith(".json") else "strict"
    with io.TextIOWrapper(binary(), encoding=encoding, errors=errors, newline="") as stream:
        unit = "record" if kind == ".json" else "line"
        yield ListText(path, kind, stream, options, found, max_lines(path), unit)
