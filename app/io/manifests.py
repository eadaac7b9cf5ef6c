"""Lists of pictures and clips: JSON lines, JSON, CSV, TSV and text, as people and Excel write them, also gzipped.

A list is not trusted: its paths stay inside its folder, or the one that the user permits. Every message names the list
and the line.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import IO, Any

from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.cells import (
    FILE_COLUMNS,
    Reach,
    cell_content,
    find_inside,
    is_missing,
    is_path,
    plain_path,
    short_repr,
    whole_number,
)
from mmspec.app.io.content import Unreadable
from mmspec.app.io.gzipped import UnpackedList, max_lines
from mmspec.app.io.inline import inline_text
from mmspec.app.io.item import Item, SourceOptions
from mmspec.app.io.left_out import LeftOut

MANIFESTS = frozenset({".jsonl", ".txt", ".csv", ".tsv", ".json"})
MAX_LINE_CHARS = 64 << 20
"""Longest line of a list, or record of a JSON list: a picture of 48 MB in base64."""
_DELIMITERS = (",", ";", "\t", "|")
_RECORD_KEYS = ("images", "data", "rows", "samples", "items", "annotations")
"""Where a JSON object holds its records, as in COCO."""
_BLANKS = re.compile(r"[ \t\r\n,]*")
Numbered = Iterator[tuple[int, dict[str, Any]]]


def is_manifest(path: Path) -> bool:
    """Whether the name is that of a list."""
    return _format(path) in MANIFESTS


def _format(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return suffixes[-2] if suffixes[-1:] == [".gz"] and suffixes[:-1] else "".join(suffixes[-1:])


def read_manifest(path: Path, options: SourceOptions, found: LeftOut) -> Iterator[Item]:
    """The rows of a list.

    Args:
        found: records without a picture are added to it.

    Raises:
        UsageError: it cannot be read, or a row of it names nothing that may be read.
    """
    kind = _format(path)
    unit = "record" if kind == ".json" else "line"
    reader = {".jsonl": _json_lines, ".json": _json_records, ".txt": _text}.get(kind, _table)
    entries = _Entries(path, options, unit, found)
    try:
        limit = max_lines(path)
        with open_text(path, may_be_ansi=kind in (".csv", ".tsv", ".txt")) as lines:
            for number, row in reader(path, lines, options):
                if number > limit:
                    raise UsageError(f"list {path} has more than {limit} records: too many for its size")
                if (item := entries.item(number, row)) is not None:
                    yield item
    except (UnicodeDecodeError, UnicodeError) as error:
        raise UsageError(f"list {path} is not UTF-8 text: {one_line(error, 120)}") from error
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UsageError(f"cannot read list {path}: {one_line(error, 120)}") from error
    except OSError as error:
        raise UsageError(f"cannot read manifest {path}: {error.strerror}") from error


def open_text(path: Path, may_be_ansi: bool) -> IO[str]:
    """A list as text: UTF-8, UTF-16 with a byte order mark as Excel writes it, or Windows-1252 where permitted."""

    def binary() -> Any:
        return UnpackedList(path) if path.suffix.lower() == ".gz" else path.open("rb")

    with binary() as file:
        mark = file.read(3)
        encoding = "utf-16" if mark[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
        if encoding == "utf-8-sig" and may_be_ansi and not _is_utf8(mark, file):
            encoding = "cp1252"
    return io.TextIOWrapper(binary(), encoding=encoding, newline="")


def _is_utf8(start: bytes, file: Any) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        chunk = start
        while chunk:
            decoder.decode(chunk)
            chunk = file.read(1 << 20)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _lines(path: Path, text: IO[str]) -> Iterator[tuple[int, str]]:
    """Numbered lines of limited length."""
    number = 0
    while line := text.readline(MAX_LINE_CHARS + 1):
        number += 1
        if len(line) > MAX_LINE_CHARS:
            raise UsageError(f"{path} line {number} is longer than {MAX_LINE_CHARS} characters")
        yield number, line


def _json_lines(path: Path, text: IO[str], options: SourceOptions) -> Numbered:
    for number, line in _lines(path, text):
        if number == 1 and line.lstrip().startswith("["):  # a JSON list by another name
            text.seek(0)
            yield from _json_records(path, text, options)
            return
        if line.strip():
            yield number, _object(_load(line, f"{path} line {number}"), f"{path} line {number}")


def _load(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {one_line(error, 120)}") from error


def _object(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, str):
        return {FILE_COLUMNS[0]: value}
    if not isinstance(value, dict):
        raise UsageError(f"{where} is not a JSON object: {short_repr(value)}")
    return value


def _json_records(path: Path, text: IO[str], options: SourceOptions) -> Numbered:
    """The records of a JSON list, one at a time; or of the list in a JSON object."""
    start = text.read(1 << 20)
    if not start.lstrip().startswith("["):
        if re.match(r"\s*\{.*\}\s*\n\s*\{", start):  # JSON lines by another name
            text.seek(0)
            yield from _json_lines(path, text, options)
            return
        whole = _load(start + text.read(MAX_LINE_CHARS), str(path))
        lists = [whole[key] for key in _RECORD_KEYS if isinstance(whole, dict) and isinstance(whole.get(key), list)]
        if not lists and not isinstance(whole, dict):
            raise UsageError(f"{path} is a JSON {type(whole).__name__}: a list of objects with {FILE_COLUMNS[0]!r}")
        for number, value in enumerate(lists[0] if lists else [whole], 1):
            yield number, _object(value, f"{path} record {number}")
        return
    for number, value in enumerate(_elements(path, start, text), 1):
        yield number, _object(value, f"{path} record {number}")


def _elements(path: Path, start: str, text: IO[str]) -> Iterator[Any]:
    """The elements of a JSON list without holding the others."""
    decoder, number = json.JSONDecoder(), 0
    buffer, place, ended = start.lstrip()[1:], 0, False
    while True:
        place = _BLANKS.match(buffer, place).end()  # type: ignore[union-attr]  # it matches nothing, too
        if buffer[place : place + 1] == "]":
            if (buffer[place + 1 :] + text.read(1 << 20)).strip():
                raise UsageError(f"{path} goes on after its list of {number} records: one list, or an object per line")
            return
        try:
            value, end = decoder.raw_decode(buffer, place)
            if end == len(buffer) and not ended:  # a number may go on
                raise ValueError
        except (ValueError, RecursionError) as error:
            if ended or len(buffer) - place > MAX_LINE_CHARS or isinstance(error, RecursionError):
                message = one_line(error, 120)
                raise UsageError(f"{path} record {number + 1} is not JSON: {message}") from error
            more = text.read(max(1 << 20, len(buffer) - place))
            buffer, place, ended = buffer[place:] + more, 0, not more
            continue
        place, number = end, number + 1
        yield value


def _table(path: Path, text: IO[str], options: SourceOptions) -> Numbered:
    """CSV and TSV: `sep=` in the first line, else the delimiter with which the header names a column of files."""
    lines = _lines(path, text)
    number, header = next(lines, (0, ""))
    given = header.rstrip("\r\n").strip('"')
    if given.lower().startswith("sep=") and len(given) == 5:
        delimiter = given[4]
        number, header = next(lines, (number, ""))
    else:
        delimiter = _delimiter(header, options) or ("\t" if _format(path) == ".tsv" else ",")
    yield from _cells(path, header, lines, delimiter, number)


def _cells(path: Path, header: str, lines: Iterable[tuple[int, str]], delimiter: str, first: int) -> Numbered:
    current = first

    def text() -> Iterator[str]:
        nonlocal current
        yield header
        for current, line in lines:  # noqa: B007 (the line where the row ends, for messages)
            yield line

    reader = csv.reader(text(), delimiter=delimiter)
    try:
        names = [name.strip() for name in next(reader, [])]
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if any(cell.strip() for cell in cells[len(names) :]):
                raise UsageError(
                    f"{path} line {current} has {len(cells)} cells, its header {len(names)}: put quotes around "
                    f"cells that hold {delimiter!r}"
                )
            row: dict[str, Any] = {}
            for name, cell in zip(names, cells, strict=False):
                if name and cell:
                    row.setdefault(name, cell)  # of two columns of a name the first
            yield current, row
    except csv.Error as error:
        raise UsageError(f"{path} line {current} is not CSV: {one_line(error, 120)}") from error


def _delimiter(header: str, options: SourceOptions) -> str | None:
    """The delimiter with which a first line names a column of files."""
    wanted = {options.image_column.casefold()} if options.image_column else set(FILE_COLUMNS)
    for delimiter in _DELIMITERS:
        names = next(csv.reader([header], delimiter=delimiter), [])
        if len(names) > 1 and wanted & {normalized(name) for name in names}:
            return delimiter
    return None


def _text(path: Path, text: IO[str], options: SourceOptions) -> Numbered:
    """One path or address per line; a table if the first line is the header of one, as in Excel's "Unicode text"."""
    lines = _lines(path, text)
    first = next(lines, (0, ""))
    if (delimiter := _delimiter(first[1], options)) is not None:
        yield from _cells(path, first[1], lines, delimiter, first[0])
        return
    for number, line in chain([first], lines):
        if line.strip() and not line.startswith("#"):
            yield number, {FILE_COLUMNS[0]: line.strip()}


