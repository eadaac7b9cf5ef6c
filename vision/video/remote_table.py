"""A table that is open in a worker process (`mmspec.vision.video.table_reader`): its rows, as plain values.

The worker asks for ranges of the file, which this process has opened: it opens none itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mmspec.vision.video.deadline import Deadline
from mmspec.vision.video.decoder_pool import DecoderPool, RemoteFile

TABLE_TIMEOUT_S = 60.0
"""Seconds until the next rows of a table, at most `table_reader.MAX_BATCH_ROWS`."""
MAX_ANSWER_BYTES = 1 << 30
"""Largest answer: several pictures of the largest size in one row."""


@dataclass(frozen=True, slots=True)
class BadValue:
    """A cell that is no picture, text or number, or that cannot be read.

    Attributes:
        kind: As of an `ImageError`.
        message: Why; of kind "BadCell" the type.
    """

    kind: str
    message: str


class RemoteTable(RemoteFile):
    """An open table of kind "parquet" or "arrow". Close it.

    Args:
        pool: Of workers; this table has one for itself.
        size: Bytes of the file.
        read_range: Returns bytes of the file, from their start and number.

    Attributes:
        num_bytes: Bytes of the file.
        columns: Their names.
        group_rows: Rows of each row group of Parquet; None for an Arrow stream.

    Raises:
        ImportError: pyarrow is not installed.
        MemoryError: The worker's memory does not suffice.
        DecoderCrashedError: The worker crashed; also raised by the methods.
        DecoderHungError: It timed out.
        RuntimeError: The file is damaged.
    """

    def __init__(self, pool: DecoderPool, kind: str, size: int, read_range: Callable[[int, int], bytes]) -> None:
        super().__init__(pool)
        self.num_bytes, self._read_range = size, read_range
        with self._opening():
            found, _ = self._ask({"op": "table", "kind": kind, "size": size}, "columns", "group_rows")
            self.columns: list[str] = found["columns"]
            self.group_rows: list[int] | None = found["group_rows"]

    @property
    def is_alive(self) -> bool:
        """Whether more can be read."""
        return self.worker.is_alive

    def group_bytes(self, group: int, columns: Sequence[str]) -> int:
        """Uncompressed bytes of columns of a row group, as its header states them."""
        header = {"op": "group_bytes", "group": group, "columns": list(columns)}
        return int(self._ask(header, "bytes")[0]["bytes"])

    def rows(self, columns: Sequence[str], group: int | None = None) -> Iterator[list[Any]]:
        """The values of `columns` in each row of a group or of the stream; a `BadValue` for what cannot be one."""
        header: dict[str, Any] = {"op": "rows", "group": group, "columns": list(columns)}
        ended = False
        while not ended:
            answer, data = self._ask(header, "rows", "sizes", "ended")
            parts, start = list[bytes](), 0
            for size in answer["sizes"]:
                parts.append(data[start : start + size])
                start += size
            for row in answer["rows"]:
                yield [_decode(value, parts) for value in row]
            header, ended = {"op": "more"}, bool(answer["ended"])

    def _ask(self, header: dict[str, Any], *keys: str) -> tuple[dict[str, Any], bytes]:
        def check(answer: dict[str, Any]) -> tuple[int, int]:
            sizes = [int(size) for size in answer.get("sizes", ())]
            if sum(sizes) > MAX_ANSWER_BYTES or min(sizes, default=0) < 0:
                raise ValueError(f"an answer has at most {MAX_ANSWER_BYTES} bytes; got {sum(sizes)}.")
            if set(keys) - set(answer):
                raise ValueError(f"an answer needs the keys {', '.join(keys)}; got {', '.join(answer)}.")
            return 1, sum(sizes)

        deadline = Deadline(min(self._pool.timeout_s, TABLE_TIMEOUT_S))
        found, parts = self.worker.request(header, deadline, check, read_range=self._read_range)
        return found, b"".join(parts)

    def __enter__(self) -> RemoteTable:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _decode(value: Any, parts: Sequence[bytes]) -> Any:
    """A value of an answer: see `TableReader._encode`."""
    if isinstance(value, list):
        return [_decode(one, parts) for one in value]
    if not isinstance(value, dict):
        return value
    if "struct" in value:
        return {name: _decode(one, parts) for name, one in value["struct"].items()}
    if "error" in value:
        return BadValue(*value["error"])
    return parts[value["bytes"]] if "bytes" in value else parts[value["text"]].decode("utf-8", "backslashreplace")
