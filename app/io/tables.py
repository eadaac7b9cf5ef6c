"""Tables of pictures as rows: Parquet files, and `datasets` of the Hugging Face hub or a local folder.

Read a few rows at a time. Pictures are taken as the bytes that they are and decoded elsewhere; a damaged part of a file
is one error row. The packages are optional: the extra `data`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.cells import MEDIA_SUFFIXES, find_image_column, local_name, require_column, table_row
from mmspec.app.io.content import Unreadable, is_local, open_file_system
from mmspec.app.io.item import Item, Skip, SourceOptions
from mmspec.app.io.left_out import LeftOut
from mmspec.hints import install_hint

ROWS_PER_READ = 64
MAX_GROUP_BYTES = 8 << 30
"""Largest uncompressed size of the columns read of one row group, as its header states it."""
HUB_PREFIX = "hf://datasets/"


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


class _Columns:
    """The columns to read, found once: picture, prompt, id."""

    def __init__(self, names: Sequence[str], options: SourceOptions, what: str) -> None:
        self.image = find_image_column(names, options.image_column, what)
        optional = (("--prompt-column", options.prompt_column), ("--id-column", options.id_column))
        self.prompt, self.id = (name and require_column(names, name, flag, what) for flag, name in optional)

    @property
    def light(self) -> list[str]:
        """Columns besides the picture."""
        return list(dict.fromkeys(name for name in (self.prompt, self.id) if name))

    @property
    def all(self) -> list[str]:
        return list(dict.fromkeys([self.image, *self.light]))

    def cells(self, row: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Picture, prompt and id of a row; None for what it lacks."""
        return row.get(self.image), self.prompt and row.get(self.prompt), self.id and row.get(self.id)


class ParquetSource:
    """Rows of one Parquet file, local or remote."""

    is_listed = False

    def __init__(self, url: str, options: SourceOptions) -> None:
        self.url, self.options = url, options
        self.name = local_name(url, options.base)
        self._folder = (str(Path(url).parent) if is_local(url) else url.rpartition("/")[0]) or "."

    @contextmanager
    def _open(self) -> Iterator[Any]:
        with needs_extra(self.name):
            import pyarrow.parquet as pq
        if is_local(self.url):
            with pq.ParquetFile(self.url, memory_map=False) as file:
                yield file
            return
        system, path = open_file_system(self.url)
        with system.open(path, "rb") as stream, pq.ParquetFile(stream) as file:
            yield file

    def count(self) -> int | None:
        try:
            with self._open() as file:
                return int(file.metadata.num_rows)
        except Exception:
            return None

    def check(self) -> None:
        try:
            with self._open() as file:
                _Columns(file.schema_arrow.names, self.options, self.name)
        except UsageError:
            raise
        except Exception as error:  # pyarrow and drivers raise types of their own
            raise UsageError(f"cannot read {self.url}: {one_line(error)}") from error

    def rows(self, skip: Skip) -> Iterator[Item]:
        try:
            with self._open() as file:
                columns = _Columns(file.schema_arrow.names, self.options, self.name)
                first = 0
                for group in range(file.num_row_groups):
                    yield from self._group(file, group, columns, first, skip)
                    first += file.metadata.row_group(group).num_rows
        except Exception as error:
            yield self._failure("rest", "Unreadable", one_line(error))

    def add_left_out(self, found: LeftOut) -> None:
        pass  # every row of a table is a row

    def _failure(self, part: str, kind: str, message: str) -> Item:
        name = f"{self.name}#{part}"
        return Item(Path(name), name, name, content=Unreadable(kind, f"{self.name}: {message}"))

    def _group(self, file: Any, group: int, columns: _Columns, first: int, skip: Skip) -> Iterator[Item]:
        metadata = file.metadata.row_group(group)
        size = sum(
            part.total_uncompressed_size
            for part in map(metadata.column, range(metadata.num_columns))
            if part.path_in_schema.split(".")[0] in columns.all
        )
        if size > MAX_GROUP_BYTES:
            yield self._failure(
                f"group{group}", "TooLarge", f"row group {group} has {size} bytes; the limit is {MAX_GROUP_BYTES}"
            )
            return
        number = first
        try:
            finished = self._finished(file, group, columns, first, skip)
            wanted = columns.light if finished else columns.all
            for batch in _batches(file, group, wanted, metadata.num_rows):
                for row in batch:
                    picture, prompt, ident = columns.cells(row)  # no picture of a finished group
                    yield table_row(picture, prompt, ident, number, self.name, self._folder, self.options)
                    number += 1
        except Exception as error:  # a damaged page
            yield self._failure(f"group{group}", "Unreadable", f"row group {group}: {one_line(error)}")

    def _finished(self, file: Any, group: int, columns: _Columns, first: int, skip: Skip) -> bool:
        """Whether all rows of the group are to be skipped."""
        count = file.metadata.row_group(group).num_rows
        if columns.id is None:
            return all(skip(f"{self.name}#{number}") for number in range(first, first + count))
        batches = _batches(file, group, [columns.id], count)
        return all(skip(str(row[columns.id])) for batch in batches for row in batch)


