"""Rows as a table for Excel and pandas: CSV, made from a file of JSON lines, which is what a job is resumed from."""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.app.errors import UsageError, explain_write
from mmspec.app.io import jsonl
from mmspec.app.io.output import JobSummary, OutputJob
from mmspec.app.io.output_file import FileOutput, job_name
from mmspec.files import atomic_write

ROWS_SUFFIX = ".rows.jsonl"


class CsvOutput(FileOutput):
    """`NAME.csv`, replaced whole when a run ends or is stopped; the rows are in `NAME.rows.jsonl`.

    With a byte order mark, without which Excel takes the text for another encoding. Structs are JSON in their cell.
    """

    def __init__(self, path: Path, job: OutputJob, columns: Sequence[str]) -> None:
        super().__init__(path.with_name(f"{job_name(path, '.csv')}{ROWS_SUFFIX}"), job)
        self.table, self._columns = path, columns

    def own_files(self) -> list[Path]:
        return [*super().own_files(), self.table]

    def _claim(self) -> None:
        if self.table.is_dir():
            raise UsageError(f"--out {self.table} is a folder: name a file in it")
        super()._claim()
        if self.table.exists() and not self.metadata_path.exists() and not self.job.overwrite:
            raise UsageError(f"{self.table} is not the output of a caption job: use another --out, or --overwrite")

    def close(self, ids: Collection[str], *, complete: bool) -> JobSummary | None:
        """As `Output.close`; writes the table."""
        wrote = self.metadata_path.exists()
        summary = super().close(ids, complete=complete)
        if wrote and self.path.exists() and not self._rank_files():
            with (
                explain_write(self.table),
                atomic_write(self.table) as part,
                part.open("w", encoding="utf-8-sig", newline="", errors="backslashreplace") as stream,
            ):
                table = csv.writer(stream)
                table.writerow(self._columns)
                for row, *_ in jsonl.iter_rows(self.path):
                    table.writerow([_cell(row.get(name)) for name in self._columns])
        return summary


def _cell(value: Any) -> Any:
    if isinstance(value, Mapping):
        return json.dumps(value, ensure_ascii=False) if value else ""
    return value
