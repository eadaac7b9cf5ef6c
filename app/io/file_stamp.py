"""What identifies a file that was captioned, so that one that takes its place is not taken for it."""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache

from mmspec.app.io.item import Item
from mmspec.vision.video.containers import FileBelow, open_regular_file

MAX_BYTES = 1 << 30
"""Of a file, how many of its first bytes count."""
CHUNK_BYTES = 1 << 20


def file_stamp(item: Item) -> str | None:
    """Size, time and content of the file of a row, "BYTES-NANOSECONDS-SHA256", the last in part.

    Returns:
        None for what is no file of its own: members of archives, cells of tables, addresses.
    """
    return None if item.content is not None else _stamp(item.below or str(item.path))


def was_replaced(item: Item, stamp: str | None) -> bool:
    """Whether the file of a row has other content than when its stamp was made. It is read if its time alone differs.

    Returns:
        False where that is not known: of rows without a stamp, and files that cannot be read.
    """
    if stamp is None or stamp.count("-") != 2 or item.content is not None:
        return False
    try:
        found = os.stat(item.path)
    except OSError:  # the job reports it, if the row is pending
        return False
    size, time, digest = stamp.split("-")
    if str(found.st_size) != size:
        return True
    if str(found.st_mtime_ns) == time:
        return False
    now = _read_again(item.below or str(item.path), found.st_mtime_ns)
    return now is not None and now.rsplit("-", 1)[1] != digest


def _stamp(file: FileBelow | str) -> str | None:
    try:
        with os.fdopen(open_regular_file(file), "rb") as stream:
            found = os.fstat(stream.fileno())
            digest = hashlib.sha256()
            for start in range(0, min(found.st_size, MAX_BYTES), CHUNK_BYTES):
                digest.update(stream.read(min(CHUNK_BYTES, MAX_BYTES - start)))
    except OSError:
        return None
    return f"{found.st_size}-{found.st_mtime_ns}-{digest.hexdigest()[:16]}"


@lru_cache(maxsize=4096)
def _read_again(file: FileBelow | str, time_ns: int) -> str | None:
    """The stamp of a file with that time; a job asks several times for each row."""
    return _stamp(file)
