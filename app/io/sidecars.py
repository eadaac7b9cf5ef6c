"""Captions as text files, one for each picture: beside it, or under the same name in a folder.

A file that exists is a finished row, so that a job is resumed without any other state. Each is written whole or not at
all. Rows with an error have none, and are repeated by the next run.
"""

from __future__ import annotations

import errno
import glob
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from mmspec.app.errors import OutputError, UsageError, explain_write
from mmspec.app.io.cells import MEDIA_SUFFIXES
from mmspec.app.io.content import Unreadable
from mmspec.app.io.item import Item
from mmspec.app.io.jsonl import Row
from mmspec.app.io.output import Finished, JobSummary
from mmspec.files import atomic_write

SIDECAR_SUFFIX = ".txt"


class SidecarOutput:
    """`photo.txt` for `photo.jpg`."""

    def __init__(
        self,
        folder: Path | None,
        paths: Sequence[str],
        items: Callable[[], Iterable[Item]],
        *,
        overwrite: bool = False,
    ) -> None:
        """Set up; nothing is read.

        Args:
            folder: of the files; None: each beside its picture.
            paths: the inputs, as given.
            items: lists the rows, as `Inputs.rows`.
            overwrite: existing files are replaced, each when its new caption is there.
        """
        self.folder, self.base, self._paths, self._items = folder, folder or Path(), paths, items
        self.overwrite = overwrite
        self._finished: dict[str, Finished] = {}
        self._known: dict[Path, Path] = {}  # text file -> its picture

    def own_files(self) -> list[Path]:
        """Files that could be taken for lists of pictures: those beside the pictures that the paths name."""
        if self.folder is not None:
            return []
        beside = (Path(os.path.splitext(name)[0] + SIDECAR_SUFFIX) for name in _media_files(self._paths))
        return [path for path in beside if path.is_file()]

    def sidecar(self, item: Item) -> Path:
        """The file of a row."""
        if self.folder is None:
            return item.path.with_suffix(SIDECAR_SUFFIX)
        path = os.path.abspath(item.path)
        roots = [os.path.abspath(name) for name in self._paths if os.path.isdir(name)]
        root = next((root for root in roots if path.startswith(root.rstrip(os.sep) + os.sep)), os.path.dirname(path))
        return (self.folder / os.path.relpath(path, root)).with_suffix(SIDECAR_SUFFIX)

    def open(self) -> Mapping[str, Finished]:
        """See `Output`. Finished rows are those whose file exists.

        Raises:
            UsageError: rows that are no files, or two pictures with one text file.
            OutputError: a folder that cannot be written.
        """
        if self.folder is not None:
            self._create_folder(self.folder)
        known = self._known
        for item in self._items():
            if item.content is not None and not isinstance(item.content, Unreadable):
                raise UsageError(
                    f"--format txt is for files; {item.id[:80]!r} is a row of a table or archive: use --format jsonl, "
                    "parquet or webdataset"
                )
            path = self.sidecar(item)
            other = known.setdefault(path, item.path)
            if other != item.path:
                raise UsageError(f"{other} and {item.path} would both have the text file {path}: rename one of them")
            if not self.overwrite and path.is_file():
                self._finished[item.id] = Finished(None, False, False)
        if self.folder is None:
            for folder in {path.parent for path in known}:
                _check_writable(folder)
        return self._finished

    def _create_folder(self, folder: Path) -> None:
        if folder.exists() and not folder.is_dir():
            raise UsageError(
                f"--out {folder} is a file: text files need a folder, or - for the folders of the pictures"
            )
        if not folder.parent.is_dir():
            raise UsageError(f"--out {folder}: no folder {folder.parent}: create it first")
        with explain_write(folder):
            folder.mkdir(exist_ok=True)
        _check_writable(folder)

    def begin(self, retry_errors: bool) -> None:
        """See `Output`. Removes what a killed job left of files that it was writing; errors left nothing behind."""
        for folder in {path.parent for path in self._known}:
            for part in folder.glob(f".*{SIDECAR_SUFFIX}.*.part"):
                if folder / part.name[1:].rsplit(".", 2)[0] in self._known:
                    part.unlink(missing_ok=True)

    def write(self, rows: Sequence[Row], items: Sequence[Item] = ()) -> None:
        for row, item in zip(rows, items, strict=True):
            if row["error"] is None:
                path = self.sidecar(item)
                with explain_write(path):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with atomic_write(path) as part:
                        part.write_text(row["caption"], encoding="utf-8", newline="\n")
            self._finished[row["id"]] = Finished.of(row)

    def close(self, ids: Collection[str], *, complete: bool) -> JobSummary | None:
        return JobSummary.of(self._finished[ident] for ident in ids if ident in self._finished) if complete else None


def _check_writable(folder: Path) -> None:
    if folder.is_dir() and not os.access(folder, os.W_OK):
        raise OutputError(folder, PermissionError(errno.EACCES, f"folder {folder} is read-only"))


def _media_files(paths: Sequence[str]) -> Iterator[str]:
    """Pictures and clips that paths name by themselves, by their folders or by globs."""
    for name in paths:
        if os.path.isdir(name):
            found: Iterable[str] = (os.path.join(folder, file) for folder, _, files in os.walk(name) for file in files)
        else:
            found = [name] if os.path.exists(name) else glob.iglob(name, recursive=True)
        yield from (file for file in found if os.path.splitext(file)[1].lower() in MEDIA_SUFFIXES)
