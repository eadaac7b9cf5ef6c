"""Data sets of `datasets` as rows: folders of `save_to_disk`, and those of the Hugging Face hub, streamed.

A folder is not trusted: its Arrow files are read in a confined process, and what its JSON files name stays inside.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.cells import MEDIA_SUFFIXES, Reach, find_inside, is_path, short_repr
from mmspec.app.io.item import Item, Skip
from mmspec.app.io.kinds import refuse_pointer
from mmspec.app.io.streams import StreamedSource
from mmspec.app.io.tables import FREE_ROWS, MAX_ROWS_PER_BYTE, Columns, needs_extra, open_table
from mmspec.vision.video.containers import FileBelow, open_regular_file

HUB_PREFIX = "hf://datasets/"
MAX_STATE_BYTES = 64 << 20
"""Largest JSON file of a saved data set."""


class SavedSource(StreamedSource):
    """Rows of a folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""

    def _files(self) -> list[FileBelow]:
        """The Arrow files of the split.

        Raises:
            UsageError: there is no such split, or a file of the folder is not what `save_to_disk` writes.
        """
        folder = ""
        if os.path.isfile(os.path.join(self.url, "dataset_dict.json")):
            splits = self._described("dataset_dict.json").get("splits")
            if not isinstance(splits, list) or self.options.split not in splits:
                known = ", ".join(map(str, splits[:8] if isinstance(splits, list) else ()))
                raise UsageError(f"{self.name} has no split {self.options.split!r}; give --split, of {known}")
            folder = self.options.split
        state = self._described(folder, "state.json")
        if state.get("_indices_files") or state.get("_indices_data_files"):
            raise UsageError(f"{self.name} was saved with a selection of rows by an old `datasets`: save it again")
        files = state.get("_data_files")
        if not isinstance(files, list) or not all(isinstance(file, dict) for file in files):
            raise UsageError(f"{self.name}: state.json names no files")
        found = [self._inside(folder, file.get("filename")) for file in files]
        if len(set(found)) < len(found):
            raise UsageError(f"{self.name}: state.json names a file twice")
        return found

    def _inside(self, folder: str, name: object) -> FileBelow:
        """What a file in a folder of this one names.

        Raises:
            UsageError: it leads out of the folder.
        """
        path = os.path.join(folder, name) if isinstance(name, str) else ""
        found = find_inside(path, Reach(self.url)) if path and is_path(path) else None
        if found is None or found[1] is None:
            raise UsageError(f"{self.name}: {short_repr(name)} leads out of the folder, or is no name")
        return found[1]

    def _described(self, *parts: str) -> dict[str, Any]:
        """A JSON file of the folder.

        Raises:
            UsageError: it cannot be read, is too large, or no JSON object.
        """
        try:
            with os.fdopen(open_regular_file(self._inside("", os.path.join(*parts))), "rb") as opened:
                data = opened.read(MAX_STATE_BYTES + 1)
            if len(data) > MAX_STATE_BYTES:
                raise ValueError(f"more than {MAX_STATE_BYTES} bytes")
            found = json.loads(data)
            if not isinstance(found, dict):
                raise ValueError("no JSON object")
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"cannot read the dataset {self.name}: {parts[-1]}: {one_line(error, 120)}") from error
        return found

    def _check(self) -> None:
        files = self._files()
        for path in files:
            refuse_pointer(path)
        for path in files[:1]:
            with open_table("arrow", path) as table:
                Columns(table.columns, self.options, self.name)

    def _read(self, skip: Skip) -> Iterator[Item]:
        number = 0
        for path in self._files():
            with open_table("arrow", path) as table:
                limit = number + FREE_ROWS + MAX_ROWS_PER_BYTE * table.num_bytes
                columns = Columns(table.columns, self.options, self.name)
                for cells in table.rows(columns.all):
                    yield columns.item(dict(zip(columns.all, cells, strict=True)), number, self.name, self.url)
                    number += 1
                    if number > limit:
                        raise ValueError(f"{path.name} has more rows than a file of its size may have")


class HubSource(StreamedSource):
    """Rows of a data set of the hub, streamed by `datasets`."""

    def _load(self) -> Any:
        with needs_extra(self.name):
            import datasets
        try:
            repository, configuration, revision = split_hub_name(self.name)
            names = (repository, configuration) if configuration else (repository,)
            found = datasets.load_dataset(*names, split=self.options.split, streaming=True, revision=revision)
            return found if found.features is not None else found._resolve_features()
        except Exception as error:  # datasets and the hub raise types of their own
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> UsageError:
        """What `datasets` says; of a data set with several configurations their names."""
        names = re.findall(r"'([^']+)'", "".join(re.findall(r"\[([^\]]*)\]", str(error))))
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
            return int(self._load().info.splits[self.options.split].num_examples)
        except Exception:
            return None

    def _check(self) -> None:
        Columns(list(self._load().features), self.options, self.name)

    def _read(self, skip: Skip) -> Iterator[Item]:
        number, found = 0, self._load()
        columns = Columns(list(found.features), self.options, self.name)
        # Arrow tables: in any other format `datasets` decodes pictures and clips, at any depth, in this process
        for table in found.select_columns(columns.all).with_format("arrow"):
            table.validate(full=True)
            for row in table.to_pylist():
                yield columns.item(row, number, self.name, self.name)
                number += 1


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
