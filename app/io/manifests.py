"""Lists of pictures and clips: JSON lines, JSON, CSV, TSV and text, as people and Excel write them, also gzipped.

A list is not trusted: its paths stay inside its folder, or the one that the user permits. Every message names the list
and the line.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.cells import (
    FILE_COLUMNS,
    MAX_NAME_BYTES,
    MEDIA_SUFFIXES,
    Reach,
    cell_content,
    plain_path,
    relative_name,
    short_repr,
    whole_number,
)
from mmspec.app.io.content import ByteRange, Unreadable
from mmspec.app.io.conversations import conversation, is_empty, record_columns
from mmspec.app.io.fields import field_texts, normalized, wanted
from mmspec.app.io.item import Item, SourceOptions
from mmspec.app.io.left_out import LeftOut
from mmspec.app.io.list_json import json_records
from mmspec.app.io.list_tables import names, table
from mmspec.app.io.list_text import ListText, open_list

MANIFESTS = frozenset({".jsonl", ".txt", ".csv", ".tsv", ".json"})


def is_manifest(path: Path) -> bool:
    """Whether the name is that of a list."""
    return _format(path) in MANIFESTS


def _format(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return suffixes[-2] if suffixes[-1:] == [".gz"] and suffixes[:-1] else "".join(suffixes[-1:])


def read_manifest(path: Path, options: SourceOptions, found: LeftOut) -> Iterator[Item]:
    """The rows of a list.

    Args:
        found: what is not read of it, or read with a doubt, is added.

    Raises:
        UsageError: it cannot be read, no row of it names a picture, or one names what may not be read.
    """
    kind = _format(path)
    reader = {".jsonl": json_records, ".json": json_records, ".txt": names}.get(kind, table)
    try:
        with open_list(path, kind, options, found) as text:
            entries = _Entries(text)
            for number, row in reader(text):
                text.check(number)
                if (item := entries.item(number, row)) is not None:
                    yield item
            entries.end()
    except UnicodeError as error:
        raise UsageError(f"list {path} is not UTF-8 text: {one_line(error, 120)}") from error
    except RecursionError as error:
        raise UsageError(f"cannot read list {path}: its values are nested too deeply") from error
    except (OSError, zlib.error, EOFError) as error:
        reason = getattr(error, "strerror", None) or one_line(error, 120)
        raise UsageError(f"cannot read list {path}: {reason}") from error


def _file_name(cell: Any) -> str:
    """The name of the picture or clip that a cell names by its path; "" if it does not."""
    if not isinstance(cell, str) or len(cell.encode(errors="replace")) > MAX_NAME_BYTES or "://" in cell:
        return ""
    name = os.path.basename(plain_path(cell).replace("\\", "/"))
    return name if os.path.splitext(name)[1].lower() in MEDIA_SUFFIXES else ""


class _Entries:
    """The records of a list as rows."""

    def __init__(self, text: ListText) -> None:
        self.text, self.options = text, text.options
        self.reach = Reach(str(text.path.parent), self.options.root, self.options.urls)
        self._has_rows, self._first_empty = False, ""

    def item(self, number: int, row: dict[str, Any]) -> Item | None:
        """The row of a record; None if it names no picture, which is counted.

        Raises:
            UsageError: it names nothing that may be read.
        """
        where = self.text.where(number)
        keys = self.text.file_columns
        columns = record_columns(row, keys)
        cell = next((columns[key] for key in keys if key in columns and not is_empty(columns[key])), None)
        asked, answered, shown = conversation(columns)
        if cell is None and shown:
            cell = shown if len(shown) > 1 else shown[0]
        if cell is None:
            self._add_empty(number, row, is_known=asked is not None or any(key in columns for key in keys))
            return None
        self._has_rows = True
        if len({_file_name(columns.get(key)) for key in keys} - {""}) > 1:
            self.text.note("columns", number)
        prompt = columns.get(normalized(self.options.prompt_column or "prompt"), asked)
        if prompt is not None and not isinstance(prompt, str):
            raise UsageError(f"{where}: 'prompt' is text, got {short_repr(prompt)}")
        answer = columns.get("answer", answered)
        answer = str(answer) if isinstance(answer, int | float) else answer
        ident = whole_number(columns.get(normalized(self.options.id_column or "id")))
        if ident is not None and not isinstance(ident, str | int):
            raise UsageError(f"{where}: 'id' is text or a whole number, got {short_repr(ident)}")
        return replace(
            self._named(cell, number),
            id="" if ident is None else str(ident),
            owns_id=ident is not None,
            prompt=prompt or None,
            answer=answer if isinstance(answer, str) and answer else None,
            fields=field_texts(columns, wanted(self.options.fields, columns)),
        )

    def _add_empty(self, number: int, row: dict[str, Any], is_known: bool) -> None:
        """Count a record without a picture.

        Args:
            is_known: it is a conversation, or has a column for it.
        """
        self.text.note("record", number)
        if not is_known and not self._first_empty:
            self._first_empty = self._no_file(number, ", ".join(map(short_repr, row)) or "nothing")

    def _no_file(self, number: int, got: str) -> str:
        wanted = self.options.image_column or FILE_COLUMNS[0]
        return f"{self.text.where(number)} names no file: give {wanted!r}; got {got}"[:300]

    def end(self) -> None:
        """The list is read.

        Raises:
            UsageError: no record of it named a picture, and one has no column for it.
        """
        if not self._has_rows and self._first_empty:
            raise UsageError(self._first_empty)

    def _named(self, cell: Any, number: int) -> Item:
        """The row without its texts."""
        where = self.text.where(number)
        content, name = cell_content(cell, self.reach)
        if isinstance(cell, str) and isinstance(content, ByteRange):
            return Item(Path(content.url), origin=where, below=content.file)
        if isinstance(content, Unreadable) and content.kind in ("Missing", "BadCell"):
            raise UsageError(self._no_file(number, short_repr(cell)))
        if isinstance(content, Unreadable):
            raise UsageError(f"{where}: {content.message}")
        name = name or f"{relative_name(self.text.path, self.options.place)}#{number}"
        return Item(Path(name), file_name=name, content=content, origin=where)