def normalized(name: str) -> str:
    """A column's name without case, spaces and dashes: "File Name" and "file_name" are one."""
    return name.strip().casefold().replace(" ", "_").replace("-", "_")


class _Entries:
    """The records of a list as rows."""

    def __init__(self, path: Path, options: SourceOptions, unit: str, found: LeftOut) -> None:
        self.path, self.options, self.unit, self.found = path, options, unit, found
        self.reach = Reach(str(path.parent), options.root, options.urls)

    def item(self, number: int, row: dict[str, Any]) -> Item | None:
        """The row of a record; None for a conversation without a picture.

        Raises:
            UsageError: it names nothing that may be read.
        """
        where = f"{self.path} {self.unit} {number}"
        columns = {normalized(str(name)): value for name, value in reversed(row.items()) if not is_missing(value)}
        wanted = self.options.image_column
        keys = [normalized(wanted)] if wanted else FILE_COLUMNS
        cell = next((columns[key] for key in keys if key in columns), None)
        asked, answered, shown = _conversation(columns)
        if cell is None and shown:
            cell = shown if len(shown) > 1 else shown[0]
        if cell is None and asked is not None:
            self.found.records.add(str(self.path), where)
            return None
        prompt = columns.get(normalized(self.options.prompt_column or "prompt"), asked)
        ident = columns.get(normalized(self.options.id_column or "id"))
        answer = columns.get("answer", answered)
        for key, value in (("prompt", prompt), ("answer", answer)):
            if value is not None and not isinstance(value, str):
                raise UsageError(f"{where}: {key!r} is text, got {short_repr(value)}")
        ident = whole_number(ident)
        if ident is not None and not isinstance(ident, str | int):
            raise UsageError(f"{where}: 'id' is text or a whole number, got {short_repr(ident)}")
        item = self._named(cell, where, number, row)
        return replace(item, id="" if ident is None else str(ident), prompt=prompt or None, answer=answer or None)

    def _named(self, cell: Any, where: str, number: int, row: dict[str, Any]) -> Item:
        """The row without its texts."""
        is_address = isinstance(cell, str) and cell.lower().startswith(("http://", "https://"))
        if isinstance(cell, str) and is_path(cell) and not is_address and inline_text(cell) is None:
            path = find_inside(plain_path(cell), self.reach)
            if path is None:
                raise UsageError(f"{where}: {short_repr(cell)} leads out of {self.reach.describe()}")
            return Item(Path(path), origin=where)
        content, name = cell_content(cell, self.reach)
        if isinstance(content, Unreadable) and content.kind in ("Missing", "BadCell"):
            got = short_repr(cell) if cell is not None else ", ".join(map(short_repr, row)) or "nothing"
            raise UsageError(
                f"{where} names no file: give {self.options.image_column or FILE_COLUMNS[0]!r}; got {got}"[:300]
            )
        if isinstance(content, Unreadable):
            raise UsageError(f"{where}: {content.message}")
        name = name or f"{os.path.basename(self.path)}#{number}"
        return Item(Path(name), file_name=name, content=content, origin=where)


