"""Files, folders, globs and manifests as rows in a stable order.

A manifest is not trusted: its paths stay inside its folder. Nothing is decoded or written here.
"""

from __future__ import annotations

import csv
import glob
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.cells import MEDIA_SUFFIXES, is_inside
from mmspec.app.io.item import Item, Skip

MANIFESTS = frozenset({".jsonl", ".txt", ".csv"})
MAX_SUFFIXES = 8
"""Suffixes of skipped files that a message lists."""
FILE_NAME_KEYS = ("file_name", "image", "path", "file")


def natural_key(text: str) -> tuple[Any, ...]:
    """Sort key that puts img2 before img10, and is total: ties are broken by the text itself."""
    parts = re.split(r"(\d+)", text.casefold())
    return (*((int(p), "") if p.isdecimal() else (-1, p) for p in parts), (-2, text))


class FileSource:
    """Rows of one path of the command line: a file, a folder, a glob or a manifest."""

    is_listed = True

    def __init__(self, name: str, excluded: set[str]) -> None:
        self.name, self._excluded = name, excluded

    def count(self) -> int | None:
        return None

    def check(self) -> None:
        pass

    def rows(self, skip: Skip) -> Iterator[Item]:
        return _named(self.name, self._excluded)


def _real(path: Path) -> str:
    return os.path.realpath(path)


def _named(name: str, excluded: set[str]) -> Iterator[Item]:
    path = Path(name)
    if path.is_dir():
        yield from _files(sorted(_walk(path), key=lambda file: _order(file, path)), excluded)
    elif path.exists() and _real(path) in excluded:
        return
    elif path.suffix.lower() in MANIFESTS and (path.exists() or not glob.has_magic(name)):
        yield from _manifest(path)
    elif path.exists() or (path.suffix.lower() in MEDIA_SUFFIXES and not glob.has_magic(name)):
        yield Item(path)
    elif glob.has_magic(name):
        yield from _globbed(name, excluded)
    else:
        raise UsageError(f"no such file or folder: {name}")


def _globbed(name: str, excluded: set[str]) -> Iterator[Item]:
    matches = sorted(glob.glob(name, recursive=True), key=natural_key)
    if not matches:
        raise UsageError(f"nothing matches {name!r}")
    for match in map(Path, matches):
        if match.is_dir() and not name.rstrip("/").endswith("**"):
            yield from _named(str(match), excluded)
        elif match.is_file() and match.suffix.lower() in MEDIA_SUFFIXES:
            yield from _files([match], excluded)


def _files(files: Iterable[Path], excluded: set[str]) -> Iterator[Item]:
    return (Item(file) for file in files if _real(file) not in excluded)


def _order(file: Path, folder: Path) -> tuple[Any, ...]:
    """Files of a folder before those of its sub-folders, each level in natural order."""
    parts = file.relative_to(folder).parts
    return tuple((i < len(parts) - 1, natural_key(part)) for i, part in enumerate(parts))


def _walk(folder: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise UsageError(f"cannot read folder {error.filename}: {error.strerror}")

    yield from (file for file in _all_files(folder, fail) if file.suffix.lower() in MEDIA_SUFFIXES)


def _all_files(folder: Path, fail: Callable[[OSError], None] | None = None) -> Iterator[Path]:
    """Files of a folder and its sub-folders, without hidden ones."""
    for here, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(here, name) for name in files if not name.startswith("."))


def describe_skipped(paths: Sequence[str], skip: Iterable[Path] = ()) -> str:
    """One line that counts and names the files in folders and globs of `paths` that are not read; empty if none."""
    own = {_real(path) for path in skip}
    groups: dict[str, list[Path]] = {}
    for file in dict.fromkeys(file for name in paths for file in _candidates(name)):
        if (suffix := file.suffix.lower()) not in MEDIA_SUFFIXES | MANIFESTS and _real(file) not in own:
            groups.setdefault(suffix or "no suffix", []).append(file)
    if not groups:
        return ""
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    listed = ", ".join(f"{len(files)} {suffix} ({_examples(files)})" for suffix, files in ordered[:MAX_SUFFIXES])
    rest = f", and {len(ordered) - MAX_SUFFIXES} other kinds" if len(ordered) > MAX_SUFFIXES else ""
    hint = "; pip install pillow-heif to read .heic" if {".heic", ".heif"} & set(groups) else ""
    total = sum(map(len, groups.values()))
    return f"skipped {total} file{'s'[: total > 1]} of unsupported formats: {listed}{rest}{hint}"


