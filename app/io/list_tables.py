"""Tables as text: CSV and TSV as Excel, pandas and people write them, and lists of one name per line."""

from __future__ import annotations

import csv
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.cells import FILE_COLUMNS, MEDIA_SUFFIXES
from mmspec.app.io.fields import normalized
from mmspec.app.io.list_text import MAX_LINE_CHARS, ListText, Numbered

_DELIMITERS = (",", ";", "\t", "|")
_QUOTED = re.compile(r'\A"(.*)"\Z', re.DOTALL)


def table(text: ListText) -> Numbered:
    """CSV and TSV: `sep=` in the first line, else the delimiter with which the header names a column of files."""
    lines = text.lines()
    number, header = next(lines, (0, ""))
    given = header.rstrip("\r\n").strip('"')
    if given.lower().startswith("sep=") and len(given) == 5:
        delimiter = given[4]
        number, header = next(lines, (number, ""))
    else:
        delimiter = _delimiter(text, header) or ("\t" if text.kind == ".tsv" else ",")
    yield from _rows(text, chain([(number, header)], lines), delimiter)


def names(text: ListText) -> Numbered:
    """A path or address per line; a table if the first line is the header of one, as in Excel's "Unicode text"."""
    raw = text.raw_lines()
    first = next(raw, (0, ""))
    if (delimiter := _delimiter(text, first[1])) is not None:
        lines = ((number, text.decoded(number, line)) for number, line in raw)
        yield from _rows(text, chain([(first[0], text.decoded(*first))], lines), delimiter)
        return
    for number, line in chain([first], raw):
        name = line.rstrip("\r\n")
        if not name.strip():
            continue
        is_there = _is_there(text, name)
        if not is_there:  # neither a name of other bytes than UTF-8, nor one with spaces at its ends
            name = text.decoded(number, name).strip()
        if not is_there and name.startswith("#"):
            text.note("comment", number)
        else:
            yield number, {FILE_COLUMNS[0]: name}


def _is_there(text: ListText, name: str) -> bool:
    """Whether a file has just this name."""
    return bool(name) and os.path.lexists(os.path.join(text.options.root or text.path.parent, name))


def _delimiter(text: ListText, header: str) -> str | None:
    """The delimiter with which a first line names a column of files."""
    csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_CHARS))
    for delimiter in _DELIMITERS:
        found = next(csv.reader([header], delimiter=delimiter), [])
        if len(found) > 1 and _file_column(text, found) is not None:
            return delimiter
    return None


def _file_column(text: ListText, header: list[str]) -> int | None:
    """The first column that names files."""
    return next((number for number, name in enumerate(header) if normalized(name) in text.file_columns), None)


def _rows(text: ListText, lines: Iterable[tuple[int, str]], delimiter: str) -> Numbered:
    """The rows of a table, its header first."""
    records = _records(text, lines, delimiter)
    header = [name.strip() for name in next(records, (0, []))[1]]
    for number, cells in records:
        if not any(cell.strip() for cell in cells):
            continue
        if any(cell.strip() for cell in cells[len(header) :]):
            raise UsageError(
                f"{text.path} line {number} has {len(cells)} cells, its header {len(header)}: put quotes around "
                f"cells that hold {delimiter!r}"
            )
        row: dict[str, Any] = {}
        for name, cell in zip(header, cells, strict=False):
            if name and cell:
                row.setdefault(name, cell)  # of two columns of a name the first
        yield number, row


def _records(text: ListText, lines: Iterable[tuple[int, str]], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The cells of each record of a table, one or several lines each, with the number of its last line.

    A quotation mark that is not closed would take the lines up to the next one into its cell. It is found by what
    follows: text behind a closing mark, the end of the table, or lines that look like rows. Such a line is read as it
    stands, and counted.

    Raises:
        UsageError: a quotation mark that is not closed, in a line that is no row without it.
    """
    returned, rest, header = deque[tuple[int, str]](), iter(lines), list[str]()

    def feed() -> Iterator[str]:
        size = 0
        while size <= MAX_LINE_CHARS and (one := returned.popleft() if returned else next(rest, None)) is not None:
            taken.append(one)
            size += len(one[1])
            yield one[1]

    while True:
        taken: list[tuple[int, str]] = []
        cells: list[str] | None = None
        reason = "the lines that it takes in look like rows"
        try:
            cells = next(csv.reader(feed(), delimiter=delimiter, strict=True), None)
        except csv.Error as error:
            reason = one_line(error, 80)
        if not taken:
            return
        if cells is None or any(_looks_like_row(text, header, _literal(line, delimiter)) for _, line in taken[1:]):
            cells = _literal(taken[0][1], delimiter)
            if header and len(cells) != len(header):
                raise UsageError(
                    f"{text.path} line {taken[0][0]}: a quotation mark is not closed, or text follows a closed "
                    f"one ({reason}): double the mark, and put the cell in quotes"
                )
            returned.extendleft(reversed(taken[1:]))
            del taken[1:]
            text.note("quote", taken[0][0])
        header = header or cells
        yield taken[-1][0], cells


def _literal(line: str, delimiter: str) -> list[str]:
    """The cells of a line in which quotation marks are text, but for those around a cell."""
    cells = next(csv.reader([line], delimiter=delimiter, quoting=csv.QUOTE_NONE), [])
    return [_QUOTED.sub(lambda inner: inner[1].replace('""', '"'), cell) for cell in cells]


def _looks_like_row(text: ListText, header: list[str], cells: list[str]) -> bool:
    column = _file_column(text, header)
    if column is None or len(cells) != len(header):
        return False
    name = cells[column]
    is_address = name.lower().startswith(("http://", "https://"))
    return is_address or os.path.splitext(name)[1].lower() in MEDIA_SUFFIXES or _is_there(text, name)
