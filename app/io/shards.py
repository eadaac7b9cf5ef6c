"""Rows in a folder of numbered shards, each complete and never changed again: `ShardedOutput`.

How a shard is written says a subclass. Rows are durable before their shard is complete, so a
killed job is resumed row by row. Of a job of several processes each has its own shards; nothing is merged.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from mmspec.app.errors import UsageError
from mmspec.app.io import jsonl
from mmspec.app.io.item import Item
from mmspec.app.io.job_metadata import check_settings
from mmspec.app.io.jsonl import Row
from mmspec.app.io.output import JobSummary, Output, OutputJob, make_output_folder

METADATA_NAME = "_mmspec.meta.json"
"""Readers of a folder of Parquet files pass over names that begin with an underscore or a dot."""
LOCK_NAME = ".mmspec.lock"
ERRORS_SUFFIX = ".errors.jsonl"
"""Of the file of the rows without a caption, beside a shard that cannot hold them."""
ROWS_PER_SHARD = 1000
BYTES_PER_SHARD = 1 << 30


class ShardedOutput(Output):
    """Rows to `FOLDER/part-RANK-NUMBER.SUFFIX`, with the settings of the job beside them.

    Attributes:
        suffix: of a complete shard.
        open_suffix: of one that grows.
    """

    suffix: str
    open_suffix: str

    def __init__(self, folder: Path, job: OutputJob, rows_per_shard: int = ROWS_PER_SHARD) -> None:
        super().__init__(folder, folder, job)
        self.metadata_path = folder / METADATA_NAME
        self.rows_per_shard = rows_per_shard
        self._growing = folder
        self._num_rows = 0
        self._created = False

    def _rows(self, shard: Path) -> Iterator[Row]:
        """The rows of a shard: of one that grows without what a kill has torn, of others the columns that are read."""
        raise NotImplementedError

    def _repair(self, growing: Path) -> None:
        """Cut off what a kill has torn, if it stays in the complete shard."""

    def _append(self, file: BinaryIO, rows: Sequence[Row], items: Sequence[Item]) -> None:
        """Add rows to a growing shard, durably."""

    def _seal(self, growing: Path, final: Path) -> None:
        """Turn a growing shard into a complete one; at any moment there is the one or the other, or both alike."""

    def _drop_errors(self, shard: Path) -> None:
        """Remove the rows with an error from a complete shard."""

    def own_files(self) -> list[Path]:
        shards = [*self._shards(), *self._all_growing()] if self.base.is_dir() else []
        return [self.metadata_path, self.options_path, *shards]

    def _shards(self) -> list[Path]:
        return self._matching(rf"part-\d{{5}}-\d{{5,}}{re.escape(self.suffix)}")

    def _all_growing(self) -> list[Path]:
        return self._matching(rf"\.open-\d{{5}}-\d{{5,}}{re.escape(self.open_suffix)}")

    def _matching(self, pattern: str) -> list[Path]:
        return sorted(file for file in self.base.iterdir() if re.fullmatch(pattern, file.name))

    def _final(self, growing: Path) -> Path:
        stem = growing.name.removeprefix(".open-").removesuffix(self.open_suffix)
        return self.base / f"part-{stem}{self.suffix}"

    def _claim(self) -> None:
        self._created = make_output_folder(self.base, "shards need a folder, or use --format jsonl")
        self._take_lock(LOCK_NAME, shared=self.job.world_size > 1)
        self._take_lock(f"{LOCK_NAME}.{self.job.rank:05d}")  # against two processes of one rank

    def _take_lock(self, name: str, shared: bool = False) -> None:
        self._locks.append((self.base / name).open("a+b"))
        jsonl.lock_file(self._locks[-1], shared=shared)

    def _existing(self) -> None:
        shards, growing = self._shards(), self._all_growing()
        others = [f for f in self.base.iterdir() if f.suffix == self.suffix and f not in shards]
        if others and not self.metadata_path.exists():
            raise UsageError(f"{self.base} holds {others[0].name}, which no caption job wrote: use another --out")
        if shards or growing or self.metadata_path.exists():
            check_settings(self.metadata_path, self.job.settings, self.base)
        for file in growing:
            with suppress(FileNotFoundError):  # completed by its process at this moment: a shard below
                deque(map(self._add, self._rows(file)), maxlen=0)
        deque(map(self._add, chain.from_iterable(map(self._rows, self._shards()))), maxlen=0)

    def _is_mine(self, growing: Path) -> bool:
        """Whether no other process of this job writes that shard: rank 0 takes what is left of a larger job."""
        rank, world_size = int(growing.name.split("-")[1]), self.job.world_size
        return rank == self.job.rank or (self.job.rank == 0 and rank >= world_size) or world_size == 1

    def _discard(self) -> None:
        suffixes = (self.suffix, self.open_suffix, ERRORS_SUFFIX)
        for file in self._matching(rf"(part|\.open)-\d{{5}}-\d{{5,}}({'|'.join(map(re.escape, suffixes))})"):
            file.unlink(missing_ok=True)

    def _prepare(self, retry_errors: bool) -> None:
        for file in self._all_growing():  # of a job that was killed
            if self._is_mine(file):
                self._complete(file)
        if retry_errors and self.job.world_size == 1:
            for shard in self._shards():
                self._drop_errors(shard)

    def _complete(self, growing: Path) -> None:
        final = self._final(growing)
        self._repair(growing)
        if final.exists() or next(self._rows(growing), None) is None:  # completed before it was killed; or empty
            growing.unlink()
        else:
            self._seal(growing, final)
            jsonl.sync_folder(self.base)

    def _write(self, rows: Sequence[Row], items: Sequence[Item]) -> None:
        if self._file is None:
            numbers = [int(file.stem.split("-")[2]) for file in self._shards() if self._is_mine(file)]
            name = f".open-{self.job.rank:05d}-{max(numbers, default=-1) + 1:05d}{self.open_suffix}"
            self._growing, self._num_rows = self.base / name, 0
            self._file = self._growing.open("xb")
        self._append(self._file, rows, items)
        self._num_rows += len(rows)
        if self._num_rows >= self.rows_per_shard or self._file.tell() >= BYTES_PER_SHARD:
            self._end_shard()

    def _end_shard(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            self._complete(self._growing)

    def _finish(self, ids: Collection[str], complete: bool) -> JobSummary | None:
        self._end_shard()
        if complete and self.job.world_size > 1:
            self._existing()  # what the others have written
        return self._summary(ids) if complete else None

    def _release(self) -> None:
        super()._release()
        if self._created and all(file.name.startswith(LOCK_NAME) for file in self.base.iterdir()):
            for file in self.base.iterdir():
                file.unlink()
            os.rmdir(os.path.realpath(self.base))