def _candidates(name: str) -> Iterator[Path]:
    """All files in a folder, or all that a glob matches; nothing for a file, which is never skipped."""
    if os.path.isdir(name):
        yield from _all_files(Path(name))
    elif glob.has_magic(name) and not os.path.exists(name):
        for match in sorted(glob.glob(name, recursive=True), key=natural_key):
            if os.path.isfile(match):
                yield Path(match)
            elif not name.rstrip("/").endswith("**"):
                yield from _all_files(Path(match))


def _examples(files: Sequence[Path]) -> str:
    """The names of the first files, printable."""
    names = [file.name if file.name.isprintable() else ascii(file.name) for file in files]
    return ", ".join([*(_short_name(name) for name in names[:2]), *(["..."] if len(names) > 2 else [])])


def _short_name(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:37]}..."


def _manifest(path: Path) -> Iterator[Item]:
    read = {".jsonl": _jsonl, ".csv": _csv, ".txt": _lines}[path.suffix.lower()]
    try:
        with path.open(encoding="utf-8-sig", newline="" if read is _csv else "\n") as lines:
            for number, row in read(path, lines):
                yield _entry(path, number, row)
    except OSError as error:
        raise UsageError(f"cannot read manifest {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"manifest {path} is not UTF-8 text: {one_line(error)}") from error


def _jsonl(path: Path, text: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(text, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} line {number} is not JSON: {one_line(error)}") from error
        if not isinstance(row, dict):
            raise UsageError(f"{path} line {number} is not a JSON object: {line.strip()[:60]}")
        yield number, row


def _csv(path: Path, text: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(text)
    try:
        for row in reader:
            yield reader.line_num, {key: value for key, value in row.items() if key and value}
    except csv.Error as error:
        raise UsageError(f"{path} line {reader.line_num} is not CSV: {one_line(error)}") from error


def _lines(path: Path, text: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(text, 1):
        if line.strip() and not line.startswith("#"):
            yield number, {"file_name": line.strip()}


def _entry(manifest: Path, number: int, row: dict[str, Any]) -> Item:
    where = f"{manifest} line {number}"
    name = next((row[key] for key in FILE_NAME_KEYS if row.get(key)), None)
    if not isinstance(name, str) or not _is_name(name):
        got = short_repr(name) if name else ", ".join(map(short_repr, row)) or "nothing"
        raise UsageError(f"{where} names no file: give {FILE_NAME_KEYS[0]!r}; got {got}")
    path = manifest.parent / name
    if not is_inside(str(manifest.parent), name):
        raise UsageError(
            f"{where}: {short_repr(name)} leads out of {manifest.parent}/: paths are relative to the manifest"
        )
    prompt, ident, answer = row.get("prompt"), row.get("id"), row.get("answer")
    for key, value in (("prompt", prompt), ("answer", answer)):
        if value is not None and not isinstance(value, str):
            raise UsageError(f"{where}: {key!r} is text, got {short_repr(value)}")
    if ident is not None and not isinstance(ident, str | int):
        raise UsageError(f"{where}: 'id' is text or a number, got {short_repr(ident)}")
    return Item(path, id="" if ident is None else str(ident), prompt=prompt or None, answer=answer or None)


def _is_name(name: str) -> bool:
    """Whether it is a valid file name: no control characters, valid Unicode, at most 255 bytes per part."""
    try:
        data = os.fsencode(name)
    except UnicodeEncodeError:
        return False
    printable = all(code >= 32 and code != 127 for code in data)
    return printable and len(data) <= 3072 and all(len(part) <= 255 for part in data.split(b"/"))


def short_repr(value: object) -> str:
    """A value for a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


__all__ = ["MANIFESTS", "FileSource", "describe_skipped", "natural_key", "short_repr"]
