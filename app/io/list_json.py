"""JSON lists: lines, lists, objects that hold a list as COCO's, tables as pandas writes them. A record at a time."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.cells import FILE_COLUMNS, MEDIA_SUFFIXES, short_repr
from mmspec.app.io.conversations import TURN_KEYS, normalized
from mmspec.app.io.images import IMAGE_SUFFIXES
from mmspec.app.io.item import SourceOptions
from mmspec.app.io.left_out import LeftOut
from mmspec.app.io.list_text import MAX_LINE_CHARS, ListText, Numbered, open_list

RECORD_KEYS = ("images", "data", "rows", "samples", "items", "annotations")
"""Where a JSON object holds its records, as in COCO."""
_STRUCT_KEYS = {"bytes", "path", "url", "src"}
"""Fields of one picture."""
_BLANKS = re.compile(r"[ \t\r\n]*")
_BLANKS_OR_COMMAS = re.compile(r"[ \t\r\n,]*")
_ADVICE = "write a list of objects, as pandas does with to_json(orient='records')"


def json_lines(text: ListText) -> Numbered:
    """The records of JSON lines; of a file with one value, those of a JSON list."""
    lines = ((number, line) for number, line in text.raw_lines() if line.strip())
    first, second = next(lines, None), next(lines, None)
    if first is None:
        return
    if second is None or first[1].strip() == "{" or first[1].lstrip().startswith("["):  # JSON by another name
        text.unit = text.unit if second is None else "record"
        text.stream.seek(0)
        yield from json_records(text)
        return
    for number, line in chain((first, second), lines):
        yield number, _object(_load(line, text.where(number)), text.where(number))


def json_records(text: ListText) -> Numbered:
    """The records of a JSON list, of the list in a JSON object, or of several values that follow each other."""
    reader = JsonReader(text)
    start = reader.peek()
    if start == "{":
        values = _object_records(text, reader)
    elif start == "[":
        values = _only_list(text, reader)
    else:
        value = reader.value()
        raise UsageError(f"{text.path} is a JSON {type(value).__name__}: {_ADVICE}")
    for number, value in enumerate(values, 1):
        if number > 1:
            text.unit = "record"
        yield number, _object(value, text.where(number))


def _only_list(text: ListText, reader: JsonReader) -> Iterator[Any]:
    number = 0
    for number, value in enumerate(reader.elements(), 1):  # noqa: B007 (for the message)
        yield value
    if reader.peek():
        raise UsageError(f"{text.path} goes on after its list of {number} records: one list, or an object per line")


def _load(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {one_line(error, 120)}") from error


def _object(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, str):
        return {FILE_COLUMNS[0]: value}
    if not isinstance(value, dict):
        raise UsageError(f"{where} is not a JSON object: {short_repr(value)}")
    return value


class JsonReader:
    """Values of a JSON text one after the other, without holding the others."""

    def __init__(self, text: ListText) -> None:
        self._text, self._stream = text, text.stream
        self._buffer, self._place, self._ended, self.count = "", 0, False, 0
        self._decoder = json.JSONDecoder()

    def _fill(self) -> None:
        more = self._stream.read(max(1 << 20, len(self._buffer) - self._place))
        self._buffer, self._place, self._ended = self._buffer[self._place :] + more, 0, not more

    def peek(self, skipped: re.Pattern[str] = _BLANKS) -> str:
        """The next character of the syntax; empty at the end."""
        while True:
            self._place = skipped.match(self._buffer, self._place).end()  # type: ignore[union-attr]  # or nothing
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
                size = len(self._buffer) - self._place
                if self._ended or size > MAX_LINE_CHARS:
                    message = f"longer than {MAX_LINE_CHARS} characters" if not self._ended else one_line(error, 120)
                    raise self._fault(message) from error
                self._fill()
                continue
            self._place = end
            return found

    def _fault(self, message: str) -> UsageError:
        return UsageError(f"{self._text.where(self.count + 1)} is not JSON: {message}"[:300])

    def elements(self) -> Iterator[Any]:
        """The elements of the list that comes next."""
        self._take("[")
        while (char := self.peek(_BLANKS_OR_COMMAS)) != "]":
            if not char:
                raise self._fault("the list does not end")
            found = self.value()
            self.count += 1
            yield found
        self._take("]")

    def members(self) -> Iterator[str]:
        """The keys of the object that comes next; before the next one the caller takes the value."""
        self._take("{")
        while (char := self.peek(_BLANKS_OR_COMMAS)) != "}":
            if char != '"':
                raise self._fault(f"{char!r} in place of a key" if char else "the object does not end")
            key = self.value()
            self.peek()
            self._take(":")
            yield str(key)
        self._take("}")

    def _take(self, char: str) -> None:
        if self.peek() != char:
            raise self._fault(f"{self.peek()!r} in place of {char!r}")
        self._place += 1

    def skip(self) -> str:
        """Pass over the next value; returns how it begins: `[{`, `["`, `[]`, `{`, or the first character of another."""
        start = self.peek()
        if start == "[":
            kinds = {_kind(element) for element in self.elements()}
            return "[" + (kinds.pop() if len(kinds) == 1 else "?" if kinds else "]")
        if start == "{":
            for _ in self.members():
                self.skip()
            return "{"
        self.value()
        return start


def _kind(value: Any) -> str:
    return (
        "{" if isinstance(value, dict) else "[" if isinstance(value, list) else '"' if isinstance(value, str) else "0"
    )


@lru_cache(maxsize=64)
def _object_shape(path: Path, kind: str, changed: int, size: int) -> Mapping[str, str] | None:
    """Key -> how its value begins, of a file of one object; None if more values follow. Read once for each file."""
    with open_list(path, kind, SourceOptions(), LeftOut()) as text:
        reader = JsonReader(text)
        found = {key: reader.skip() for key in reader.members()}
        return None if reader.peek() else found


def _object_records(text: ListText, reader: JsonReader) -> Iterator[Any]:
    """The records of a file that begins with an object."""
    status = os.stat(text.path)
    shape = _object_shape(text.path, text.kind, status.st_mtime_ns, status.st_size)
    if shape is None:  # objects that follow each other
        while reader.peek():
            yield reader.value()
            reader.count += 1
        return
    names = {normalized(key): start for key, start in shape.items()}
    is_record = (
        any(names.get(key, "").startswith("[") for key in TURN_KEYS)
        or any(names.get(key) == '"' for key in ("prompt", *_file_columns(text)) if key != "url")
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
    named = [key for key in whole if normalized(key) in _file_columns(text)]
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
    if any(normalized(name) in _file_columns(text) for name in record):
        return record
    folder = text.options.root or text.path.parent
    names = [key, *(f"{key}{suffix}" for suffix in sorted(IMAGE_SUFFIXES))]
    if os.path.splitext(key)[1].lower() not in MEDIA_SUFFIXES:
        names = [name for name in names[1:] if os.path.lexists(os.path.join(folder, name))]
    return {FILE_COLUMNS[0]: names[0]} | record if names else record


def _file_columns(text: ListText) -> tuple[str, ...]:
    wanted = text.options.image_column
    return (normalized(wanted),) if wanted else FILE_COLUMNS
