"""What the command line names (files, archives, tables, datasets, addresses) as one stream of numbered rows.

`ROW_SOURCES` maps a suffix to the class that reads it: a new format is one class and one entry. Rows are streamed; only
their ids are remembered, so that each is captioned once.
"""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.cells import MEDIA_SUFFIXES, listed, name_below, relative_name, short_repr
from mmspec.app.io.content import ByteRange, Content, Unreadable, is_local, open_file_system
from mmspec.app.io.data_sets import HubSource, SavedSource, is_hub_dataset, is_saved_dataset
from mmspec.app.io.fields import ANY_FIELD, add_fields
from mmspec.app.io.item import Item, RowSource, Skip, SourceOptions
from mmspec.app.io.kinds import refuse_pointer
from mmspec.app.io.left_out import LeftOut
from mmspec.app.io.manifests import MANIFESTS, is_manifest
from mmspec.app.io.sources import FileSource, explain_refused, find_matches, is_refused, natural_key
from mmspec.app.io.streams import StreamedSource
from mmspec.app.io.tables import ParquetSource
from mmspec.app.io.tars import TarSource
from mmspec.hints import did_you_mean

ROW_SOURCES: dict[str, Callable[[str, SourceOptions], RowSource]] = {
    ".tar": TarSource,
    ".parquet": ParquetSource,
}
"""Suffix -> class of the source of one file."""
_BRACES = re.compile(r"\{([^{}]*)\}")
MAX_BRACES = 1_000_000
"""Names that one brace pattern may expand to."""
MAX_NAMED = 4
"""Arguments that a message repeats."""
MAX_MISSING = 1000
"""Leading rows that are examined for a file that exists."""
MAX_FIELD_ROWS = 64
"""Leading rows of archives and tables that are examined for the fields of prompts."""


class RemoteFiles(StreamedSource):
    """Pictures and clips at addresses that fsspec opens: one, or those below a folder."""

    def _check(self) -> None:
        open_file_system(self.name)

    def _read(self, skip: Skip) -> Iterator[Item]:
        self._found = LeftOut(folder=self.name)
        if _suffix(self.name) in MEDIA_SUFFIXES:
            yield Item(Path(self.name), self.name, self.name, content=ByteRange(self.name))
            return
        system, path = open_file_system(self.name)
        for found in sorted(system.find(path), key=natural_key):
            if self._is_read(found[len(path) :], found.rpartition("/")[2]):
                url = system.unstrip_protocol(found)
                yield Item(Path(found), url, url, content=ByteRange(url))

    def _is_read(self, below: str, name: str) -> bool:
        """Whether a file is a picture or clip that is not hidden; else it is counted."""
        suffix = _suffix(name)
        if self._found.hides(below, name):
            return False
        if suffix not in MEDIA_SUFFIXES | MANIFESTS:
            self._found.add("formats", name, what=suffix or "no suffix")
        return suffix in MEDIA_SUFFIXES


def expand_braces(name: str) -> list[str]:
    """`a-{000..002}.tar` and `{a,b}.tar` as the names that they stand for; a name without braces as it is.

    Raises:
        UsageError: more than `MAX_BRACES` names.
    """
    parts = [_choices(part) if number % 2 else [part] for number, part in enumerate(_BRACES.split(name))]
    if math.prod(map(len, parts)) > MAX_BRACES:
        raise UsageError(f"{name} stands for more than {MAX_BRACES} names")
    return ["".join(choice) for choice in product(*parts)]


def _choices(body: str) -> Sequence[str]:
    """What stands for one pair of braces: itself if it is no pattern."""
    first, dots, last = body.partition("..")
    if not (dots and first.isdecimal() and last.isdecimal()):
        return body.split(",") if "," in body else [f"{{{body}}}"]
    width = len(first) if first.startswith("0") or len(first) == len(last) else 0
    low, high = int(first), int(last)
    if abs(high - low) >= MAX_BRACES:
        raise UsageError(f"{{{body}}} stands for more than {MAX_BRACES} names")
    step = 1 if low <= high else -1
    return [str(number).zfill(width) for number in range(low, high + step, step)]


