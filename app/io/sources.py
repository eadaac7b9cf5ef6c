"""Files, folders, globs and lists as rows in a stable order. Nothing is decoded or written here.

Hidden files are left out; links to folders are not followed, so that a loop of them ends. What is left out is counted.
"""

from __future__ import annotations

import glob
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mmspec.app.errors import UsageError
from mmspec.app.io.cells import MEDIA_SUFFIXES
from mmspec.app.io.item import Item, RowSource, Skip, SourceOptions
from mmspec.app.io.kinds import media_kind
from mmspec.app.io.left_out import SHARD_SUFFIXES, TEXT_SUFFIXES, LeftOut, is_hidden
from mmspec.app.io.manifests import is_manifest, read_manifest
from mmspec.app.io.videos import AMBIGUOUS_SUFFIXES
from mmspec.vision.video.containers import describe_format, read_header

PATH_KINDS = "a picture, a clip, a folder, a list (.jsonl .json .csv .tsv .txt, also .gz), .tar or .parquet"
_REMEDIES = (
    ((".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst"), "unpack it to a .tar or a folder first"),
    ((".zip", ".7z", ".rar"), "unpack it first and name the folder"),
    ((".xlsx", ".xls", ".ods", ".numbers"), "save the sheet as CSV"),
    (
        (".arrow", ".feather", ".lance", ".h5", ".npz", ".npy", ".pkl", ".pt", ".tfrecord", ".mds"),
        "convert it to Parquet",
    ),
)
"""Suffixes of what is not read -> what to do."""


def natural_key(text: str) -> tuple[Any, ...]:
    """Sort key that puts img2 before img10, and is total: ties are broken by the text itself."""
    parts = re.split(r"(\d+)", text.casefold())
    return (*((int(p), "") if p.isdecimal() else (-1, p) for p in parts), (-2, text))


def explain_refused(name: str, found: str = "") -> UsageError:
    """The error about a file that is not read.

    Args:
        found: what it is by its content.
    """
    remedy = next((text for suffixes, text in _REMEDIES if name.lower().endswith(suffixes)), f"PATH is {PATH_KINDS}")
    return UsageError(f"{name} is not read{f': it is {found}' if found else ''}; {remedy}")


def is_refused(name: str) -> bool:
    """Whether the suffix is one of a format that is not read."""
    return any(name.lower().endswith(suffixes) for suffixes, _ in _REMEDIES)


class FileSource(RowSource):
    """Rows of one path of the command line: a file, a folder, a glob or a list."""

    is_listed = True

    def __init__(self, name: str, excluded: set[str], options: SourceOptions) -> None:
        super().__init__(name)
        self._excluded, self._options, self._is_read = excluded, options, False
        self._others: list[Path] = []  # files that are no pictures
        self._has_glob = glob.has_magic(name) and not os.path.exists(name)

    def check(self) -> None:
        """Refuse a file that is neither a picture nor a clip, by name or content, and a pipe: lists are read twice.

        Raises:
            UsageError: it is neither.
        """
        path = Path(self.name)
        is_pipe = path.exists() and not path.is_file() and not path.is_dir()
        if path.suffix.lower() not in MEDIA_SUFFIXES and (is_pipe or (self.name == "-" and not path.exists())):
            raise UsageError(
                f"{self.name} is a pipe, and lists are read more than once: write it to a file, and name that"
            )
        if not path.is_file() or path.suffix.lower() in MEDIA_SUFFIXES or is_manifest(path):
            return
        if _real(path) in self._excluded:
            return
        try:
            header = read_header(str(path))
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from error
        if media_kind(header) is None:
            raise explain_refused(self.name, describe_format(header))

    def rows(self, skip: Skip) -> Iterator[Item]:
        self._found, self._others, self._is_read = LeftOut(), [], False
        path = Path(self.name)
        if path.is_dir() or self._has_glob:
            files = list(self._globbed()) if self._has_glob else _in_order(path, walk(path, self._found))
            media = set(filter(is_media_file, files))
            self._others, self._is_read = [file for file in files if file not in media], True
            yield from (Item(file) for file in files if file in media and _real(file) not in self._excluded)
        elif path.exists() and _real(path) in self._excluded:
            return
        elif is_manifest(path):
            yield from read_manifest(path, self._options, self._found)
            self._is_read = True
        elif path.exists() or path.suffix.lower() in MEDIA_SUFFIXES:
            yield Item(path)
        else:
            raise UsageError(f"no such file or folder: {self.name}")

    def _globbed(self) -> Iterator[Path]:
        matches = find_matches(self.name)
        if not matches:
            raise UsageError(f"nothing matches {self.name!r}")
        for match in map(Path, matches):
            if match.is_file():
                yield match
            elif not self.name.rstrip("/").endswith("**") and match.is_dir():
                if match.is_symlink():
                    self._found.add("links", str(match))
                else:
                    yield from _in_order(match, walk(match, self._found, named=False))

    def add_left_out(self, found: LeftOut) -> None:
        """Count what this source does not read."""
        if not self._is_read:
            deque(self.rows(lambda ident: True), maxlen=0)
        super().add_left_out(found)
        for file in self._others:
            suffix = file.suffix.lower()
            is_shard = suffix in SHARD_SUFFIXES  # those that a glob matches are sources of their own: `find_sources`
            is_text = is_manifest(file) or suffix in TEXT_SUFFIXES or suffix[1:] in self._options.fields
            if is_text or (is_shard and self._has_glob):
                continue
            if (real := _real(file)) not in found.seen | self._excluded:
                found.seen.add(real)
                found.add("formats", file.name, what=suffix or "no suffix")
                if is_shard:
                    found.add_folder(str(file.parent))


