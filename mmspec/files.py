"""The user's cache folder, and atomic file replacement: a path holds the old or the complete new content.

Knows nothing of what is written; used for checkpoints, weights, results and measured costs.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CACHE_VARIABLE = "MMSPEC_CACHE"
"""Environment variable that names the cache folder."""
MAX_NAME_BYTES = 230
"""Longest name of a file with which others are made; file systems permit 255 bytes."""


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


def make_private_folder(folder: Path) -> None:
    """Create `folder` and the parents that are missing, all for this user only, whatever the umask is.

    `Path.mkdir(parents=True)` gives its mode to the last one alone; a cache that others can write is not trusted.

    Raises:
        OSError: it cannot be created, or is a file.
    """
    missing, parent = [folder], folder.parent
    while not parent.exists():
        missing.append(parent)
        parent = parent.parent
    for one in reversed(missing):
        one.mkdir(mode=0o700, exist_ok=True)


def short_name(name: str) -> str:
    """The name of a file; of a long one a digest takes the place of its end, so that others can be made from it."""
    data = os.fsencode(name)
    if len(data) <= MAX_NAME_BYTES:
        return name
    suffix, digest = os.path.splitext(name)[1], hashlib.sha256(data).hexdigest()[:16]
    return data[:200].decode("utf-8", "ignore") + digest + (suffix if len(suffix) < 9 else "")


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; on normal exit it is flushed to disk and renamed to `path`.

    After an exception `path` is unchanged and the temporary file is removed. Its name is one of its own: threads, and
    processes of several machines on one disk, may write the same `path` at a time.

    Raises:
        OSError: the file cannot be flushed or renamed (full disk, missing permission).
    """
    part = path.with_name(f".{short_name(path.name)}.{secrets.token_hex(4)}.part")
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


SNAPSHOT_FOLDER = re.compile(
    r"(?:.*[/\\])?models--([\w.-]+?)--([\w.-]+)[/\\]snapshots[/\\][^/\\]+(?:[/\\]([\w.-]+))?[/\\]*"
)
"""A snapshot in the cache of `huggingface_hub`, or a folder in it."""


def snapshot_id(folder: str | os.PathLike[str]) -> str | None:
    """OWNER/NAME of a model whose folder lies in the cache of the hub, where its own name is a commit; else None.

    Of a folder in a snapshot OWNER/NAME/FOLDER.
    """
    found = SNAPSHOT_FOLDER.fullmatch(os.fspath(folder))
    return "/".join(part for part in found.groups() if part) if found else None
