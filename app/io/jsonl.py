"""JSON lines that survive a kill at any moment: durable appends, atomic replacement, truncation of a torn last line.

Knows rows only as objects with an `id`. Locks are advisory and held by the open file: a killed process leaves none.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from mmspec.app.errors import UsageError
from mmspec.app.io.text import is_valid
from mmspec.files import atomic_write
from mmspec.files import sync_folder as sync_folder

try:
    import fcntl
except ImportError:  # Windows has no such module: two jobs on one file are not detected there
    fcntl = None  # type: ignore[assignment]

Row = dict[str, Any]
NEEDED = ("caption", "prompt_sha1", "error")
"""What a row of a caption job has besides its id, whatever columns were chosen."""


_KINDS = {"file_name": str, "index": int, "prompt_sha1": str, "gen": Mapping, "file_stamp": str}
"""What is in the columns that a resumed job reads, if they are there."""


def encode_row(row: Row) -> bytes:
    """One line of UTF-8; escaped as ASCII where a character could be read as a line break or is not valid Unicode.

    No error is `{}`, not `null`: readers that take types from the first rows then know an object.
    """
    if "error" in row and row["error"] is None:
        row = row | {"error": {}}
    text = json.dumps(row, ensure_ascii=False)
    if len(text.splitlines()) > 1 or not is_valid(text):
        text = json.dumps(row)
    return text.encode() + b"\n"


def iter_rows(path: Path) -> Iterator[tuple[Row, int, int]]:
    """The rows of `path` one by one, each with the places where it begins and ends. No file: no rows.

    A torn last line is left out.

    Raises:
        UsageError: a line in the middle is no row.
    """
    bad_line = start = end = 0
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for number, line in enumerate(file, 1):
            if bad_line:
                break
            end += len(line)
            row = parse_row(line)
            if row is not None:
                check_row_columns(row, f"{path} line {number}")
                yield row, start, end
                start = end
            elif line.strip():
                bad_line = number
        else:
            if not bad_line or not (line.endswith(b"\n") or _parse(line) is not None):
                return
    raise UsageError(f"{path} line {bad_line} is not a row of a caption job: repair or remove it, or --overwrite")


def check_row_columns(row: Mapping[str, Any], where: str) -> None:
    """Refuse a row that was edited, or is of another program.

    Raises:
        UsageError: it lacks a column that a job needs.
    """
    missing = [name for name in NEEDED if name not in row]
    missing += [f"valid {name}" for name, kind in _KINDS.items() if not isinstance(row.get(name), kind | None)]
    if missing:
        raise UsageError(
            f"{where} has no {' and no '.join(missing)}, so that it is no row of a caption job, or was edited: restore "
            "it, or use another --out"
        )


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def read_rows(path: Path) -> tuple[list[Row], int]:
    """The rows of `path` and their number of bytes, without a torn last line. No file: no rows."""
    found = list(iter_rows(path))
    return [row for row, *_ in found], found[-1][2] if found else 0


def parse_row(line: bytes) -> Row | None:
    """The row in a line; None if it holds none."""
    row = _parse(line)
    if not isinstance(row, dict) or not isinstance(row.get("id"), str):
        return None
    if row.get("error") == {}:
        row["error"] = None
    return row


def append_rows(file: BinaryIO, rows: Iterable[Row]) -> None:
    """Write rows at the end; on return they are on the disk."""
    file.write(b"".join(map(encode_row, rows)))
    file.flush()
    os.fsync(file.fileno())


def truncate_torn_line(file: BinaryIO, good: int) -> None:
    """Truncate to the first `good` bytes, ended by a line feed."""
    if file.seek(0, os.SEEK_END) > good:
        file.truncate(good)
    if good and os.pread(file.fileno(), 1, good - 1) != b"\n":
        file.write(b"\n")
    file.flush()
    os.fsync(file.fileno())


def copy_lines(path: Path, lines: Iterable[tuple[Path, int, int]]) -> None:
    """Replace `path` by lines of files, each given as (file, start, end); at any moment there is the old or the new.

    The files are read while the new one is written, so `path` may be one of them.
    """
    with ExitStack() as stack, atomic_write(path) as part:
        files: dict[Path, BinaryIO] = {}
        out = stack.enter_context(part.open("wb"))
        for source, start, end in lines:
            if source not in files:
                files[source] = stack.enter_context(source.open("rb"))
            files[source].seek(start)
            out.write(files[source].read(end - start).rstrip(b"\n") + b"\n")
        out.flush()


def replace_file(path: Path, data: bytes) -> None:
    """Put `data` in place of `path`: at any moment there is the old file or the new one."""
    with atomic_write(path) as part:
        part.write_bytes(data)


def open_locked(path: Path) -> BinaryIO:
    """Open for appending and reading with an exclusive lock; BlockingIOError if another process holds it."""
    for delay_s in (0.05, 0.1, 0.2, 0.4, 0.0):  # `is_locked` of another process holds the lock for a moment
        file = path.open("a+b")
        try:
            lock_file(file)
        except BlockingIOError:
            file.close()
            if not delay_s:
                raise
        else:
            if _is_same_file(path, file):
                return file
            file.close()  # replaced or removed between opening and locking
        time.sleep(delay_s)
    raise BlockingIOError(f"{path} keeps being replaced")


def _is_same_file(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def lock_file(file: BinaryIO, *, wait: bool = False, shared: bool = False) -> None:
    """Take the file's lock; BlockingIOError if it is taken and we may not wait. Does nothing if there are no locks."""
    if fcntl is None:
        return
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError:
        return  # a file system without locks


def is_locked(path: Path) -> bool:
    """Whether another process holds the lock of `path`."""
    try:
        with path.open("rb") as file:
            lock_file(file, shared=True)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
