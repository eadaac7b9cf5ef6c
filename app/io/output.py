"""Where the rows of a job go: one file, one file per rank merged at the end, or standard output.

A job is resumed from what its files hold; they are not changed before `begin`. Knows rows and settings, no models.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from mmspec.app.errors import WRITE_ERRORS, OutputError, UsageError, explain_write
from mmspec.app.io import jsonl
from mmspec.app.io.jsonl import Row

Settings = Mapping[str, Any]


class Output(Protocol):
    """What a job needs of the place where it writes."""

    base: Path
    """The folder that file names in the rows are relative to."""

    def own_files(self) -> list[Path]:
        """Files that belong to the output and are therefore never inputs."""

    def open(self) -> dict[str, Row]:
        """Check that it can be written and fits the settings; the rows that are there, by id."""

    def begin(self, drop: Callable[[Row], bool]) -> None:
        """Make ready for writing, forgetting the rows that `drop` says."""

    def write(self, rows: Sequence[Row]) -> None:
        """Add rows; on return they are safe."""

    def close(self, ids: Iterable[str], *, complete: bool) -> list[Row] | None:
        """Finish. The final rows of the whole job, or None if rows of `ids` are still to come from elsewhere."""


class StreamOutput:
    """Rows to standard output. Nothing to resume."""

    base = Path()

    def __init__(self, stream: BinaryIO | None = None) -> None:
        self.stream = stream if stream is not None else sys.stdout.buffer
        self._rows: list[Row] = []

    def own_files(self) -> list[Path]:
        return []

    def open(self) -> dict[str, Row]:
        return {}

    def begin(self, drop: Callable[[Row], bool]) -> None:
        pass

    def write(self, rows: Sequence[Row]) -> None:
        with explain_write("standard output"):
            self.stream.write(b"".join(map(jsonl.encode_row, rows)))
            self.stream.flush()
        self._rows += rows

    def close(self, ids: Iterable[str], *, complete: bool) -> list[Row] | None:
        return self._rows


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

    def _rank_file(self, rank: int) -> Path:
        return self.path.with_name(f"{self.path.stem}.rank{rank:05d}.jsonl")

    def _rank_files(self) -> list[Path]:
        pattern = re.compile(re.escape(self.path.stem) + r"\.rank\d{5}\.jsonl")
        return sorted(file for file in self.base.iterdir() if pattern.fullmatch(file.name))

    def own_files(self) -> list[Path]:
        return [self.path, self.metadata_path, *(self._rank_files() if self.base.is_dir() else ())]

    # open: look, change nothing

    def open(self) -> dict[str, Row]:
        try:
            self._claim()
            return {} if self.overwrite else self._existing()
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
            raise UsageError(f"--out {self.path}: no folder {self.base}: make it first")
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

    def _existing(self) -> dict[str, Row]:
        lines = 0
        rows: dict[str, Row] = {}
        for file in dict.fromkeys((self.path, *self._rank_files())):
            found, good = jsonl.read_rows(file)
            self._valid_bytes = good if file == self.rank_path else self._valid_bytes
            lines += len(found)
            for row in found:
                rows[row["id"]] = jsonl.prefer_caption(rows.get(row["id"]), row)
        self._needs_rewrite = lines > len(rows)
        if rows:
            self._check_settings()
        elif self.rank_path.stat().st_size > self._valid_bytes and not self.metadata_path.exists():
            raise UsageError(f"{self.rank_path} is not the output of a caption job: use another --out, or --overwrite")
        return rows

    def _check_settings(self) -> None:
        try:
            old = json.loads(self.metadata_path.read_text())["settings"]
        except FileNotFoundError:
            raise UsageError(
                f"{self.path} has rows but no {self.metadata_path.name} beside it: use another --out, or --overwrite"
            ) from None
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{self.metadata_path} is damaged: use another --out, or --overwrite") from None
        keys = sorted(set(old) | set(self.settings))
        odd = [key for key in keys if old.get(key) != self.settings.get(key)]
        if odd:
            told = ", ".join(f"{key} {old.get(key)!r} (now {self.settings.get(key)!r})" for key in odd)
            raise UsageError(
                f"{self.path} was written with {told}: use the same settings, another --out, or --overwrite"
            )

    # begin: from here on the files change

    def begin(self, drop: Callable[[Row], bool]) -> None:
        with explain_write(self.rank_path):
            self._begin(drop)

    def _begin(self, drop: Callable[[Row], bool]) -> None:
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
            self._drop_rows(drop)
        self._write_meta()

    def _drop_rows(self, drop: Callable[[Row], bool]) -> None:
        """Take the rows to be redone out of the file, so that it never holds two rows of one picture."""
        rows, _ = jsonl.read_rows(self.path)
        kept = [row for row in rows if not drop(row)]
        if len(kept) == len(rows):
            return
        self._needs_rewrite = True  # the new rows come last: sort at the end
        jsonl.replace_file(self.path, b"".join(map(jsonl.encode_row, kept)))
        self._release()
        self._file = jsonl.open_locked(self.path)

    def _write_meta(self) -> None:
        from mmspec.app.versions import mmspec_version

        text = json.dumps({"settings": dict(self.settings), "mmspec_version": mmspec_version()}, indent=2)
        try:
            same = json.loads(self.metadata_path.read_text())["settings"] == dict(self.settings)
        except (OSError, ValueError, KeyError, TypeError):
            same = False
        if not same:
            jsonl.replace_file(self.metadata_path, text.encode() + b"\n")
            self._wrote_metadata = True

    def write(self, rows: Sequence[Row]) -> None:
        assert self._file is not None
        with explain_write(self.rank_path):
            jsonl.append_rows(self._file, rows)

    # close: merge, if all is there

    def close(self, ids: Iterable[str], *, complete: bool) -> list[Row] | None:
        try:
            with explain_write(self.path):
                return self._finish(set(ids)) if complete else None
        finally:
            self._close_file()

    def _close_file(self) -> None:
        """Let go of the file; leave nothing half-done behind."""
        self._release()
        if self._created and self.rank_path.exists() and self.rank_path.stat().st_size == 0:
            self.rank_path.unlink()
            if self._wrote_metadata and self.world_size == 1:
                self.metadata_path.unlink(missing_ok=True)

    def _finish(self, ids: set[str]) -> list[Row] | None:
        with self.metadata_path.open("rb") as guard:  # one rank at a time
            jsonl.lock_file(guard, wait=True)
            if self.world_size > 1:
                self._release()
            ranks = self._rank_files()
            if any(jsonl.is_locked(file) for file in ranks):
                return None
            rows: dict[str, Row] = {}
            for file in (self.path, *ranks):
                for row in jsonl.read_rows(file)[0]:
                    rows[row["id"]] = jsonl.prefer_caption(rows.get(row["id"]), row)
            if not ids <= rows.keys():
                return None
            final = sorted(rows.values(), key=lambda row: row.get("index", 0))
            if ranks or self._needs_rewrite:
                jsonl.replace_file(self.path, b"".join(map(jsonl.encode_row, final)))
            for file in ranks:
                file.unlink()
            return [row for row in final if row["id"] in ids]

    def _release(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # bytes that could not be written before: reported by then
                self._file.close()
            self._file = None


__all__ = ["FileOutput", "Output", "StreamOutput"]
