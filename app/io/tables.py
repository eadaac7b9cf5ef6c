"""Tables of pictures as rows: Parquet files; what `app.io.data_sets` needs to read data sets.

Files are read in the confined process that decodes pictures, a few rows at a time; data sets of the hub by `datasets`,
in this one. Pictures are taken as the bytes that they are; a damaged part of a file is one error row. The packages are
optional: the extra `data`.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.cells import IMAGE_COLUMNS, Reach, cell_content, is_missing, listed, whole_number
from mmspec.app.io.content import Unreadable, open_source
from mmspec.app.io.fields import field_texts, wanted
from mmspec.app.io.item import Item, Skip, SourceOptions
from mmspec.app.io.streams import StreamedSource, explain
from mmspec.hints import install_hint
from mmspec.vision.video.containers import HEADER_BYTES, FileBelow, describe_format
from mmspec.vision.video.decoder_pool import DecoderPool
from mmspec.vision.video.remote_table import BadValue, RemoteTable

FREE_ROWS = 1 << 16
"""Rows that a table may have, whatever the size of its file."""
MAX_ROWS_PER_BYTE = 64
"""Rows beyond these, per byte of the file."""
MAX_ROW_ID_CHARS = 1024
MAX_GROUP_BYTES = 8 << 30
"""Largest uncompressed size of the columns read of one row group, as its header states it."""


@contextmanager
def needs_extra(name: str, extra: str = "data") -> Iterator[None]:
    """Turn a missing package into one line.

    Raises:
        UsageError: the block cannot import it.
    """
    try:
        yield
    except ImportError as error:
        raise UsageError(
            f"{name} needs a package that is missing ({one_line(error, 80)}): {install_hint(extra)}"
        ) from error


@lru_cache(maxsize=1)
def _workers() -> DecoderPool:
    """Processes that read tables, one for each that is open."""
    pool = DecoderPool()
    atexit.register(pool.close)
    return pool


@contextmanager
def open_table(kind: str, url: str | FileBelow) -> Iterator[RemoteTable]:
    """An open table, which another process reads; the file is opened here, once.

    Args:
        kind: "parquet", or "arrow" for the stream format.
        url: a path or an address of fsspec.

    Raises:
        UsageError: a package is missing.
        Exception: it cannot be read, or has more rows than a file of its size may have.
    """
    with ExitStack() as stack, needs_extra(os.fspath(url)):
        file = stack.enter_context(open_source(url))
        size = file.seek(0, os.SEEK_END)

        def read_range(start: int, count: int) -> bytes:
            file.seek(start)
            return bytes(file.read(count))

        if kind == "parquet" and not (header := read_range(0, HEADER_BYTES)).startswith((b"PAR1", b"PARE")):
            raise ValueError(f"it is {describe_format(header)}")
        table = stack.enter_context(RemoteTable(_workers(), kind, size, read_range))
        limit = FREE_ROWS + MAX_ROWS_PER_BYTE * size
        if sum(table.group_rows or ()) > limit:
            raise ValueError(f"more than {limit} rows, too many for a file of {size} bytes")
        yield table


class Columns:
    """The columns to read, found once: picture, prompt, id, and those that prompts name."""

    def __init__(self, names: Sequence[str], options: SourceOptions, what: str) -> None:
        """
        Args:
            what: the table, for messages.

        Raises:
            UsageError: there is no such column, or none of pictures is known by its name.
        """
        image = options.image_column or next(iter(wanted(IMAGE_COLUMNS, names).values()), None)
        if image is None:
            raise UsageError(f"{what} has no column of pictures; it has {listed(names)}: name one with --image-column")
        self.image, self.prompt, self.id = image, options.prompt_column, options.id_column
        for flag, name in (("image", self.image), ("prompt", self.prompt), ("id", self.id)):
            if name is not None and name not in names:
                raise UsageError(f"{what} has no column {name!r} (--{flag}-column); it has {listed(names)}")
        others = [name for name in names if name != self.image]
        self.options, self.fields = options, wanted(options.fields, others)

    @property
    def light(self) -> list[str]:
        """Columns besides the picture."""
        return list(dict.fromkeys(name for name in (self.prompt, self.id, *self.fields.values()) if name))

    @property
    def all(self) -> list[str]:
        return list(dict.fromkeys([self.image, *self.light]))

    def item(self, row: dict[str, Any], number: int, name: str, folder: str) -> Item:
        """A row of a table.

        Args:
            row: its cells, of which some may not have been read.
            number: of the row in the table.
            name: of the table.
            folder: what paths in the table are relative to, and may not leave.
        """
        cell = row.get(self.image)
        content, path = cell_content(cell, Reach(folder, self.options.root, self.options.urls))
        texts = {"prompt": self.prompt and row.get(self.prompt), "id": self.id and whole_number(row.get(self.id))}
        for key, value in texts.items():
            if is_missing(value):
                texts[key] = None
            elif not isinstance(value, str if key == "prompt" else str | int):
                got = value.message if isinstance(value, BadValue) else type(value).__name__
                content, texts[key] = Unreadable("BadText", f"the {key} is text, got {got}"), None
        prompt, ident = texts["prompt"] or None, "" if texts["id"] is None else str(texts["id"])
        if len(ident) > MAX_ROW_ID_CHARS:
            content = Unreadable("BadText", f"the id has {len(ident)} characters; the limit is {MAX_ROW_ID_CHARS}")
            ident = ""
        shown = f"{name}#{number}"
        return Item(
            Path(path or shown),
            ident or shown,
            path or shown,
            prompt,
            content=content,
            origin=f"{name} row {number}" if ident else "",
            owns_id=bool(ident) and not is_missing(cell),  # of a finished row no picture is read
            fields=field_texts(row, self.fields),
        )


class ParquetSource(StreamedSource):
    """Rows of one Parquet file, local or remote."""

    def count(self) -> int | None:
        try:
            with open_table("parquet", self.url) as table:
                return sum(table.group_rows or ())
        except Exception:
            return None

    def _check(self) -> None:
        with open_table("parquet", self.url) as table:
            Columns(table.columns, self.options, self.name)

    def _read(self, skip: Skip) -> Iterator[Item]:
        group = first = 0
        while True:
            with open_table("parquet", self.url) as table:
                columns, sizes = Columns(table.columns, self.options, self.name), table.group_rows or []
                while group < len(sizes) and table.is_alive:  # a damaged group may have crashed the reader
                    yield from self._group(table, group, sizes[group], columns, first, skip)
                    group, first = group + 1, first + sizes[group]
                if group == len(sizes):
                    return

    def _group(
        self, table: RemoteTable, group: int, count: int, columns: Columns, first: int, skip: Skip
    ) -> Iterator[Item]:
        """The rows of a group; if it is damaged those before the damage, and an error row."""
        number, sample = first, None
        try:
            size = table.group_bytes(group, columns.all)
            if size > MAX_GROUP_BYTES:
                message = f"row group {group} has {size} bytes; the limit is {MAX_GROUP_BYTES}"
                yield self._failure(f"group{group}", "TooLarge", message)
                return
            is_finished = self._finished(table, group, count, columns, first, skip)
            wanted = columns.light if is_finished else columns.all
            if is_finished and columns.id is not None:  # one picture shows whether the ids are of this table
                sample = next(iter(table.rows(columns.all, group)), None)
            for cells in table.rows(wanted, group) if wanted else ([] for _ in range(count)):
                row = dict(zip(wanted, cells, strict=True))  # without the picture of a finished group
                row = dict(zip(columns.all, sample, strict=True)) if sample is not None and number == first else row
                yield columns.item(row, number, self.name, os.path.dirname(self.url) or ".")
                number += 1
            if number < first + count:
                raise EOFError(f"it has {number - first} of {count} rows")
        except Exception as error:  # a damaged page
            yield self._failure(f"group{group}", "Unreadable", f"row group {group}: {explain(error)}")

    def _finished(self, table: RemoteTable, group: int, count: int, columns: Columns, first: int, skip: Skip) -> bool:
        """Whether all rows of the group are to be skipped."""
        if columns.id is None:
            return all(skip(f"{self.name}#{number}") for number in range(first, first + count))
        return all(skip(str(ident)) for (ident,) in table.rows([columns.id], group))