def _batches(file: Any, group: int, columns: list[str], count: int) -> Iterator[list[dict[str, Any]]]:
    """Rows of a group, a few at a time."""
    if not columns:
        for start in range(0, count, ROWS_PER_READ):
            yield [{} for _ in range(min(ROWS_PER_READ, count - start))]
        return
    for batch in file.iter_batches(batch_size=ROWS_PER_READ, row_groups=[group], columns=columns, use_threads=False):
        yield batch.to_pylist()


class DatasetSource:
    """Rows of a `datasets` dataset: a folder of `save_to_disk`, or one of the hub, streamed."""

    is_listed = False

    def __init__(self, name: str, options: SourceOptions) -> None:
        self.name, self.options = name.rstrip("/"), options
        self._on_hub = name.startswith(HUB_PREFIX)
        self._folder = self.name if self._on_hub else str(Path(name))

    def _load(self) -> Any:
        with needs_extra(self.name):
            import datasets
        try:
            if not self._on_hub:
                found = datasets.load_from_disk(self.name)
                if not isinstance(found, datasets.DatasetDict):
                    return found
                if self.options.split not in found:
                    splits = ", ".join(list(found)[:8])
                    raise UsageError(f"{self.name} has no split {self.options.split!r}; give --split, of {splits}")
                return found[self.options.split]
            repository, configuration, revision = split_hub_name(self.name)
            names = (repository, configuration) if configuration else (repository,)
            found = datasets.load_dataset(*names, split=self.options.split, streaming=True, revision=revision)
            return found if found.features is not None else found._resolve_features()
        except UsageError:
            raise
        except Exception as error:  # datasets and the hub raise types of their own
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> UsageError:
        """What `datasets` says; of a data set with several configurations their names."""
        names = re.findall(r"'([^']+)'", "".join(re.findall(r"\[([^\]]*)\]", str(error)))) if self._on_hub else []
        if names and "config" in str(error).lower():
            repository = split_hub_name(self.name)[0]
            shown = ", ".join(names)
            shown = shown if len(shown) <= 120 else f"{shown[:120].rpartition(', ')[0]}, ... ({len(names)})"
            return UsageError(
                f"{HUB_PREFIX}{repository} has configurations; name one: .../{names[0]}; they are {shown}"
            )
        return UsageError(f"cannot read the dataset {self.name}, split {self.options.split}: {one_line(error, 200)}")

    def count(self) -> int | None:
        try:
            found = self._load()
            return len(found) if not self._on_hub else found.info.splits[self.options.split].num_examples
        except Exception:
            return None

    def add_left_out(self, found: LeftOut) -> None:
        pass  # every row of a data set is a row

    def check(self) -> None:
        _Columns(list(self._load().features), self.options, self.name)

    def rows(self, skip: Skip) -> Iterator[Item]:
        number = 0
        try:
            found = self._load()
            columns = _Columns(list(found.features), self.options, self.name)
            # Arrow tables: in any other format `datasets` decodes pictures and clips, at any depth, in this process
            for table in found.select_columns(columns.all).with_format("arrow"):
                for row in table.to_pylist():
                    yield table_row(*columns.cells(row), number, self.name, self._folder, self.options)
                    number += 1
        except Exception as error:
            name = f"{self.name}#rest"
            yield Item(
                Path(name), name, name, content=Unreadable("Unreadable", f"after row {number}: {one_line(error)}")
            )


def is_saved_dataset(folder: Path) -> bool:
    """Whether `folder` was written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    return (folder / "dataset_dict.json").is_file() or all(
        (folder / f).is_file() for f in ("state.json", "dataset_info.json")
    )


_HUB_NAME = re.compile(
    re.escape(HUB_PREFIX) + r"(?P<repository>[\w.-]+/[\w.-]+)"
    r"(@(?P<revision>refs/[\w-]+/[\w.-]+|[\w.-]+))?(/(?P<configuration>[\w.-]+)?)?"
)
_FILE_SUFFIXES = MEDIA_SUFFIXES | {".tar", ".parquet", ".jsonl", ".json", ".csv", ".tsv", ".txt", ".gz", ".tgz", ".zip"}


def is_hub_dataset(name: str) -> bool:
    """Whether `name` is `hf://datasets/OWNER/NAME[@REVISION][/CONFIGURATION]` and not a file or folder in it.

    A folder in a repository ends with a slash, or lies deeper; a file has one of the suffixes that are read.
    """
    return _HUB_NAME.fullmatch(name) is not None and PurePosixPath(name).suffix.lower() not in _FILE_SUFFIXES


def split_hub_name(name: str) -> tuple[str, str | None, str | None]:
    """Repository, configuration and revision of a data set of the hub."""
    found = _HUB_NAME.fullmatch(name)
    assert found is not None, name
    return found["repository"], found["configuration"], found["revision"]