def _conversation(columns: dict[str, Any]) -> tuple[str | None, str | None, list[Any]]:
    """The first question of a conversation, without placeholders of pictures, its answer, and its pictures.

    Question and answer are None without one; pictures are those among the parts of the message.
    """
    turns = columns.get("conversations", columns.get("messages"))
    if not isinstance(turns, list):
        return None, None, []
    found: dict[str, str] = {}
    shown: list[Any] = []
    for turn in turns:
        if isinstance(turn, dict):
            speaker = str(turn.get("from", turn.get("role")))
            speaker = {"human": "user", "gpt": "assistant"}.get(speaker, speaker)
            text = turn.get("value", turn.get("content"))
            if isinstance(text, list):
                parts = [part for part in text if isinstance(part, dict)]
                text = " ".join(str(part["text"]) for part in parts if part.get("text"))
                if speaker == "user" and speaker not in found:
                    shown = [picture for part in parts if (picture := _picture_of(part)) is not None]
            found.setdefault(speaker, str(text or ""))
    question = found.get("user", "")
    for token in ("<image>", "<video>"):
        question = question.replace(token, "")
    return question.strip(), found.get("assistant"), shown


def _picture_of(part: dict[str, Any]) -> Any:
    """What a part of a message shows, as in `{"image": ...}` or `{"image_url": {"url": ...}}`; None for text."""
    value = next((part[key] for key in ("image", "image_url", "video", "video_url") if part.get(key)), None)
    return value.get("url", value) if isinstance(value, dict) else value
