"""Captions as text files, one for each picture: beside it, or under the same name in a folder.

A file that exists is a finished row, so that a job is resumed without any other state; a folder of them says whose they
are. Each is written whole or not at all, on one line: trainers take the first line alone (kohya's scripts), or each
line for a caption (OneTrainer). Rows with an error have none, and are repeated by the next run.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from mmspec.app.caption.progress import print_stderr
from mmspec.app.errors import UsageError, explain_write
from mmspec.app.io import jsonl
from mmspec.app.io.cells import MEDIA_SUFFIXES, relative_name, short_repr
from mmspec.app.io.content import Unreadable
from mmspec.app.io.item import Item
from mmspec.app.io.job_metadata import Settings, is_overwriting, write_settings
from mmspec.app.io.jsonl import Row
from mmspec.app.io.output import Finished, JobSummary, check_writable_folder, make_output_folder
from mmspec.files import atomic_write, short_name
from mmspec.vision.video.containers import open_regular_file

JOB_SUFFIX = ".job"
"""Of the hidden file beside the first text file of a job that runs: its lock; with --overwrite also its settings."""
PICTURES_FILE = ".pictures"
"""In a folder of text files: of each, in a line of JSON, its path and that of its picture from there."""


class SidecarOutput:
    """`photo.txt` for `photo.jpg`."""

    def __init__(
        self,
        folder: Path | None,
        paths: Sequence[str],
        items: Callable[[], Iterable[Item]],
        *,
        suffix: str = ".txt",
        overwrite: bool = False,
        shard: tuple[int, int] | None = None,
        settings: Settings | None = None,
    ) -> None:
        """Set up; nothing is read.

        Args:
            folder: of the files; None: each beside its picture.
            paths: the inputs, as given.
            items: lists the rows, as `Inputs.rows`.
            suffix: of the files.
            overwrite: existing files are replaced, each when its new caption is there.
            shard: (I, N): of every N rows the Ith is this job's, and no other job's at the same time; None: nothing
                is claimed, others may write the same files.
            settings: with these a job with `overwrite` that was stopped is continued.
        """
        self.folder, self.base, self._paths, self._items = folder, folder or Path(), paths, items
        self.suffix, self.overwrite, self._shard, self._settings = suffix, overwrite, shard, settings or {}
        self._finished: dict[str, Finished] = {}
        self._own: set[Path] = set()  # text files of this job
        self._job_file: Path | None = None
        self._lock: BinaryIO | None = None

    def own_files(self) -> list[Path]:
        """Files that could be taken for lists of pictures: those beside the pictures that the paths name."""
        if self.folder is not None:
            return []
        beside = (Path(os.path.splitext(name)[0] + self.suffix) for name in _media_files(self._paths))
        return [path for path in beside if path.is_file()]

    def sidecar(self, item: Item) -> Path:
        """The file of a row."""
        if self.folder is None:
            return item.path.with_suffix(self.suffix)
        path = os.path.abspath(item.path)
        roots = [os.path.abspath(name) for name in self._paths if os.path.isdir(name)]
        root = next((root for root in roots if path.startswith(root.rstrip(os.sep) + os.sep)), os.path.dirname(path))
        return (self.folder / os.path.relpath(path, root)).with_suffix(self.suffix)

    def open(self) -> Mapping[str, Finished]:
        """See `Output`. Finished rows are those whose file exists.

        Raises:
            UsageError: rows that are no files, two pictures with one text file, or another job that writes them.
            OutputError: a folder that cannot be written.
        """
        if self.folder is not None:
            with explain_write(self.folder):
                make_output_folder(self.folder, "text files need a folder, or - for the folders of the pictures")
            check_writable_folder(self.folder, self.folder)
        rows = self._rows()
        first, step = self._shard or (0, 1)
        own = [path for path in rows if rows[path].index % step == first]
        self._own = set(own)
        if self.folder is None:
            for folder in {path.parent for path in rows}:
                check_writable_folder(folder, folder)
        for path in rows:
            if path.exists() and not path.is_file():
                raise UsageError(f"the text file {path} cannot be written: a folder or pipe has its name")
        self._check_pictures(rows)
        replaced_after = self._claim(own[0]) if self._shard is not None and own else None
        for path, item in rows.items():
            if path.is_file() and (not self.overwrite or _is_newer(path, replaced_after)):
                self._finished[item.id] = Finished(None, False, False)
        return self._finished

    def _names(self, path: Path, item: Item) -> list[str]:
        """A line of `PICTURES_FILE`."""
        return [relative_name(one, self.base) for one in (path, item.path)]

    def _check_pictures(self, rows: Mapping[Path, Item]) -> None:
        """Refuse rows whose text files exist and are known to be of other pictures.

        Raises:
            UsageError: there is one.
        """
        if self.folder is None or self.overwrite or not (file := self.folder / PICTURES_FILE).is_file():
            return
        known: dict[str, str] = {}
        for line in file.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, TypeError, RecursionError):  # torn by a kill
                name, picture = json.loads(line)
                known[name] = picture
        for path, item in rows.items():
            name, picture = self._names(path, item)
            if known.get(name, picture) != picture and path.is_file():
                raise UsageError(
                    f"{short_repr(name)} in {self.folder} is the caption of {short_repr(known[name])}, not of "
                    f"{short_repr(picture)}: use another --out, or --overwrite"
                )

    def _rows(self) -> dict[Path, Item]:
        """The row of each text file; of a photo and its clip (a Live Photo) that of the photo."""
        rows: dict[Path, Item] = {}
        clips: list[Item] = []
        for item in self._items():
            if item.content is not None and not isinstance(item.content, Unreadable):
                raise UsageError(
                    f"--format {self.suffix[1:]} is for files; {item.id[:80]!r} is a row of a table or archive: use "
                    "--format jsonl, parquet or webdataset"
                )
            path = self.sidecar(item)
            other = rows.setdefault(path, item)
            if other.path == item.path:
                if other.id == item.id:
                    continue
                raise UsageError(
                    f"the rows {short_repr(other.id)} and {short_repr(item.id)} about {item.path} would both have the "
                    f"text file {path}: use --format jsonl"
                )
            if other.is_video == item.is_video:
                raise UsageError(
                    f"{other.path} and {item.path} would both have the text file {path}: rename one of them"
                )
            clips.append(item if item.is_video else other)
            rows[path] = other if item.is_video else item
        for clip in clips:
            self._finished[clip.id] = Finished(None, False, False)
        if clips:
            print_stderr(
                f"mmspec: skipped {len(clips)} clip{'s'[: len(clips) > 1]} beside a picture of the same name (Live "
                f"Photos), as {clips[0].path.name}: the text file is the picture's"
            )
        return rows

    def _claim(self, first: Path) -> int | None:
        """Lock the job by its first text file; returns when one with `overwrite` began, in ns, if it was stopped."""
        self._job_file = first.with_name(f".{short_name(first.name)}{JOB_SUFFIX}")
        try:
            with explain_write(self._job_file):
                first.parent.mkdir(parents=True, exist_ok=True)
                self._lock = jsonl.open_locked(self._job_file)
        except BlockingIOError:
            raise UsageError(
                f"another job is writing {first} and other text files: wait for it, or start several with --shard I/N"
            ) from None
        continues = self.overwrite and is_overwriting(self._job_file, self._settings)
        return self._job_file.stat().st_mtime_ns if continues else None

    def begin(self, retry_errors: bool) -> None:
        """See `Output`. Removes what a killed job left of files that it was writing; errors left nothing behind."""
        if self._lock is None or self._job_file is None:
            return
        with explain_write(self._job_file):
            written = {path.with_name(short_name(path.name)) for path in self._own}
            for folder in {path.parent for path in written}:
                for part in folder.glob(f".*{self.suffix}.*.part"):
                    if folder / part.name[1:].rsplit(".", 2)[0] in written:
                        part.unlink(missing_ok=True)
            if self.overwrite and write_settings(self._job_file, self._settings, overwriting=True):
                self._lock.close()
                self._lock = jsonl.open_locked(self._job_file)

    def write(self, rows: Sequence[Row], items: Sequence[Item] = ()) -> None:
        for row, item in zip(rows, items, strict=True):
            if not row["error"]:
                path = self.sidecar(item)
                with explain_write(path):
                    if self.folder is None and item.below is not None:
                        os.close(open_regular_file(item.below))  # no link has come to be on the way to it
                    path.parent.mkdir(parents=True, exist_ok=True)
                    if self.overwrite or not path.exists():  # what somebody wrote meanwhile is left alone as well
                        if self.folder is not None:
                            with (self.folder / PICTURES_FILE).open("a", encoding="utf-8") as pictures:
                                pictures.write(f"\n{json.dumps(self._names(path, item))}")
                        with atomic_write(path) as part:
                            part.write_text(on_one_line(row["caption"]), encoding="utf-8", newline="\n")
            self._finished[row["id"]] = Finished.of(row)

    def close(self, ids: Collection[str], *, complete: bool) -> JobSummary | None:
        """See `Output`. A job with `overwrite` that was stopped leaves its file, to be continued."""
        if self._lock is not None and self._job_file is not None:
            if complete or not self.overwrite:
                self._job_file.unlink(missing_ok=True)
            self._lock.close()
            self._lock = None
        return JobSummary.of(self._finished[ident] for ident in ids if ident in self._finished) if complete else None


def on_one_line(caption: str) -> str:
    """The caption without line breaks, each of which becomes a space."""
    return " ".join(filter(None, map(str.strip, caption.splitlines()))) if len(caption.splitlines()) > 1 else caption


def _is_newer(path: Path, time_ns: int | None) -> bool:
    """Whether a file was written after that time."""
    return time_ns is not None and path.stat().st_mtime_ns > time_ns


def _media_files(paths: Sequence[str]) -> Iterator[str]:
    """Pictures and clips that paths name by themselves, by their folders or by globs."""
    for name in paths:
        if os.path.isdir(name):
            found: Iterable[str] = (os.path.join(folder, file) for folder, _, files in os.walk(name) for file in files)
        else:
            found = [name] if os.path.exists(name) else glob.iglob(name, recursive=True)
        yield from (file for file in found if os.path.splitext(file)[1].lower() in MEDIA_SUFFIXES)
