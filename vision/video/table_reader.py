"""Rows of Parquet files and Arrow streams as plain values, for the process that decodes files.

It is given a function that reads ranges of the file, and opens nothing. What pyarrow makes of a file is validated in
full before a value is taken from it: offsets may lead out of the data, into what else the process holds.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

MAX_BATCH_ROWS = 64
"""Rows that are decoded at a time, and rows of an answer that has bytes."""
BATCH_BYTES = 32 << 20
"""Fewer rows are decoded at a time where a part of the file has more; an answer ends when it has as many."""
MAX_VALUE_BYTES = 256 << 20
"""Largest value of a cell."""
MAX_LIST_VALUES = 1024
"""Values of a list that are read; more pictures than that are refused anyway."""
MAX_VALUE_DEPTH = 8
"""Lists and structs in each other."""
SHORT_BYTES = 1 << 16
"""Texts and numbers of rows that are read together, which are not looked at one by one."""
SHORT_ROWS = 1024
"""Rows of an answer that has such texts and numbers only."""
INLINE_CHARS = 1024
"""Longer texts follow the header of an answer, as bytes do."""
_BINARY = ("is_binary", "is_large_binary", "is_fixed_size_binary", "is_binary_view")
_TEXT = ("is_string", "is_large_string", "is_string_view")
_LISTS = ("is_list", "is_large_list", "is_fixed_size_list", "is_list_view", "is_large_list_view")
_PLAIN = ("is_boolean", "is_integer", "is_floating")


class _RangeFile(io.RawIOBase):
    """A file of which ranges can be read."""

    def __init__(self, size: int, read_range: Callable[[int, int], bytes]) -> None:
        self._size, self._read_range, self._place = size, read_range, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = max(0, offset + (0, self._place, self._size)[whence])
        return self._place

    def tell(self) -> int:
        return self._place

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._place)
        size = left if size < 0 else min(size, left)
        data = self._read_range(self._place, size) if size else b""
        self._place += len(data)
        return data


class TableReader:
    """An open table.

    Args:
        kind: "parquet", or "arrow" for the stream format.
        size: Bytes of the file.
        read_range: Returns bytes of the file, from their start and number.

    Attributes:
        columns: Their names.
        group_rows: Rows of each row group; None for a stream.

    Raises:
        Exception: What pyarrow raises for a damaged file.
    """

    def __init__(self, kind: str, size: int, read_range: Callable[[int, int], bytes]) -> None:
        file = _RangeFile(size, read_range)
        self._parquet: Any = None
        self._stream: Any = None
        self.group_rows: list[int] | None = None
        if kind == "parquet":
            self._parquet = pq.ParquetFile(file, memory_map=False, buffer_size=1 << 20)
            metadata = self._parquet.metadata
            self.columns = list(self._parquet.schema_arrow.names)
            self.group_rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        else:
            self._stream = pa.ipc.open_stream(file)
            self.columns = list(self._stream.schema.names)
        self._rows: Iterator[list[Any]] = iter(())
        self._parts: list[bytes] = []
        self._is_short = False

    def group_bytes(self, group: int, columns: Sequence[str]) -> int:
        """Uncompressed bytes of columns of a row group, as its header states them."""
        metadata = self._parquet.metadata.row_group(group)
        parts = map(metadata.column, range(metadata.num_columns))
        return sum(part.total_uncompressed_size for part in parts if part.path_in_schema.split(".")[0] in columns)

    def start(self, group: int | None, columns: Sequence[str]) -> None:
        """Begin with the rows of a group, or of the stream."""
        batches: Iterable[pa.RecordBatch] = self._stream
        if group is not None:
            # One value of a dictionary may stand in every row: no row is taken to be smaller than the whole part.
            fitting = BATCH_BYTES // max(1, self.group_bytes(group, columns))
            batches = self._parquet.iter_batches(
                batch_size=min(MAX_BATCH_ROWS, max(1, fitting)),
                row_groups=[group],
                columns=list(columns),
                use_threads=False,
            )
        self._rows = self._all_rows(batches, columns)

    def next_rows(self) -> tuple[dict[str, Any], list[bytes]]:
        """Some rows, at least one if there is one: the header of an answer, and its bytes."""
        rows: list[list[Any]] = []
        self._parts, ended = [], True
        for row in self._rows:
            rows.append(row)
            most = SHORT_ROWS if self._is_short else MAX_BATCH_ROWS
            if len(rows) >= most or sum(map(len, self._parts)) >= BATCH_BYTES:
                ended = False
                break
        return {"rows": rows, "sizes": list(map(len, self._parts)), "ended": ended}, self._parts

    def _all_rows(self, batches: Iterable[pa.RecordBatch], columns: Sequence[str]) -> Iterator[list[Any]]:
        for batch in batches:
            arrays = [batch.column(batch.schema.names.index(name)) for name in columns]
            sound = [_fault(array) is None for array in arrays]
            short = [  # names and numbers as they are: a tenth of the time
                array.to_pylist() if ok and array.nbytes <= SHORT_BYTES and _is(array.type, _TEXT + _PLAIN) else None
                for array, ok in zip(arrays, sound, strict=True)
            ]
            self._is_short = None not in short
            for number in range(batch.num_rows):
                yield [
                    self._cell(array, number, is_sound) if texts is None else texts[number]
                    for array, is_sound, texts in zip(arrays, sound, short, strict=True)
                ]

    def _cell(self, array: pa.Array, number: int, is_sound: bool) -> Any:
        fault = None if is_sound else _fault(array.slice(number, 1))
        return {"error": ["Unreadable", fault]} if fault is not None else self._encode(array[number])

    def _encode(self, value: Any, depth: int = 0) -> Any:
        """A value for an answer: as JSON, but an object is {"struct": its fields}, {"bytes": number of the part},
        {"text": number of the part} or {"error": [kind, message]}."""
        if isinstance(value, pa.ExtensionScalar | pa.DictionaryScalar):
            value = value.value
        if value is None or not value.is_valid:
            return None
        if _is(value.type, _BINARY) or _is(value.type, _TEXT):
            data = value.as_buffer()
            if data.size > MAX_VALUE_BYTES:
                return {"error": ["TooLarge", f"{data.size} bytes; the limit is {MAX_VALUE_BYTES} bytes"]}
            if _is(value.type, _TEXT) and data.size <= INLINE_CHARS:
                return value.as_py()
            self._parts.append(data.to_pybytes())
            return {"text" if _is(value.type, _TEXT) else "bytes": len(self._parts) - 1}
        if depth < MAX_VALUE_DEPTH and _is(value.type, _LISTS):
            return [self._encode(one, depth + 1) for one in value.values[:MAX_LIST_VALUES]]
        if depth < MAX_VALUE_DEPTH and pa.types.is_struct(value.type):
            names = [value.type.field(place).name for place in range(value.type.num_fields)]
            return {"struct": {name: self._encode(value[place], depth + 1) for place, name in enumerate(names)}}
        return value.as_py() if _is(value.type, _PLAIN) else {"error": ["BadCell", str(value.type)[:100]]}


def _is(kind: pa.DataType, tests: Sequence[str]) -> bool:
    return any(getattr(pa.types, name)(kind) for name in tests if hasattr(pa.types, name))


def _fault(array: pa.Array) -> str | None:
    """What is wrong with an array: offsets beyond its data, or text that is not UTF-8; None if it is sound."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid as error:
        return str(error)
    return None