def find_sources(name: str, options: SourceOptions, excluded: set[str]) -> list[RowSource]:
    """The sources of one argument of the command line.

    Raises:
        UsageError: nothing is there, or an address of an unknown kind.
    """
    if is_hub_dataset(name):
        return [HubSource(name.rstrip("/"), options)]
    if not is_local(name):
        return [_source(url, options, excluded) for one in expand_braces(name) for url in _remote_matches(one)]
    expanded = [name] if os.path.exists(name) else expand_braces(name)
    return [source for one in expanded for source in _local_matches(one, options, excluded)]


def _local_matches(name: str, options: SourceOptions, excluded: set[str]) -> list[RowSource]:
    """The archives and tables that a glob matches, then its other files."""
    if os.path.exists(name) or not glob.has_magic(name):
        return [_source(name, options, excluded)]
    matches = find_matches(name)
    shards = [match for match in matches if _suffix(match) in ROW_SOURCES and os.path.isfile(match)]
    found = [_source(match, options, excluded) for match in shards if os.path.realpath(match) not in excluded]
    return found if found and len(shards) == len(matches) else [*found, FileSource(name, excluded, options)]


def _source(name: str, options: SourceOptions, excluded: set[str]) -> RowSource:
    """What reads a path or address."""
    suffix, is_path = _suffix(name), is_local(name)
    if is_path and os.path.isdir(name):
        is_saved = is_saved_dataset(Path(name))
        return SavedSource(name.rstrip("/") or "/", options) if is_saved else FileSource(name, excluded, options)
    if suffix not in MEDIA_SUFFIXES:  # pictures and clips have error rows
        refuse_pointer(name)
    if suffix in ROW_SOURCES:
        if is_path and not os.path.isfile(name):
            raise UsageError(f"no such file: {name}")
        return ROW_SOURCES[suffix](name, options)
    if is_refused(name):
        raise explain_refused(name)
    if is_path:
        return FileSource(name, excluded, options)
    if is_manifest(Path(name)):
        raise UsageError(
            f"{short_repr(name)}: lists are read from this machine: copy it, and name it with --root for its folder"
        )
    return RemoteFiles(name, options)


def _remote_matches(url: str) -> list[str]:
    """Addresses that match a glob; an address without one as it is."""
    if not glob.has_magic(url):
        return [url]
    system, path = open_file_system(url)
    try:
        found = sorted(map(str, system.glob(path)), key=natural_key)
    except Exception as error:
        raise UsageError(f"cannot list {url}: {one_line(error)}") from error
    if not found:
        raise UsageError(f"nothing matches {url!r}")
    return [str(system.unstrip_protocol(match)) for match in found]


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()


