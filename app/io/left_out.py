"""What of the inputs is not read: counted by kind, with the names of the first, as lines for the user."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from mmspec.messages import printable

MAX_KINDS = 8
"""Kinds of files that a line lists."""
MAX_NAMES = 2
SHARD_SUFFIXES = (".tar", ".parquet")
TEXT_SUFFIXES = (".cap", ".caption", ".cls", ".json", ".text", ".txt")
"""Members of archives that are certainly no pictures."""

LIST_NOTES = {
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
"""What is said of the rows of a list, by kind: the noun that is counted, and the sentence."""


def is_hidden(name: str) -> bool:
    """Whether a path below an input is hidden: a name with a dot in front, or what macOS packs beside each file."""
    return any(part == "__MACOSX" or (part.startswith(".") and part not in (".", "..")) for part in name.split("/"))


def is_packed_metadata(name: str) -> bool:
    """Whether it is AppleDouble: no file of its own, but attributes of another."""
    parts = name.split("/")
    return "__MACOSX" in parts or parts[-1].startswith("._") or parts[-1] == ".DS_Store"


@dataclass
class Tally:
    """Number and first names of things of several kinds."""

    counts: dict[str, int] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, name: str, count: int = 1) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + count
        names = self.names.setdefault(kind, [])
        if len(names) <= MAX_NAMES:
            names.append(name)

    def add_all(self, other: Tally) -> None:
        for kind, count in other.counts.items():
            self.counts[kind] = self.counts.get(kind, 0) + count
            self.names[kind] = [*self.names.get(kind, []), *other.names[kind]][: MAX_NAMES + 1]

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        """As in "2 .heic (b.heic, c.HEIC), 1 .svg (d.svg)", the most frequent first."""
        ordered = sorted(self.counts.items(), key=lambda kind: (-kind[1], kind[0]))
        parts = [f"{count} {kind} ({_examples(self.names[kind], count)})".strip() for kind, count in ordered]
        rest = f", and {len(parts) - MAX_KINDS} other kinds" if len(parts) > MAX_KINDS else ""
        return ", ".join(parts[:MAX_KINDS]) + rest


@dataclass
class LeftOut:
    """What one or several inputs do not read.

    Attributes:
        formats: files that are neither pictures nor clips, by suffix.
        hidden: pictures with a hidden name.
        links: links to folders, which are not followed.
        unreadable: sub-folders that cannot be read, by reason.
        members: of archives, by archive and extension: samples without a picture.
        archive_links: pictures of archives that are links or sparse, by archive.
        several: samples of archives with several pictures, by archive.
        lists: by list: rows that are not read, or read with a doubt, by kind (`LIST_NOTES`).
        folder: where the archives or tables lie that were left out; with "/**" if at several places below it.
        seen: files that are counted already: inputs may overlap.
    """

    formats: Tally = field(default_factory=Tally)
    hidden: Tally = field(default_factory=Tally)
    links: Tally = field(default_factory=Tally)
    unreadable: Tally = field(default_factory=Tally)
    members: dict[str, Tally] = field(default_factory=dict)
    archive_links: Tally = field(default_factory=Tally)
    several: Tally = field(default_factory=Tally)
    lists: dict[str, Tally] = field(default_factory=dict)
    folder: str = ""
    seen: set[str] = field(default_factory=set)

    def add_folder(self, folder: str) -> None:
        """Add where an archive or table lies."""
        if self.folder in ("", folder):
            self.folder = folder
        else:
            self.folder = f"{os.path.commonpath([self.folder.removesuffix('/**'), folder])}/**"

    def add_list_note(self, name: str, kind: str, where: str, count: int = 1) -> None:
        """Count a row of a list."""
        self.lists.setdefault(name, Tally()).add(kind, where, count)

    def add_lists(self, other: LeftOut) -> None:
        """Add what was found of lists elsewhere."""
        for name, tally in other.lists.items():
            self.lists.setdefault(name, Tally()).add_all(tally)

    def lines(self) -> list[str]:
        """A line for each kind of thing that was found."""
        found = []
        if total := self.formats.total:
            found.append(f"skipped {_number(total, 'file')} of unsupported formats: {self.formats}{self._hint()}")
        if total := self.unreadable.total:
            found.append(f"{_number(total, 'folder')} cannot be read: {_by_reason(self.unreadable)}")
        if total := self.links.total:
            names = _examples(self.links.names[""], total)
            found.append(f"{_number(total, 'link')} to folders not followed: {names}; name a link to read its folder")
        if total := self.hidden.total:
            found.append(f"skipped {_number(total, 'hidden picture')}: {_examples(self.hidden.names[''], total)}")
        for archive, tally in self.members.items():
            column = next(
                (
                    kind.lstrip(".")
                    for kind in sorted(tally.counts)
                    if kind.startswith(".") and kind not in TEXT_SUFFIXES
                ),
                None,
            )
            hint = f"; --image-column {column} reads one kind" if column else ""
            what = f"{_number(tally.total, 'member')} of samples without a picture by name"
            found.append(f"{archive}: skipped {what}: {tally}{hint}")
        for archive, count in self.archive_links.counts.items():
            names = _examples(self.archive_links.names[archive], count)
            found.append(
                f"{archive}: skipped {_number(count, 'picture')} stored as links ({names}): pack the files themselves, "
                "with tar --dereference --hard-dereference"
            )
        for archive, count in self.several.counts.items():
            names = _examples(self.several.names[archive], len(self.several.names[archive]))
            found.append(
                f"{archive}: {_number(count, 'sample')} with several pictures ({names}): one row each; "
                "--image-column EXTENSION reads one of them"
            )
        for name, tally in self.lists.items():
            for kind, count in tally.counts.items():
                noun, sentence = LIST_NOTES[kind]
                found.append(f"{name}: {sentence.format(count=_number(count, noun), first=tally.names[kind][0])}")
        return found

    def _hint(self) -> str:
        hints = []
        if {".heic", ".heif"} & set(self.formats.counts):
            hints.append("; pip install pillow-heif to read .heic")
        if ".arrow" in self.formats.counts:
            hints.append("; a folder of save_to_disk is read by its own name")
        if shards := [suffix for suffix in SHARD_SUFFIXES if suffix in self.formats.counts]:
            hints.append(f"; archives and tables are read by name: '{self.folder.rstrip('/')}/*{shards[0]}'")
        return "".join(hints)


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'s'[: count > 1]}"


def _by_reason(tally: Tally) -> str:
    return ", ".join(f"{_examples(tally.names[reason], count)} ({reason})" for reason, count in tally.counts.items())


def _examples(names: Iterable[str], count: int) -> str:
    """The first names, printable and short."""
    shown = map(printable, list(names)[:MAX_NAMES])
    short = [name if len(name) <= 40 else f"...{name[-37:]}" for name in shown]
    return ", ".join([*short, *(["..."] if count > len(short) else [])])
