"""What of the inputs is not read: counted by kind, with the names of the first, as lines for the user."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from mmspec.app.io.cells import MEDIA_SUFFIXES
from mmspec.messages import printable

MAX_KINDS = 8
"""Kinds of files that a line lists."""
MAX_NAMES = 2
SHARD_SUFFIXES = (".tar", ".parquet")
TEXT_SUFFIXES = (".cap", ".caption", ".cls", ".json", ".text", ".txt")
"""Of files that are certainly no pictures, but texts about them."""

SENTENCES = {
    "formats": ("file", "skipped {count} of unsupported formats: {all}{hint}"),
    "unreadable": ("folder", "{count} cannot be read: {reasons}"),
    "links": ("link", "{count} to folders not followed: {names}; name a link to read its folder"),
    "hidden": ("hidden picture", "skipped {count}: {names}"),
    "members": ("member", "skipped {count} of samples without a picture by name: {all}{column}"),
    "archive_links": (
        "picture",
        "skipped {count} stored as links ({names}): pack the files themselves, with tar --dereference "
        "--hard-dereference",
    ),
    "several": (
        "sample",
        "{count} with several pictures ({names}): one row each; --image-column EXTENSION reads one of them",
    ),
    "record": ("record", "skipped {count} without a picture, as {first}"),
    "comment": ("line", "{count} beginning with # taken for comments, as {first}; ./# begins the name of a file"),
    "quote": ("line", "{count} with a quotation mark that is not closed read as they stand, as {first}"),
    "encoding": (
        "line",
        "{count} not in UTF-8 read as Windows-1252, as {first}; save the list as UTF-8 if that is wrong",
    ),
    "columns": (
        "record",
        "{count} with several columns that name files, as {first}: one is read; --image-column chooses",
    ),
    "repeated": ("row", "skipped {count} equal to an earlier one, as {first}"),
}
"""What is said of things, by kind: the noun that is counted, and the sentence. The last six are of rows of lists."""
_RANKS = {kind: min(number, 7) for number, kind in enumerate(SENTENCES)}
"""The order of the lines; those about a list stay together."""


def is_hidden(name: str) -> bool:
    """Whether a path below an input is hidden: a name with a dot in front, or what macOS packs beside each file."""
    return any(part == "__MACOSX" or (part.startswith(".") and part not in (".", "..")) for part in name.split("/"))


def is_packed_metadata(name: str) -> bool:
    """Whether it is AppleDouble: no file of its own, but attributes of another."""
    parts = name.split("/")
    return "__MACOSX" in parts or parts[-1].startswith("._") or parts[-1] == ".DS_Store"


@dataclass
class LeftOut:
    """What one or several inputs do not read, or read with a doubt.

    Attributes:
        counts: how many there are, by kind (`SENTENCES`), the archive or list that it is about ("" if there is none),
            and suffix, extension or reason.
        names: of the first of them.
        folder: where the archives or tables lie that were left out; with "/**" if at several places below it.
        seen: files that are counted already: inputs may overlap.
    """

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    names: dict[tuple[str, str, str], list[str]] = field(default_factory=dict)
    folder: str = ""
    seen: set[str] = field(default_factory=set)

    def add(self, kind: str, name: str | None, *, what: str = "", where: str = "") -> None:
        """Count a thing, of which `name` may be shown."""
        self.counts[kind, where, what] += 1
        names = self.names.setdefault((kind, where, what), [])
        if name is not None and len(names) <= MAX_NAMES:
            names.append(name)

    def hides(self, below: str, shown: str) -> bool:
        """Whether a path below an input is hidden, and so left out; a picture is counted."""
        if not is_hidden(below):
            return False
        if os.path.splitext(below)[1].lower() in MEDIA_SUFFIXES and not is_packed_metadata(below):
            self.add("hidden", shown)
        return True

    def merge(self, other: LeftOut) -> None:
        """Add what was found elsewhere."""
        self.counts.update(other.counts)
        for key, names in other.names.items():
            self.names[key] = [*self.names.get(key, []), *names][: MAX_NAMES + 1]
        self.folder = self.folder or other.folder

    def add_folder(self, folder: str) -> None:
        """Add where an archive or table lies."""
        if self.folder in ("", folder):
            self.folder = folder
        else:
            self.folder = f"{os.path.commonpath([self.folder.removesuffix('/**'), folder])}/**"

    def lines(self) -> list[str]:
        """A line for each kind of thing that was found."""
        topics = sorted(dict.fromkeys(key[:2] for key in self.counts), key=lambda topic: _RANKS[topic[0]])
        return [(f"{where}: " if where else "") + self._sentence(kind, where) for kind, where in topics]

    def _sentence(self, kind: str, where: str) -> str:
        noun, sentence = SENTENCES[kind]
        counts = {key[2]: number for key, number in self.counts.items() if key[:2] == (kind, where)}
        total, names = sum(counts.values()), self.names[kind, where, next(iter(counts))]
        shown = {what: _examples(self.names[kind, where, what], number) for what, number in counts.items()}
        columns = [one[1:] for one in sorted(counts) if one.startswith(".") and one not in TEXT_SUFFIXES]
        return sentence.format(
            count=f"{total} {noun}{'s'[: total > 1]}",
            all=_most_frequent(counts, shown),
            first=names[0] if names else "",
            names=_examples(names, len(names) if kind == "several" else total),
            reasons=", ".join(f"{shown[why]} ({why})" for why in counts),
            column=f"; --image-column {columns[0]} reads one kind" if columns else "",
            hint=self._hint(counts) if kind == "formats" else "",
        )

    def _hint(self, formats: Container[str]) -> str:
        hints = []
        if ".heic" in formats or ".heif" in formats:
            hints.append("; pip install pillow-heif to read .heic")
        if ".arrow" in formats:
            hints.append("; a folder of save_to_disk is read by its own name")
        if shards := [suffix for suffix in SHARD_SUFFIXES if suffix in formats]:
            hints.append(f"; archives and tables are read by name: '{self.folder.rstrip('/')}/*{shards[0]}'")
        return "".join(hints)


def _most_frequent(counts: Mapping[str, int], shown: Mapping[str, str]) -> str:
    """As in "2 .heic (b.heic, c.HEIC), 1 .svg (d.svg)", the most frequent first."""
    ordered = sorted(counts.items(), key=lambda kind: (-kind[1], kind[0]))
    parts = [f"{count} {kind} ({shown[kind]})" for kind, count in ordered]
    rest = f", and {len(parts) - MAX_KINDS} other kinds" if len(parts) > MAX_KINDS else ""
    return ", ".join(parts[:MAX_KINDS]) + rest


def _examples(names: Iterable[str], count: int) -> str:
    """The first names, printable and short."""
    shown = map(printable, list(names)[:MAX_NAMES])
    short = [name if len(name) <= 40 else f"...{name[-37:]}" for name in shown]
    return ", ".join([*short, *(["..."] if count > len(short) else [])])
