"""Captions as text files, one for each picture: beside it, or under the same name in a folder.

A file that exists is a finished row, so that a job is resumed without any other state; a folder of them says whose they
are. Each is written whole or not at all, on one line: trainers take the first line alone (kohya's scripts), or each
line for a caption (OneTrainer). Rows with an error have none, and are repeated by the next run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from mmspec.app.caption.progress import print_stderr
from mmspec.app.errors import UsageError, explain_write
from mmspec.app.io import jsonl
from mmspec.app.io.cells import relative_name, short_repr
from mmspec.app.io.content import Unreadable
from mmspec.app.io.inputs import find_sources
from mmspec.app.io.item import Item, SourceOptions
from mmspec.app.io.jsonl import Row
from mmspec.app.io.manifests import is_manifest
from mmspec.app.io.output import Finished, JobSummary, Output, OutputJob, check_writable_folder, make_output_folder
from mmspec.app.io.sources import FileSource
from mmspec.files import atomic_write, short_name
from mmspec.vision.video.containers import open_regular_file

JOB_SUFFIX = ".job"
"""Of the hidden file beside the first text file of a job that runs, which is its lock; its settings are beside that."""
PICTURES_FILE = ".pictures"
"""In a folder of text files: of each, in a line of JSON, its path and that of its picture from there."""


class SidecarOutput(Output):
    """`photo.txt` for `photo.jpg`. The settings of a job are kept while it runs, so that `overwrite` is continued."""

    def __init__(
        self,
        folder: Path | None,
        paths: Sequence[str],
        items: Callable[[], Iterable[Item]],
        job: OutputJob | None = None,
        *,
        suffix: str = ".txt",
        shard: tuple[int, int] | None = None,
    ) -> None:
        """Set up; nothing is read.

        Args:
            folder: of the files; None: each beside its picture.
            paths: the inputs, as given.
            items: lists the rows, as `Inputs.rows`.
            suffix: of the files.
            shard: (I, N): of every N rows the Ith is this job's, and no other job's at the same time; None: nothing is
                claimed, others may write the same files.
        """
        super().__init__(folder or Path("-"), folder or Path(), job or OutputJob())
        self.folder, self._paths, self._items, self.suffix, self._shard = folder, paths, items, suffix, shard
        self._rows: dict[Path, Item] = {}
        self._lock_path = self.base

    def own_files(self) -> list[Path]:
        """Files that could be taken for lists of pictures: those beside the pictures that the paths name."""
        if self.folder is not None:
            return []
        sources = (source for name in self._paths for source in find_sources(name, SourceOptions(), set()))
        named = (one for one in sources if isinstance(one, FileSource) and not is_manifest(Path(one.name)))
        beside = (item.path.with_suffix(self.suffix) for source in named for item in source.rows(lambda ident: False))
        return [path for path in beside if path.is_file()]

    def sidecar(self, item: Item) -> Path:
        """The file of a row."""
        if self.folder is None:
            return item.path.with_suffix(self.suffix)
        path = os.path.abspath(item.path)
        roots = [os.path.abspath(name) for name in self._paths if os.path.isdir(name)]
        root = next((root for root in roots if path.startswith(root.rstrip(os.sep) + os.sep)), os.path.dirname(path))
        return (self.folder / os.path.relpath(path, root)).with_suffix(self.suffix)

    def _claim(self) -> None:
        """Take the lock of the job, which its first text file names.

        Raises:
            UsageError: rows that are no files, two pictures with one text file, or another job that writes them.
            OutputError: a folder that cannot be written.
        """
        if self.folder is not None:
            with explain_write(self.folder):
                make_output_folder(self.folder, "text files need a folder, or - for the folders of the pictures")
        self._rows = self._find_rows()
        for folder in {path.parent for path in self._rows} if self.folder is None else {self.folder}:
            check_writable_folder(folder, folder)
        for path in self._rows:
            if path.exists() and not path.is_file():
                raise UsageError(f"the text file {path} cannot be written: a folder or pipe has its name")
        self._check_pictures()
        own = self._own()
        first = (own or list(self._rows))[0]
        end = "" if own or self._shard is None else f".{self._shard[0]}"
        self._lock_path = first.with_name(f".{short_name(first.name)}{end}{JOB_SUFFIX}")
        self.metadata_path = self._lock_path.with_name(f"{self._lock_path.name}.json")
        if self._shard is None:
            return
        try:
            with explain_write(self._lock_path):
                first.parent.mkdir(parents=True, exist_ok=True)
                self._locks = [jsonl.open_locked(self._lock_path)]
        except BlockingIOError:
            raise UsageError(
                f"another job is writing {first} and other text files: wait for it, or start several with --shard I/N"
            ) from None

    def _own(self) -> list[Path]:
        """The text files of this job."""
        first, step = self._shard or (0, 1)
        return [path for path, item in self._rows.items() if item.index % step == first]

    def _existing(self) -> None:
        """A row is finished if its file exists; where `overwrite` is continued, if it was written since that began."""
        began = self.metadata_path.stat().st_mtime_ns if self.job.overwrite else None
        for path, item in self._rows.items():
            if path.is_file() and (began is None or path.stat().st_mtime_ns > began):
                self._finished[item.id] = Finished(None, False, False)

    def _names(self, path: Path, item: Item) -> list[str]:
        """A line of `PICTURES_FILE`."""
        return [relative_name(one, self.base) for one in (path, item.path)]

    def _check_pictures(self) -> None:
        """Refuse rows whose text files exist and are known to be of other pictures.

        Raises:
            UsageError: there is one.
        """
        if self.folder is None or self.job.overwrite or not (file := self.folder / PICTURES_FILE).is_file():
            return
        known: dict[str, str] = {}
        for line in file.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, TypeError, RecursionError):  # torn by a kill
                name, picture = json.loads(line)
                known[name] = picture
        for path, item in self._rows.items():
            name, picture = self._names(path, item)
            if known.get(name, picture) != picture and path.is_file():
                raise UsageError(
                    f"{short_repr(name)} in {self.folder} is the caption of {short_repr(known[name])}, not of "
                    f"{short_repr(picture)}: use another --out, or --overwrite"
                )

    def _find_rows(self) -> dict[Path, Item]:
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

    def _prepare(self, retry_errors: bool) -> None:
        """Remove what a killed job left of files that it was writing; errors left nothing behind."""
        if not self._locks:
            return
        written = {path.with_name(short_name(path.name)) for path in self._own()}
        for folder in {path.parent for path in written}:
            for part in folder.glob(f".*{self.suffix}.*.part"):
                if folder / part.name[1:].rsplit(".", 2)[0] in written:
                    part.unlink(missing_ok=True)

    def _write(self, rows: Sequence[Row], items: Sequence[Item]) -> None:
        for row, item in zip(rows, items, strict=True):
            if not row["error"]:
                path = self.sidecar(item)
                with explain_write(path):
                    if self.folder is None and item.below is not None:
                        os.close(open_regular_file(item.below))  # no link has come to be on the way to it
                    path.parent.mkdir(parents=True, exist_ok=True)
                    if self.job.overwrite or not path.exists():  # what somebody wrote meanwhile is left alone as well
                        if self.folder is not None:
                            with (self.folder / PICTURES_FILE).open("a", encoding="utf-8") as pictures:
                                pictures.write(f"\n{json.dumps(self._names(path, item))}")
                        with atomic_write(path) as part:
                            part.write_text(on_one_line(row["caption"]), encoding="utf-8", newline="\n")

    def _finish(self, ids: Collection[str], complete: bool) -> JobSummary | None:
        """Also forget the job, but one with `overwrite` that was stopped: it is continued."""
        if complete or not self.job.overwrite:
            for path in (self.metadata_path, self._lock_path):
                path.unlink(missing_ok=True)
        return super()._finish(ids, complete)


def on_one_line(caption: str) -> str:
    """The caption without line breaks, each of which becomes a space."""
    return " ".join(filter(None, map(str.strip, caption.splitlines()))) if len(caption.splitlines()) > 1 else caption
