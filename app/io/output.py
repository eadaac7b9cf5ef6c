"""Destinations of the rows of a job: one file, one file per rank merged at the end, or standard output.

A job is resumed from its files; they do not change before `begin`. Knows rows and settings, no models.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

from mmspec.app.errors import WRITE_ERRORS, OutputError, UsageError, explain_write
from mmspec.app.io import jsonl
from mmspec.app.io.item import Item
from mmspec.app.io.job_metadata import Settings, check_settings, write_settings
from mmspec.app.io.jsonl import Row


class Finished(NamedTuple):
    """What a job has to know of a row that exists.

    Attributes:
        prompt_sha1: identifies its prompt; None if that is not known, and any is taken for it.
        has_error: it holds an error instead of a caption.
        differs: it was compared with plain `generate` in float32 and is not identical.
    """

    prompt_sha1: str | None
    has_error: bool
    differs: bool

    @classmethod
    def of(cls, row: Row) -> Finished:
        """The same of a row."""
        half = ("bfloat16", "float16")
        differs = row.get("identical") is False and row["gen"]["dtype"] not in half
        return _shared(cls(row["prompt_sha1"], bool(row["error"]), differs))


@lru_cache(maxsize=1024)
def _shared(finished: Finished) -> Finished:
    """One object for equal values: a job of a million rows has few different ones."""
    return finished


@dataclass(frozen=True)
class JobSummary:
    """The rows of a whole job: their number, those with an error, those that differ from plain `generate`."""

    num_rows: int
    num_errors: int
    num_different: int

    @staticmethod
    def of(finished: Iterable[Finished]) -> JobSummary:
        """Count them."""
        counts = Counter(finished)
        return JobSummary(
            counts.total(),
            sum(n for one, n in counts.items() if one.has_error),
            sum(n for one, n in counts.items() if one.differs),
        )


class Output(Protocol):
    """What a job needs of its destination (a sink). A new output format is one class with these methods."""

    base: Path
    """The folder that file names in the rows are relative to."""

    def own_files(self) -> list[Path]:
        """Files of the output, which are never inputs."""

    def open(self) -> Mapping[str, Finished]:
        """Check that it is writable and fits the settings; returns the existing rows by id."""

    def begin(self, retry_errors: bool) -> None:
        """Prepare for writing; discard the rows with an error if `retry_errors`."""

    def write(self, rows: Sequence[Row], items: Sequence[Item] = ()) -> None:
        """Append rows; on return they are durable. `items` are the inputs that they are about, in the same order."""

    def close(self, ids: Collection[str], *, complete: bool) -> JobSummary | None:
        """Finish; returns a summary of the rows of `ids`, or None if another rank has yet to write some of them."""


class StreamOutput:
    """Rows to standard output. Nothing to resume."""

    base = Path()

    def __init__(self, stream: BinaryIO | None = None) -> None:
        self.stream = stream if stream is not None else sys.stdout.buffer
        self._finished: list[Finished] = []

    def own_files(self) -> list[Path]:
        return []

    def open(self) -> Mapping[str, Finished]:
        return {}

    def begin(self, retry_errors: bool) -> None:
        pass

    def write(self, rows: Sequence[Row], items: Sequence[Item] = ()) -> None:
        with explain_write("standard output"):
            self.stream.write(b"".join(map(jsonl.encode_row, rows)))
            self.stream.flush()
        self._finished += map(Finished.of, rows)

    def close(self, ids: Collection[str], *, complete: bool) -> JobSummary | None:
        return JobSummary.of(self._finished)


class FileOutput:
    """Rows to `path`; with several ranks first to a file each, which the last rank to finish merges.

    Beside `NAME.jsonl` stand `NAME.meta.json` (the settings, so that a resumed job cannot mix two kinds of captions)
    and, until they are merged, `NAME.rank00000.jsonl` and so on.
    """

    def __init__(
        self, path: Path, settings: Settings, *, rank: int = 0, world_size: int = 1, overwrite: bool = False
    ) -> None:
        if overwrite and world_size > 1:
            raise UsageError(f"--overwrite is for one process: remove {path} and its .rank*.jsonl files instead")
        self.path, self.settings, self.world_size, self.overwrite = path, settings, world_size, overwrite
        self.base = path.parent
        self.metadata_path = path.with_name(f"{path.stem}.meta.json")
        self.rank_path = path if world_size == 1 else self._rank_file(rank)
        self._file: BinaryIO | None = None
        self._created = self._wrote_metadata = self._needs_rewrite = False
        self._valid_bytes = 0
        self._finished: dict[str, Finished] = {}
        self._last_index = -1

    def _rank_file(self, rank: int) -> Path:
        return self.path.with_name(f"{self.path.stem}.rank{rank:05d}.jsonl")

    def _rank_files(self) -> list[Path]:
        pattern = re.compile(re.escape(self.path.stem) + r"\.rank\d{5}\.jsonl")
        return sorted(file for file in self.base.iterdir() if pattern.fullmatch(file.name))

    def own_files(self) -> list[Path]:
        return [self.path, self.metadata_path, *(self._rank_files() if self.base.is_dir() else ())]

    # open: look, change nothing

    def open(self) -> Mapping[str, Finished]:
        try:
            self._claim()
            if not self.overwrite:
                self._existing()
            return self._finished
        except BaseException:
            self._close_file()
            raise

    def _claim(self) -> None:
        if self.path.exists() and not self.path.is_file():
            kind = (
                "a folder: name a file in it" if self.path.is_dir() else "not a regular file: name one, or - for stdout"
            )
            raise UsageError(f"--out {self.path} is {kind}")
        if not self.base.is_dir():
            raise UsageError(f"--out {self.path}: no folder {self.base}: create it first")
        self._created = not self.rank_path.exists()
        try:
            self._file = jsonl.open_locked(self.rank_path)
            others = [file for file in (self.path, *self._rank_files()) if self.world_size == 1 or file == self.path]
            if any(jsonl.is_locked(file) for file in others if file != self.rank_path):
                raise BlockingIOError
        except BlockingIOError:
            raise UsageError(f"another job is writing to {self.path}: wait for it, or use another --out") from None
        except OSError as error:
            if error.errno in WRITE_ERRORS:
                raise OutputError(f"--out {self.rank_path}", error) from error
            raise UsageError(f"cannot write --out {self.rank_path}: {error.strerror}") from error
        if not os.access(self.base, os.W_OK):
            raise OutputError(f"--out {self.path}", PermissionError(errno.EACCES, f"folder {self.base} is read-only"))

    def _existing(self) -> None:
        lines = 0
        for file in dict.fromkeys((self.path, *self._rank_files())):
            for row, end in jsonl.iter_rows(file):
                self._valid_bytes = end if file == self.rank_path else self._valid_bytes
                lines += 1
                self._add(row)
        self._needs_rewrite = self._needs_rewrite or lines > len(self._finished)
        if self._finished:
            check_settings(self.metadata_path, self.settings, self.path)
        elif self.rank_path.stat().st_size > self._valid_bytes and not self.metadata_path.exists():
            raise UsageError(f"{self.rank_path} is not the output of a caption job: use another --out, or --overwrite")

    def _add(self, row: Row) -> bool:
        """Remember a row, but of two of one id a caption rather than an error; returns whether it was taken."""
        old, new = self._finished.get(row["id"]), Finished.of(row)
        if old is not None and new.has_error and not old.has_error:
            return False
        self._finished[row["id"]] = new
        index = row.get("index", 0)
        self._needs_rewrite = self._needs_rewrite or index < self._last_index
        self._last_index = index
        return True

    # begin: from here on the files change

    def begin(self, retry_errors: bool) -> None:
        with explain_write(self.rank_path):
            self._begin(retry_errors)

    def _begin(self, retry_errors: bool) -> None:
        assert self._file is not None
        if self.overwrite:
            self._file.truncate(0)
            for file in (*self._rank_files(), self.metadata_path):
                file.unlink(missing_ok=True)
        else:
            jsonl.truncate_torn_line(self._file, self._valid_bytes)
        if self.world_size == 1:
            for part in self.base.glob(f".{self.path.stem}.*.part"):  # of a job that was killed while replacing a file
                part.unlink(missing_ok=True)
            if retry_errors:
                self._drop_errors()
        self._wrote_metadata = write_settings(self.metadata_path, self.settings)

    def _drop_errors(self) -> None:
        """Remove the rows to be repeated from the file, so that it never holds two rows of one id."""
        if not any(row.has_error for row in self._finished.values()):
            return
        self._needs_rewrite = True  # the new rows come last: sort at the end
        lines, start = [], 0
        for row, end in jsonl.iter_rows(self.path):
            if not row["error"]:
                lines.append((self.path, start, end))
            start = end
        jsonl.copy_lines(self.path, lines)
        self._release()
        self._file = jsonl.open_locked(self.path)

    def write(self, rows: Sequence[Row], items: Sequence[Item] = ()) -> None:
        assert self._file is not None
        with explain_write(self.rank_path):
            jsonl.append_rows(self._file, rows)
        for row in rows:
            self._add(row)

    # close: merge, if all is there

    def close(self, ids: Collection[str], *, complete: bool) -> JobSummary | None:
        try:
            with explain_write(self.path):
                return self._finish(ids) if complete else None
        finally:
            self._close_file()

    def _close_file(self) -> None:
        """Close the file; remove it if it was created and is empty."""
        self._release()
        if self._created and self.rank_path.exists() and self.rank_path.stat().st_size == 0:
            self.rank_path.unlink()
            if self._wrote_metadata and self.world_size == 1:
                self.metadata_path.unlink(missing_ok=True)

    def _finish(self, ids: Collection[str]) -> JobSummary | None:
        with self.metadata_path.open("rb") as guard:  # one rank at a time
            jsonl.lock_file(guard, wait=True)
            if self.world_size > 1:
                self._release()
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
            missing = sum(ident not in self._finished for ident in ids)
            return None if missing else JobSummary.of(self._finished[ident] for ident in ids)

    def _merged_lines(self, ranks: Sequence[Path]) -> list[tuple[Path, int, int]]:
        """Where the rows of all files are, in the order of the input, one for each id."""
        self._finished = {}
        places: dict[str, tuple[int, Path, int, int]] = {}
        for file in (self.path, *ranks):
            start = 0
            for row, end in jsonl.iter_rows(file):
                if self._add(row):
                    places[row["id"]] = row.get("index", 0), file, start, end
                start = end
        return [(file, start, end) for _, file, start, end in sorted(places.values(), key=lambda one: one[0])]

    def _release(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # bytes that could not be written before: reported by then
                self._file.close()
            self._file = None
