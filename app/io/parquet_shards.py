"""Captions as Parquet shards: a JSONL file while a shard grows, one Parquet file when it is complete."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from mmspec.app.io import jsonl
from mmspec.app.io.item import Item
from mmspec.app.io.jsonl import Row
from mmspec.app.io.output import Finished
from mmspec.app.io.tables import needs_extra
from mmspec.files import atomic_write

ROWS_PER_GROUP = 10_000
STATE_COLUMNS = ["id", "prompt_sha1", "error", "identical", "gen"]
"""Columns that a resumed job reads."""


class ParquetShards:
    """The columns are those of the JSON lines."""

    suffix, open_suffix = ".parquet", ".jsonl"

    def __init__(self) -> None:
        with needs_extra("--format parquet"):
            import pyarrow
            import pyarrow.parquet
        self._pa, self._pq = pyarrow, pyarrow.parquet

    def schema(self) -> Any:
        """The columns and their types."""
        text, integer, real, boolean = self._pa.string(), self._pa.int64(), self._pa.float64(), self._pa.bool_()
        settings = {"max_new_tokens": integer, "temperature": real, "seed": integer, "stop": self._pa.list_(text),
                    "batch_size": integer, "dtype": text}  # fmt: skip
        columns = dict.fromkeys(("id", "file_name", "caption", "model", "drafter", "prompt_sha1"), text)
        columns |= {"gen": self._struct(settings)}
        columns |= dict.fromkeys(("n_prompt_tokens", "n_new_tokens", "n_rounds"), integer)
        columns |= dict.fromkeys(("tau", "ttft_s", "seconds"), real)
        columns |= {"finish_reason": text, "identical": boolean, "plain": text}
        columns |= {"error": self._struct({"type": text, "message": text}), "mmspec_version": text, "index": integer}
        return self._pa.schema(list(columns.items()))

    def _struct(self, fields: dict[str, Any]) -> Any:
        return self._pa.struct(list(fields.items()))

    def rows(self, growing: Path) -> list[Row]:
        return jsonl.read_rows(growing)[0]

    def repair(self, growing: Path) -> None:
        pass  # a torn last line is not read, and nothing is added to a shard of an earlier run

    def append(self, file: BinaryIO, rows: Sequence[Row], items: Sequence[Item]) -> Sequence[Row]:
        jsonl.append_rows(file, rows)
        return rows

    def complete(self, growing: Path, final: Path) -> None:
        self._write(self._pa.Table.from_pylist(jsonl.read_rows(growing)[0], schema=self.schema()), final)
        growing.unlink()

    def _write(self, table: Any, path: Path) -> None:
        with atomic_write(path) as part:
            self._pq.write_table(table, part, row_group_size=ROWS_PER_GROUP)

    def finished(self, shard: Path) -> Iterator[tuple[str, Finished]]:
        with self._pq.ParquetFile(shard) as file:
            for batch in file.iter_batches(columns=STATE_COLUMNS):
                for row in batch.to_pylist():
                    yield row["id"], Finished.of(row)

    def drop_errors(self, shard: Path) -> None:
        table = self._pq.read_table(shard, schema=self.schema())
        good = table.filter(table["error"].is_null())
        if not good.num_rows:
            shard.unlink()
        elif good.num_rows < table.num_rows:
            self._write(good, shard)


__all__ = ["ParquetShards"]
