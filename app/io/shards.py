"""Rows in a folder of numbered shards, each complete and never changed again: `ShardedOutput`.

How a shard is written is a `ShardFormat`: a new one is one class. Rows are durable before their shard is complete, so a
killed job is resumed row by row. Of a job of several processes each has its own shards; nothing is merged.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from mmspec.app.errors import UsageError, explain_write
from mmspec.app.io import jsonl
from mmspec.app.io.item import Item
from mmspec.app.io.job_metadata import Settings, check_settings
from mmspec.app.io.jsonl import Row
from mmspec.app.io.output import Finished, JobSummary, ResumableOutput, make_output_folder

METADATA_NAME = "_mmspec.meta.json"
"""Readers of a folder of Parquet files pass over names that begin with an underscore or a dot."""
LOCK_NAME = ".mmspec.lock"
ERRORS_SUFFIX = ".errors.jsonl"
"""Of the file of the rows without a caption, beside a shard that cannot hold them."""
ROWS_PER_SHARD = 1000
BYTES_PER_SHARD = 1 << 30


class ShardFormat(Protocol):
    """How the rows of a shard are stored, while it grows and when it is complete."""

    suffix: str
    open_suffix: str

    def rows(self, growing: Path) -> list[Row]:
        """The rows of a growing shard, without what a kill has torn at its end. Changes nothing."""

    def repair(self, growing: Path) -> None:
        """Cut off what a kill has torn."""

    def append(self, file: BinaryIO, rows: Sequence[Row], items: Sequence[Item]) -> Sequence[Row]:
        """Add rows to a growing shard, durably; returns them as they were written."""

    def complete(self, growing: Path, final: Path) -> None:
        """Turn a growing shard into a complete one; at any moment there is the one or the other, or both alike."""

    def finished(self, shard: Path) -> Iterator[tuple[str, Finished]]:
        """Id and state of the rows of a complete shard."""

    def drop_errors(self, shard: Path) -> None:
        """Remove the rows with an error from a complete shard."""


class ShardedOutput(ResumableOutput):
    """Rows to `FOLDER/part-RANK-NUMBER.SUFFIX`, with the settings of the job beside them."""

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        shard_format: ShardFormat,
        *,
        rank: int = 0,
        world_size: int = 1,
        overwrite: bool = False,
        rows_per_shard: int = ROWS_PER_SHARD,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(folder, folder / METADATA_NAME, settings, rank, world_size, overwrite, options)
        self.base, self.format, self.rows_per_shard = folder, shard_format, rows_per_shard
        self._locks: list[BinaryIO] = []
        self._file: BinaryIO | None = None
        self._growing: Path | None = None
        self._num_rows = 0
        self._created = False

    def own_files(self) -> list[Path]:
        return (
            [self.metadata_path, self.options_path, *self._shards(), *self._all_growing()] if self.base.is_dir() else []
        )

    def _shards(self) -> list[Path]:
        return self._matching(rf"part-\d{{5}}-\d{{5,}}{re.escape(self.format.suffix)}")

    def _all_growing(self) -> list[Path]:
        return self._matching(rf"\.open-\d{{5}}-\d{{5,}}{re.escape(self.format.open_suffix)}")

    def _matching(self, pattern: str) -> list[Path]:
        return sorted(file for file in self.base.iterdir() if re.fullmatch(pattern, file.name))

    def _final(self, growing: Path) -> Path:
        stem = growing.name.removeprefix(".open-").removesuffix(self.format.open_suffix)
        return self.base / f"part-{stem}{self.format.suffix}"

    def _claim(self) -> None:
        self._created = make_output_folder(self.base, "shards need a folder, or use --format jsonl")
        self._take_lock(LOCK_NAME, shared=self.world_size > 1)
        self._take_lock(f"{LOCK_NAME}.{self.rank:05d}")  # against two processes of one rank

    def _take_lock(self, name: str, shared: bool = False) -> None:
        self._locks.append((self.base / name).open("a+b"))
        jsonl.lock_file(self._locks[-1], shared=shared)

    def _existing(self) -> None:
        shards, growing = self._shards(), self._all_growing()
        others = [f for f in self.base.iterdir() if f.suffix == self.format.suffix and f not in shards]
        if others and not self.metadata_path.exists():
            raise UsageError(f"{self.base} holds {others[0].name}, which no caption job wrote: use another --out")
        if shards or growing or self.metadata_path.exists():
            check_settings(self.metadata_path, self.settings, self.base)
        for shard in shards:
            self._add_complete(shard)
        for file in growing:
            try:
                for row in self.format.rows(file):
                    self._add(row["id"], Finished.of(row))
            except FileNotFoundError:  # completed by its process at this moment
                self._add_complete(self._final(file))

    def _add_complete(self, shard: Path) -> None:
        for ident, row in self.format.finished(shard):
            self._add(ident, row)

    def _is_mine(self, growing: Path) -> bool:
        """Whether no other process of this job writes that shard: rank 0 takes what is left of a larger job."""
        rank = int(growing.name.split("-")[1])
        return rank == self.rank or (self.rank == 0 and rank >= self.world_size) or self.world_size == 1

    def _discard(self) -> None:
        suffixes = (self.format.suffix, self.format.open_suffix, ERRORS_SUFFIX)
        for file in self._matching(rf"(part|\.open)-\d{{5}}-\d{{5,}}({'|'.join(map(re.escape, suffixes))})"):
            file.unlink(missing_ok=True)

    def _prepare(self, retry_errors: bool) -> None:
        for file in self._all_growing():  # of a job that was killed
            if self._is_mine(file):
                self._complete(file)
        if retry_errors and self.world_size == 1:
            for shard in self._shards():
                self.format.drop_errors(shard)

    def _complete(self, growing: Path) -> None:
        final = self._final(growing)
        self.format.repair(growing)
        if final.exists() or not self.format.rows(growing):  # completed before it was killed; or empty
            growing.unlink()
        else:
            self.format.complete(growing, final)
            jsonl.sync_folder(self.base)

    def write(self, rows: Sequence[Row], items: Sequence[Item] = ()) -> None:
        with explain_write(self.base):
            if self._file is None:
                numbers = [int(file.stem.split("-")[2]) for file in self._shards() if self._is_mine(file)]
                name = f".open-{self.rank:05d}-{max(numbers, default=-1) + 1:05d}{self.format.open_suffix}"
                self._growing, self._num_rows = self.base / name, 0
                self._file = self._growing.open("xb")
            written = self.format.append(self._file, rows, items)
            self._num_rows += len(written)
            for row in written:
                self._add(row["id"], Finished.of(row))
            if self._num_rows >= self.rows_per_shard or self._file.tell() >= BYTES_PER_SHARD:
                self._end_shard()

    def _end_shard(self) -> None:
        if self._file is not None and self._growing is not None:
            self._file.close()
            self._file = None
            self._complete(self._growing)

    def _finish(self, ids: Collection[str], complete: bool) -> JobSummary | None:
        self._end_shard()
        if complete and self.world_size > 1:
            self._existing()  # what the others have written
        return self._summary(ids) if complete else None

    def _release(self) -> None:
        for handle in (self._file, *self._locks):
            if handle is not None:
                with suppress(OSError):
                    handle.close()
        self._file, self._locks = None, []
        if self._created and all(file.name.startswith(LOCK_NAME) for file in self.base.iterdir()):
            for file in self.base.iterdir():
                file.unlink()
            os.rmdir(os.path.realpath(self.base))
