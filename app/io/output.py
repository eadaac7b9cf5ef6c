"""Destinations of the rows of a job: their one life cycle, and standard output.

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
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from mmspec.app.cli.options import to_toml
from mmspec.app.errors import WRITE_ERRORS, OutputError, UsageError, explain_write
from mmspec.app.io import jsonl
from mmspec.app.io.item import Item
from mmspec.app.io.job_metadata import Settings, is_overwriting, write_settings
from mmspec.app.io.jsonl import Row
from mmspec.app.io.text import escaped_values
from mmspec.messages import printable


def subject_hash(file_name: str) -> int:
    """Identifies, within this process, the file or table that a row is about."""
    return hash(re.sub(r"#\d+$", "", file_name))


class Finished(NamedTuple):
    """What a job has to know of a row that exists.

    Attributes:
        prompt_sha1: identifies its prompt; None if that is not known, and any is taken for it.
        has_error: it holds an error instead of a caption.
        differs: it was compared with plain `generate` in float32 and is not identical.
        subject: `subject_hash` of its file; None if its id says that.
        stamp: `file_stamp` of that; None if it is not known.
    """

    prompt_sha1: str | None
    has_error: bool
    differs: bool
    subject: int | None = None
    stamp: str | None = None

    @classmethod
    def of(cls, row: Row) -> Finished:
        """The same of a row."""
        half = ("bfloat16", "float16")
        differs = row.get("identical") is False and (row.get("gen") or {}).get("dtype") not in half
        name = row.get("file_name")
        subject = None if name in (None, row["id"]) else subject_hash(name)
        return _shared(cls(row["prompt_sha1"], bool(row["error"]), differs, subject, row.get("file_stamp")))


@lru_cache(maxsize=1024)
def _shared(finished: Finished) -> Finished:
    """One object for equal values: a job of a million rows of tables has few different ones."""
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


@dataclass(frozen=True)
class OutputJob:
    """The job that writes an output.

    Attributes:
        settings: what determines the captions; an output with others is refused.
        rank: of this process.
        world_size: processes that write the output together.
        overwrite: rows that exist are discarded, but not those of a job that did so and was stopped.
        options: written to a TOML file beside the settings, for `--config`.
    """

    settings: Settings = field(default_factory=dict)
    rank: int = 0
    world_size: int = 1
    overwrite: bool = False
    options: Mapping[str, Any] | None = None


class Output:
    """Where the rows of a job go (a sink): opened, begun, written to, closed. A new form of output is one class.

    `open` claims the files and reads what they hold, `begin` repairs and discards, `close` finishes and releases them.
    Subclasses say which files; what they do not define does nothing.

    Attributes:
        base: the folder that file names in the rows are relative to.
        metadata_path: the file of the settings.
        rank_path: where the rows of this process are until all processes have run.
    """

    metadata_path: Path

    def __init__(self, out: Path, base: Path, job: OutputJob) -> None:
        """Set up; nothing is read.

        Args:
            out: as the user names it, for messages.
        """
        if job.overwrite and job.world_size > 1:
            raise UsageError(f"--overwrite is for one process: remove {out} and the files beside it instead")
        self.out, self.rank_path, self.base, self.job = out, out, base, job
        self._finished: dict[str, Finished] = {}
        self._locks: list[BinaryIO] = []
        self._file: BinaryIO | None = None  # what rows are appended to
        self._discards = self._wrote_metadata = False

    @property
    def options_path(self) -> Path:
        """The TOML file of the options."""
        return self.metadata_path.with_name(f"{self.metadata_path.name.removesuffix('.meta.json')}.job.toml")

    def own_files(self) -> list[Path]:
        """Files of the output, which are never inputs."""
        return []

    def open(self) -> Mapping[str, Finished]:
        """Check that it is writable and fits the settings; changes nothing but locks.

        Returns:
            The rows that exist, by id.
        """
        try:
            try:
                self._claim()
            except BlockingIOError:
                raise UsageError(f"another job is writing to {self.out}: wait for it, or use another --out") from None
            except OSError as error:
                if error.errno in WRITE_ERRORS:
                    raise OutputError(f"--out {self.out}", error) from error
                raise UsageError(f"cannot write --out {self.out}: {error.strerror}") from error
            check_writable_folder(self.metadata_path.parent, f"--out {self.out}")
            self._discards = self.job.overwrite and not is_overwriting(self.metadata_path, self.job.settings)
            if not self._discards:
                self._existing()
            return self._finished
        except BaseException:
            self._release()
            raise

    def begin(self, retry_errors: bool) -> None:
        """Prepare for writing; discard the rows with an error if `retry_errors`. From here on the files change."""
        with explain_write(self.out):
            if self._discards:
                self._discard()
                self.metadata_path.unlink(missing_ok=True)
            self._prepare(retry_errors)
            self._wrote_metadata = write_settings(self.metadata_path, self.job.settings, self.job.overwrite)
            if self.job.options is not None and self.job.rank == 0:
                head = f"# mmspec caption --config {printable(self.options_path.name)}\n"
                jsonl.replace_file(self.options_path, f"{head}{to_toml(escaped_values(self.job.options))}".encode())

    def write(self, rows: Sequence[Row], items: Sequence[Item] = ()) -> None:
        """Append rows; on return they are durable. `items` are the inputs that they are about, in the same order."""
        with explain_write(self.rank_path):
            self._write(rows, items)
        for row in rows:
            self._add(row)

    def close(self, ids: Collection[str], *, complete: bool) -> JobSummary | None:
        """Finish; returns a summary of the rows of `ids`, or None if another rank has yet to write some of them."""
        try:
            with explain_write(self.out):
                summary = self._finish(ids, complete)
                if self.job.overwrite and complete and self.metadata_path.exists():
                    write_settings(self.metadata_path, self.job.settings)
                return summary
        finally:
            self._release()

    def _claim(self) -> None:
        """Take the locks; BlockingIOError if another job has them."""

    def _existing(self) -> None:
        """Add the rows that exist, and check their settings."""

    def _discard(self) -> None:
        """Remove them."""

    def _prepare(self, retry_errors: bool) -> None:
        """Repair what a kill has left; discard the rows with an error if `retry_errors`."""

    def _write(self, rows: Sequence[Row], items: Sequence[Item]) -> None:
        """See `write`."""

    def _finish(self, ids: Collection[str], complete: bool) -> JobSummary | None:
        """See `close`."""
        return self._summary(ids) if complete else None

    def _release(self) -> None:
        """Give back the locks; subclasses also remove what was created for nothing."""
        for handle in (self._file, *self._locks):
            if handle is not None:
                with suppress(OSError):  # bytes that could not be written before: reported by then
                    handle.close()
        self._file, self._locks = None, []

    def _add(self, row: Row) -> bool:
        """Remember a row, but of two of one id and file a caption rather than an error; returns whether it was taken.

        A later row about a file that was replaced counts, whatever it holds.
        """
        new, old = Finished.of(row), self._finished.get(row["id"])
        if old is not None and new.has_error and not old.has_error and old.stamp in (None, new.stamp):
            return False
        self._finished[row["id"]] = new
        return True

    def _summary(self, ids: Collection[str]) -> JobSummary | None:
        """Of the rows of `ids`; None if there is one missing."""
        if not all(ident in self._finished for ident in ids):
            return None
        return JobSummary.of(self._finished[ident] for ident in ids)


class StreamOutput(Output):
    """Rows to standard output. Nothing to resume."""

    def __init__(self, stream: BinaryIO | None = None) -> None:
        super().__init__(Path("-"), Path(), OutputJob())
        self.stream = stream if stream is not None else sys.stdout.buffer

    def open(self) -> Mapping[str, Finished]:
        return self._finished

    def begin(self, retry_errors: bool) -> None:
        pass

    def _write(self, rows: Sequence[Row], items: Sequence[Item]) -> None:
        with explain_write("standard output"):
            self.stream.write(b"".join(map(jsonl.encode_row, rows)))
            self.stream.flush()


def check_writable_folder(folder: Path, what: str | Path) -> None:
    """Refuse a folder in which nothing can be created.

    Raises:
        OutputError: it is one.
    """
    if folder.is_dir() and not os.access(folder, os.W_OK):
        raise OutputError(what, PermissionError(errno.EACCES, f"folder {folder} is read-only"))


def make_output_folder(folder: Path, why: str, flag: str = "--out") -> bool:
    """Create a folder, or where a link leads that has its name; returns whether it was not there.

    Args:
        why: a folder is needed, and what to do instead.
        flag: the option that names it.

    Raises:
        UsageError: it is a file, or its parent does not exist.
        OSError: it cannot be created.
    """
    if folder.is_dir():
        return False
    if folder.exists():
        raise UsageError(f"{flag} {folder} is a file: {why}")
    real = Path(os.path.realpath(folder))
    if not real.parent.is_dir():
        raise UsageError(
            f"{flag} {folder}: no folder {real.parent if folder.is_symlink() else folder.parent}: create it first"
        )
    real.mkdir(exist_ok=True)
    return True
