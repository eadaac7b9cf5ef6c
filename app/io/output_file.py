"""Rows of a job in one file, or first in one file per rank: `FileOutput`."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from mmspec.app.errors import UsageError
from mmspec.app.io import jsonl
from mmspec.app.io.item import Item
from mmspec.app.io.job_metadata import check_settings
from mmspec.app.io.jsonl import Row
from mmspec.app.io.output import JobSummary, Output, OutputJob
from mmspec.files import short_name


def job_name(path: Path, suffix: str) -> str:
    """How the names of the files beside an output begin: two outputs in a folder never share one."""
    return path.stem if path.suffix == suffix else path.name if path.suffix else f"{path.name}.file"


class FileOutput(Output):
    """Rows to `path`; with several ranks first to a file each, which the last rank to finish merges.

    Beside `NAME.jsonl` stand `NAME.meta.json` (the settings, so that a resumed job cannot mix two kinds of captions)
    and, until they are merged, `NAME.rank00000.jsonl` and so on. A link stays one: all of this is where it leads.
    """

    def __init__(self, path: Path, job: OutputJob) -> None:
        self.path = Path(os.path.realpath(path)) if path.is_symlink() else path
        super().__init__(path, self.path.parent, job)  # what rows are relative to, by whatever name the file is given
        self._stem = job_name(self.path, ".jsonl")
        self.metadata_path = self.path.with_name(f"{self._stem}.meta.json")
        own = self.path.with_name(f"{self._stem}.rank{job.rank:05d}.jsonl")
        self.rank_path = self.path if job.world_size == 1 else own
        self._created = self._needs_rewrite = False
        self._valid_bytes = 0
        self._last_index = -1

    def _rank_files(self) -> list[Path]:
        pattern = re.compile(re.escape(self._stem) + r"\.rank\d{5}\.jsonl")
        return sorted(file for file in self.base.iterdir() if pattern.fullmatch(file.name))

    def own_files(self) -> list[Path]:
        ranks = self._rank_files() if self.base.is_dir() else ()
        return [self.path, self.metadata_path, self.options_path, *ranks]

    def _claim(self) -> None:
        if self.path.exists() and not self.path.is_file():
            kind = (
                "a folder: name a file in it" if self.path.is_dir() else "not a regular file: name one, or - for stdout"
            )
            raise UsageError(f"--out {self.out} is {kind}")
        if not self.base.is_dir():
            raise UsageError(f"--out {self.out}: no folder {self.base}: create it first")
        self._created = not self.rank_path.exists()
        self._file = jsonl.open_locked(self.rank_path)
        others = [file for file in (self.path, *self._rank_files()) if self.job.world_size == 1 or file == self.path]
        if any(jsonl.is_locked(file) for file in others if file != self.rank_path):
            raise BlockingIOError

    def _existing(self) -> None:
        lines = 0
        for file in dict.fromkeys((self.path, *self._rank_files())):
            for row, _, end in jsonl.iter_rows(file):
                self._valid_bytes = end if file == self.rank_path else self._valid_bytes
                lines += 1
                self._add(row)
        self._needs_rewrite = self._needs_rewrite or lines > len(self._finished)
        if self._finished:
            check_settings(self.metadata_path, self.job.settings, self.out)
        elif self.rank_path.stat().st_size > self._valid_bytes and not self.metadata_path.exists():
            raise UsageError(f"{self.rank_path} is not the output of a caption job: use another --out, or --overwrite")

    def _add(self, row: Row) -> bool:
        if not super()._add(row):
            return False
        index = row.get("index", 0)
        self._needs_rewrite = self._needs_rewrite or index < self._last_index
        self._last_index = index
        return True

    def _discard(self) -> None:
        assert self._file is not None
        self._file.truncate(0)
        for file in self._rank_files():
            file.unlink(missing_ok=True)

    def _prepare(self, retry_errors: bool) -> None:
        assert self._file is not None
        jsonl.truncate_torn_line(self._file, self._valid_bytes)
        if self.job.world_size == 1:
            for file in (self.path, self.metadata_path, self.options_path):  # of a job that was killed while replacing
                for part in self.base.glob(f".{glob.escape(short_name(file.name))}.{'?' * 8}.part"):
                    part.unlink(missing_ok=True)
            if retry_errors:
                self._drop_errors()

    def _drop_errors(self) -> None:
        """Remove the rows to be repeated from the file, so that it never holds two rows of one id."""
        if not any(row.has_error for row in self._finished.values()):
            return
        self._needs_rewrite = True  # the new rows come last: sort at the end
        found = list(jsonl.iter_rows(self.path))
        lines = [(self.path, start, end) for row, start, end in found if not row["error"]]
        jsonl.copy_lines(self.path, lines)
        super()._release()
        self._file = jsonl.open_locked(self.path)

    def _write(self, rows: Sequence[Row], items: Sequence[Item]) -> None:
        assert self._file is not None
        jsonl.append_rows(self._file, rows)

    # the end: merge, if all is there

    def _finish(self, ids: Collection[str], complete: bool) -> JobSummary | None:
        if not complete:
            return None
        with self.metadata_path.open("rb") as guard:  # one rank at a time
            jsonl.lock_file(guard, wait=True)
            if self.job.world_size > 1:
                super()._release()
            ranks = self._rank_files()
            if any(jsonl.is_locked(file) for file in ranks):
                return None
            if ranks or self._needs_rewrite:
                lines = self._merged_lines(ranks)
                if not all(ident in self._finished for ident in ids):
                    return None
                jsonl.copy_lines(self.path, lines)
            for file in ranks:
                file.unlink()
            return self._summary(ids)

    def _merged_lines(self, ranks: Sequence[Path]) -> list[tuple[Path, int, int]]:
        """Where the rows of all files are, in the order of the input, one for each id."""
        self._finished = {}
        places: dict[str, tuple[int, Path, int, int]] = {}
        for file in (self.path, *ranks):
            for row, start, end in jsonl.iter_rows(file):
                if self._add(row):
                    places[row["id"]] = row.get("index", 0), file, start, end
        return [(file, start, end) for _, file, start, end in sorted(places.values(), key=lambda one: one[0])]

    def _release(self) -> None:
        super()._release()
        if self._created and self.rank_path.exists() and self.rank_path.stat().st_size == 0:
            self.rank_path.unlink()
            if self._wrote_metadata and self.job.world_size == 1:
                self.metadata_path.unlink(missing_ok=True)
                self.options_path.unlink(missing_ok=True)
