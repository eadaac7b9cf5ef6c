"""JSON lists: lines, lists, objects that hold a list as COCO's, tables as pandas writes them. A record at a time."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.cells import FILE_COLUMNS, MEDIA_SUFFIXES, short_repr
from mmspec.app.io.conversations import TURN_KEYS
from mmspec.app.io.fields import normalized
from mmspec.app.io.images import IMAGE_SUFFIXES
from mmspec.app.io.item import SourceOptions
from mmspec.app.io.left_out import LeftOut
from mmspec.app.io.list_text import MAX_LINE_CHARS, ListText, Numbered, open_list

RECORD_KEYS = ("images", "data", "rows", "samples", "items", "annotations")
"""Where a JSON object holds its records, as in COCO."""
_STRUCT_KEYS = {"bytes", "path", "url", "src"}
"""Fields of one picture."""
_KINDS: dict[type, str] = {dict: "{", list: "[", str: '"'}
_BLANKS = re.compile(r"[ \t\r\n\ufeff]*")
"""Also the byte order marks of lists that were joined by `cat`."""
_BLANKS_OR_COMMAS = re.compile(r"[ \t\r\n,]*")
_ADVICE = "write a list of objects, as pandas does with to_json(orient='records')"


def json_records(text: ListText) -> Numbered:
    """The records of a JSON list, of the list in a JSON object, or of values that follow each other, as JSON lines."""
    reader = JsonReader(text)
    start = reader.peek()
    if start == "[":
        text.unit, values = "record", _only_list(text, reader)
    elif start != "{" and text.kind == ".json":
        raise UsageError(f"{text.path} is a JSON {type(reader.value()).__name__}: {_ADVICE}")
    elif start != "{" or (shape := _object_shape(text.path, text.kind, *_changed(text.path))) is None:
        while reader.peek():
            number = reader.number
            yield number, _object(reader.value(), text.where(number))
            reader.count += 1
        return
    else:
        values = _object_records(text, reader, shape)
    for number, value in enumerate(values, 1):
        if number > 1:
            text.unit = "record"
        yield number, _object(value, text.where(number))


def _only_list(text: ListText, reader: JsonReader) -> Iterator[Any]:
    yield from reader.elements()
    if reader.peek():
        raise UsageError(
            f"{text.path} goes on after its list of {reader.count} records: one list, or an object per line"
        )


def _object(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, str):
        return {FILE_COLUMNS[0]: value}
    if not isinstance(value, dict):
        raise UsageError(f"{where} is not a JSON object: {short_repr(value)}")
    return value


class JsonReader:
    """Values of a JSON text one after the other, without holding the others.

    Attributes:
        count: values that were taken, for messages.
    """

    def __init__(self, text: ListText) -> None:
        self._text, self._stream = text, text.stream
        self._buffer, self._place, self._ended, self._line, self.count = "", 0, False, 1, 0
        self._decoder = json.JSONDecoder()

    @property
    def number(self) -> int:
        """Of the next value: its line, or which record it is."""
        self.peek()
        return self._line if self._text.unit == "line" else self.count + 1

    def _fill(self) -> None:
        size = len(self._buffer) - self._place
        more = self._stream.read(min(max(1 << 20, size), MAX_LINE_CHARS + 1 - size))
        self._buffer, self._place, self._ended = self._buffer[self._place :] + more, 0, not more

    def _go_to(self, end: int) -> None:
        self._line += max(self._buffer.count(char, self._place, end) for char in "\n\r")
        self._place = end

    def peek(self, skipped: re.Pattern[str] = _BLANKS) -> str:
        """The next character of the syntax; empty at the end."""
        while True:
            self._go_to(skipped.match(self._buffer, self._place).end())  # type: ignore[union-attr]  # or nothing
            if self._place < len(self._buffer) or self._ended:
                return self._buffer[self._place : self._place + 1]
            self._fill()

    def value(self) -> Any:
        """The next value, in whole.

        Raises:
            UsageError: it is none, or longer than `MAX_LINE_CHARS`.
            RecursionError: it is nested too deeply.
        """
        while True:
            self.peek()
            try:
                found, end = self._decoder.raw_decode(self._buffer, self._place)
                if end == len(self._buffer) and not self._ended:  # a number may go on
                    raise ValueError
            except ValueError as error:
                if not self._ended and len(self._buffer) - self._place <= MAX_LINE_CHARS:
                    self._fill()
                    continue
                message = one_line(error, 120) if self._ended else f"longer than {MAX_LINE_CHARS} characters"
                raise self._fault(message) from error
            self._go_to(end)
            return found

    def _fault(self, message: str) -> UsageError:
        return UsageError(f"{self._text.where(self.number)} is not JSON: {message}"[:300])

    def elements(self) -> Iterator[Any]:
        """The elements of the list that comes next."""
        for _ in self._within("[]", "list"):
            found = self.value()
            self.count += 1
            yield found

    def members(self) -> Iterator[str]:
        """The keys of the object that comes next; before the next one the caller takes the value."""
        for _ in self._within("{}", "object"):
            key = str(self.value())
            self._take(":")
            yield key

    def _within(self, braces: str, what: str) -> Iterator[None]:
        """Once for each value between these braces, which the caller takes."""
        self._take(braces[0])
        while (char := self.peek(_BLANKS_OR_COMMAS)) != braces[1]:
            if not char:
                raise self._fault(f"the {what} does not end")
            yield
        self._take(braces[1])

    def _take(self, char: str) -> None:
        if self.peek() != char:
            raise self._fault(f"{self.peek()!r} in place of {char!r}")
        self._place += 1

    def skip(self) -> str:
        """Pass over the next value; returns how it begins: `[{`, `["`, `[]`, `{`, or the first character of another."""
        start = self.peek()
        if start == "[":
            kinds = {_KINDS.get(type(element), "0") for element in self.elements()}
            return "[" + (kinds.pop() if len(kinds) == 1 else "?" if kinds else "]")
        if start == "{":
            for _ in self.members():
                self.skip()
        else:
            self.value()
        return start


@lru_cache(maxsize=64)
def _object_shape(path: Path, kind: str, changed: int, size: int) -> Mapping[str, str] | None:
    """Key -> how its value begins, of a file of one object; None if more values follow. Read once for each file."""
    with open_list(path, kind, SourceOptions(), LeftOut()) as text:
        reader = JsonReader(text)
        found = {key: reader.skip() for key in reader.members()}
        return None if reader.peek() else found


def _changed(path: Path) -> tuple[int, int]:
    """When a file was changed, and its size."""
    status = os.stat(path)
    return status.st_mtime_ns, status.st_size


def _object_records(text: ListText, reader: JsonReader, shape: Mapping[str, str]) -> Iterator[Any]:
    """The records of a file of one object."""
    names = {normalized(key): start for key, start in shape.items()}
    is_record = (
        any(names.get(key, "").startswith("[") for key in TURN_KEYS)
        or any(names.get(key) == '"' for key in ("prompt", *text.file_columns) if key != "url")
    )  # fmt: skip
    key = next((key for key in RECORD_KEYS if shape.get(key) == "[{"), None)
    if key is None and len(shape) == 1 and text.kind == ".json":
        key = next((key for key in RECORD_KEYS if shape.get(key) in ('["', "[]")), None)
    if is_record:
        yield reader.value()
    elif key is None:
        yield from _table_records(text, reader.value())
    else:
        for name in reader.members():
            if name == key:
                yield from reader.elements()
                return
            reader.skip()


def _table_records(text: ListText, whole: dict[str, Any]) -> list[Any]:
    """The records of an object: itself, or the rows of a table as pandas and `datasets` write it."""
    values = list(whole.values())
    columns, data = whole.get("columns"), whole.get("data")
    if isinstance(columns, list) and isinstance(data, list):  # orient="split"
        return [dict(zip(map(str, columns), row, strict=False)) if isinstance(row, list) else row for row in data]
    named = [key for key in whole if normalized(key) in text.file_columns]
    if values and all(isinstance(value, dict) for value in values):
        inner = set(values[0])
        if named and not inner <= _STRUCT_KEYS and all(set(value) == inner for value in values):  # orient="columns"
            return [{key: column[row] for key, column in whole.items()} for row in values[0]]
        if not named:  # orient="index", or records by name: kohya's scripts have the pictures as names
            return [_named(key, value, text) for key, value in whole.items()]
    lists = [key for key in named if isinstance(whole[key], list)]
    if lists and text.kind == ".json" and not any(isinstance(value, str) for value in values):
        sizes = {len(value) if isinstance(value, list) else -1 for value in values}
        if len(whole) > 1 and len(sizes) == 1:  # a list for each column
            return [dict(zip(whole, row, strict=True)) for row in zip(*values, strict=True)]
        raise UsageError(f"{text.path} is one object with a list as {lists[0]!r}, one row or several: {_ADVICE}"[:300])
    return [whole]


def _named(key: str, record: dict[str, Any], text: ListText) -> dict[str, Any]:
    """A record with its name as its file, if that is one and it has none; a name may lack the suffix of its picture."""
    if any(normalized(name) in text.file_columns for name in record):
        return record
    folder = text.options.root or text.path.parent
    names = [key, *(f"{key}{suffix}" for one in sorted(IMAGE_SUFFIXES) for suffix in (one, one.upper()))]
    if os.path.splitext(key)[1].lower() not in MEDIA_SUFFIXES:
        names = [name for name in names[1:] if os.path.lexists(os.path.join(folder, name))]
    return {FILE_COLUMNS[0]: names[0]} | record if names else record
