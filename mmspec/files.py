"""The user's cache folder, names of folders, and atomic file replacement: the old or the complete new content.

Knows nothing of what is written; used for checkpoints, weights, results and measured costs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CACHE_VARIABLE = "MMSPEC_CACHE"
"""Environment variable that names the cache folder."""


def cache_folder() -> Path:
    """`$MMSPEC_CACHE`, else `mmspec` in `$XDG_CACHE_HOME` or `~/.cache`; it may not exist.

    For a user without a home folder (in a container, under an id without a name) it is one that cannot exist.
    """
    if folder := os.environ.get(CACHE_VARIABLE):
        return Path(folder)
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "mmspec"
    try:
        return Path.home() / ".cache" / "mmspec"
    except RuntimeError:
        return Path(os.devnull) / "mmspec"  # every attempt to read or write is an `OSError`, as in a closed folder


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; on normal exit it is flushed to disk and renamed to `path`.

    After an exception `path` is unchanged and the temporary file is removed.

    Raises:
        OSError: the file cannot be flushed or renamed (full disk, missing permission).
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        with part.open("r+b") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush new names in `folder` to disk, on systems that support it."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


_HUB_CACHE = re.compile(r"models--([\w.-]+?)--([\w.-]+)")
"""The folder of a repository in the cache of the hub."""


def folder_name(folder: str | os.PathLike[str]) -> str:
    """The name of a model or drafter in a folder: OWNER/NAME in the hub's cache, where the last part is a commit."""
    parts = Path(os.path.normpath(folder)).parts
    found = _HUB_CACHE.fullmatch(parts[-3]) if len(parts) > 2 and parts[-2] == "snapshots" else None
    return f"{found[1]}/{found[2]}" if found else parts[-1]


__all__ = ["CACHE_VARIABLE", "atomic_write", "cache_folder", "folder_name", "sync_folder"]