def is_media_file(file: Path) -> bool:
    """Whether a file found in a folder is one of pictures or clips: by its suffix, and by content where that is shared
    with other kinds of files (TypeScript, songs)."""
    suffix = file.suffix.lower()
    if suffix not in AMBIGUOUS_SUFFIXES:
        return suffix in MEDIA_SUFFIXES
    try:
        return media_kind(read_header(str(file))) is not None
    except OSError:
        return True  # an error row


def _real(path: Path) -> str:
    return os.path.realpath(path)


def _in_order(folder: Path, files: Iterable[Path]) -> list[Path]:
    """Files of a folder before those of its sub-folders, each level in natural order."""

    def key(file: Path) -> tuple[Any, ...]:
        parts = file.relative_to(folder).parts
        return tuple((i < len(parts) - 1, natural_key(part)) for i, part in enumerate(parts))

    return sorted(files, key=key)


def walk(folder: Path, found: LeftOut, named: bool = True) -> Iterator[Path]:
    """Files of a folder and its sub-folders that are not hidden; what is left out is added to `found`.

    Args:
        named: the user has named this very folder.

    Raises:
        UsageError: the folder itself cannot be read.
    """

    def fail(error: OSError) -> None:
        if named and error.filename == str(folder):
            raise UsageError(f"cannot read folder {folder}: {error.strerror}") from error
        found.add("unreadable", os.path.relpath(error.filename), what=error.strerror or "error")

    for here, folders, files in os.walk(folder, onerror=fail):
        for name in folders:
            if not is_hidden(name) and os.path.islink(os.path.join(here, name)):
                found.add("links", os.path.join(here, name))
        folders[:] = [name for name in folders if not is_hidden(name)]
        yield from (Path(here, name) for name in files if not found.hides(name, name))


def find_matches(pattern: str) -> list[str]:
    """What a glob matches, in natural order. `**` follows no links to folders: a loop of them would not end."""
    return sorted(dict.fromkeys(_matches(pattern)), key=natural_key)


def _matches(pattern: str) -> Iterator[str]:
    parts = pattern.split("/")
    if "**" not in parts:
        yield from glob.glob(pattern)
        return
    place = parts.index("**")
    head, tail = "/".join(parts[:place]), "/".join(parts[place + 1 :])
    starts = [head or ("/" if pattern.startswith("/") else "")]
    if glob.has_magic(head):
        starts = glob.glob(head)
    for start in starts:
        for here, folders, files in os.walk(start or "."):
            folders[:] = [name for name in folders if not is_hidden(name)]
            inner = here if start else os.path.relpath(here)
            below = "" if inner == "." and not start else inner
            if tail:
                yield from _matches(os.path.join(glob.escape(below), tail))
            else:
                names = [*folders, *(name for name in files if not is_hidden(name))]
                yield from (os.path.join(below, name) for name in names)