class Inputs:
    """All rows that a command names, each once and numbered. Iterating again yields the same rows."""

    def __init__(self, paths: Sequence[str], options: SourceOptions, skip: Iterable[Path] = ()) -> None:
        """List the sources; nothing is read yet.

        Args:
            skip: files that are never inputs (those of the job's output).

        Raises:
            UsageError: a path that names nothing.
        """
        self.paths, self.options, self._output_files = paths, options, list(skip)
        self._repeated = LeftOut()
        excluded = {os.path.realpath(path) for path in self._output_files}
        self.sources = [source for path in paths for source in find_sources(path, options, excluded)]

    @property
    def is_listed(self) -> bool:
        """Whether all rows are known from listings."""
        return all(source.is_listed for source in self.sources)

    def count(self) -> int | None:
        """Number of rows, if it is cheap to have."""
        total = 0
        for source in self.sources:
            number = source.count()
            if number is None:
                return None
            total += number
        return total if self.options.limit is None else min(total, self.options.limit)

    def check(self) -> None:
        """Refuse what can be seen to be wrong before a job begins.

        Raises:
            UsageError: no rows, a missing file, a bad manifest, two rows of one id, a table without the column.
        """
        for source in self.sources:
            if is_local(source.name) or source is self.sources[0]:
                source.check()
        first = list(islice(self.rows(lambda ident: True), MAX_MISSING if self.is_listed else 1))
        if not first:
            found = "; ".join(self.left_out())
            named = ", ".join(self.paths[:MAX_NAMED]) + (", ..." if len(self.paths) > MAX_NAMED else "")
            raise UsageError(f"no images or videos in {named}" + (f"; {found}" if found else ""))
        if self.is_listed and not any(item.content or os.path.exists(item.path) for item in first):
            more = f" (nor any other of {len(first)})" if first[1:] else ""
            origin = f" ({first[0].origin})" if first[0].origin else ""
            raise UsageError(f"no such file: {first[0].path}{origin}{more}")
        self._check_fields()

    def _check_fields(self) -> None:
        """Refuse a field of prompts that no row has.

        Raises:
            UsageError: of listed inputs none has, of others none of the first.
        """
        lacking, fault = dict.fromkeys(self.options.fields), ""
        rows = self.rows(lambda ident: False)
        while lacking and (item := next(rows, None)) is not None and (self.is_listed or item.index < MAX_FIELD_ROWS):
            lacking = {name: None for name in lacking if name not in item.fields}
            fault = fault or (f"; {item.content.message}" if isinstance(item.content, Unreadable) else "")
        if not lacking:
            return
        everything = Inputs(self.paths, replace(self.options, fields=(ANY_FIELD,)), self._output_files)
        shown = islice(everything.rows(lambda ident: False), MAX_FIELD_ROWS)
        known, name = list(dict.fromkeys(name for item in shown for name in item.fields)), next(iter(lacking))
        raise UsageError(
            f"no row has the field {name!r:.60} that the prompt names{did_you_mean(name, known)}; rows have "
            f"{listed(known)}{fault:.160}; {{{{{name:.20}}}}} stands for the text in braces"
        )

    def left_out(self, listed: bool | None = None) -> list[str]:
        """What the inputs do not read, a line for each kind.

        Args:
            listed: of listed sources, or of the others, complete once their rows were read; None: of all.
        """
        found = LeftOut()
        for source in self.sources:
            if listed is None or source.is_listed == listed:
                source.add_left_out(found)
        if listed is None or self.is_listed == listed:
            found.merge(self._repeated)
        return found.lines()

    def rows(self, skip: Skip) -> Iterator[Item]:
        """The rows with `id`, `file_name` and `index`. Those to skip may lack their content.

        Raises:
            UsageError: a bad manifest, or one with two rows of an id. Other sources yield error rows.
        """
        self._repeated = LeftOut()
        known: dict[str, int] = {}
        base, index = os.path.abspath(self.options.base), 0
        for source in self.sources:
            for item in source.rows(skip):
                name = subject = item.file_name
                if item.content is None or not name:  # a file, perhaps with a prompt that is no text
                    name = name_below(os.path.abspath(item.path), base)
                    subject = relative_name(item.path, self.options.place)
                ident = item.id or subject
                values, content = item.fields, item.content
                try:
                    values = add_fields(item, self.options.fields) if self.options.fields else values
                except ValueError as error:
                    content = Unreadable("BadText", str(error))
                fault = content.message if isinstance(content, Unreadable) else None
                key = hash((subject, item.prompt, fault, *values.values()))
                if ident in known:
                    if not source.is_listed:
                        ident, content = _repeated(ident, known)
                    elif known[ident] == key:
                        if item.origin:
                            where = item.origin.removeprefix(f"{source.name} ")
                            self._repeated.add("repeated", where, where=source.name)
                        continue
                    else:
                        where = item.origin or short_repr(subject)
                        raise UsageError(
                            f"two rows have the id {short_repr(ident)} ({where}): give each row its own id"
                        )
                known[ident] = key
                yield replace(item, id=ident, file_name=name, index=index, content=content, fields=values)
                index += 1
                if index == self.options.limit:
                    return


def _repeated(ident: str, known: Container[str]) -> tuple[str, Content]:
    """Id and content of a second row of one id: an error row."""
    number = 2
    while f"{ident}#{number}" in known:
        number += 1
    message = f"the input has an earlier row with the id {short_repr(ident)}"
    return f"{ident}#{number}", Unreadable("DuplicateId", message)
