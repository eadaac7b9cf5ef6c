"""Captions as Parquet shards: a JSONL file while a shard grows, one Parquet file when it is complete."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from mmspec.app.io import jsonl
from mmspec.app.io.columns import COMPARED_COLUMNS, ROW_COLUMNS, STATE_COLUMNS, Column, ScalarKind
from mmspec.app.io.item import Item
from mmspec.app.io.jsonl import Row
from mmspec.app.io.output import OutputJob
from mmspec.app.io.shards import ShardedOutput
from mmspec.app.io.tables import needs_extra
from mmspec.files import atomic_write

ROWS_PER_GROUP = 10_000


class ParquetShards(ShardedOutput):
    """The columns are those of the JSON lines."""

    suffix, open_suffix = ".parquet", ".jsonl"

    def __init__(
        self, folder: Path, job: OutputJob, rows_per_shard: int, columns: Sequence[str], added: Mapping[str, ScalarKind]
    ) -> None:
        """For rows with these columns, of which some are of the job's own."""
        super().__init__(folder, job, rows_per_shard)
        with needs_extra("--format parquet"):
            import pyarrow
            import pyarrow.parquet
        self._pa, self._pq, self._columns = pyarrow, pyarrow.parquet, tuple(columns)
        self._kinds = {**ROW_COLUMNS, **added}

    def schema(self) -> Any:
        """The columns and their types."""
        return self._pa.schema([(name, self._type(self._kinds[name])) for name in self._columns])

    def _type(self, column: Column) -> Any:
        if isinstance(column, Mapping):
            return self._pa.struct([(name, self._type(kind)) for name, kind in column.items()])
        text = self._pa.string()
        types = {"text": text, "texts": self._pa.list_(text), "integer": self._pa.int64(), "real": self._pa.float64()}
        return types.get(column) or self._pa.bool_()

    def _rows(self, shard: Path) -> Iterator[Row]:
        if shard.suffix == self.open_suffix:
            yield from jsonl.read_rows(shard)[0]
            return
        with self._pq.ParquetFile(shard) as file:
            jsonl.check_row_columns(dict.fromkeys(file.schema_arrow.names), str(shard))
            names = [name for name in (*STATE_COLUMNS, *COMPARED_COLUMNS) if name in file.schema_arrow.names]
            for batch in file.iter_batches(columns=names):
                yield from batch.to_pylist()

    def _append(self, file: BinaryIO, rows: Sequence[Row], items: Sequence[Item]) -> None:
        jsonl.append_rows(file, rows)

    def _seal(self, growing: Path, final: Path) -> None:
        self._write_table(self._pa.Table.from_pylist(jsonl.read_rows(growing)[0], schema=self.schema()), final)
        growing.unlink()

    def _write_table(self, table: Any, path: Path) -> None:
        with atomic_write(path) as part:
            self._pq.write_table(table, part, row_group_size=ROWS_PER_GROUP)

    def _drop_errors(self, shard: Path) -> None:
        table = self._pq.read_table(shard)
        good = table.filter(table["error"].is_null())
        if not good.num_rows:
            shard.unlink()
        elif good.num_rows < table.num_rows:
            self._write_table(good, shard)
