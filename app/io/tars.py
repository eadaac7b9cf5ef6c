"""WebDataset tar archives: members with one key, `000012.jpg` and `000012.txt`, are a sample. Nothing is extracted.

The key ends at the first dot of a name, so `2024.01.05.png` and `2024.01.06.png` are one sample with two pictures. Each
picture of a sample is a row; texts are those with its own name (`2024.01.05.txt`), else those of the sample.

Headers are read and members are remembered as ranges of bytes, so an archive of any size takes little memory. Of a
truncated or damaged archive the rows before the damage are read, then one error row tells of it.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.cells import MEDIA_SUFFIXES, is_missing, listed
from mmspec.app.io.content import ByteRange, Content, Unreadable, open_source
from mmspec.app.io.fields import ANY_FIELD, MAX_FIELD_BYTES, TEXT_SUFFIXES, field_text
from mmspec.app.io.item import Item, Skip, SourceOptions
from mmspec.app.io.left_out import MAX_NAMES, is_hidden
from mmspec.app.io.streams import StreamedSource
from mmspec.app.io.tar_members import DamagedTarError, TarMember, read_members
from mmspec.app.io.text import decode_text
from mmspec.vision.images import ImageError
from mmspec.vision.video.containers import describe_format

MAX_SAMPLE_MEMBERS = 4096
"""Members that are held as one sample; a larger one is divided where its names change."""
_BLOCK = tarfile.BLOCKSIZE


class TarSource(StreamedSource):
    """Rows of one archive, local or remote."""

    def __init__(self, url: str, options: SourceOptions) -> None:
        super().__init__(url, options)
        wanted = options.image_column
        self._wanted = wanted.lower().lstrip(".") if wanted else None

    def _check(self) -> None:
        with open_source(self.url) as file:
            header = file.read(_BLOCK)
        if not header:
            raise UsageError(f"{self.url} is empty")
        try:
            if header != bytes(_BLOCK):
                tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except tarfile.TarError as error:
            what = describe_format(header)
            raise UsageError(
                f"{self.url} is not an uncompressed tar archive: it is {what}; unpack it to a .tar or a folder first"
            ) from error

    def _read(self, skip: Skip) -> Iterator[Item]:
        with open_source(self.url) as file:
            yield from self._samples(file)

    def _samples(self, file: IO[bytes]) -> Iterator[Item]:
        """Rows of the samples of an open archive; the texts of the last one before damage are read while it is open."""
        sample: list[TarMember] = []
        divided = False
        failure: Item | None = None
        try:
            for member in read_members(file, self._count_link):
                if self._found.hides(member.name, f"{self.name}/{member.name}"):
                    continue
                if not member.extension:  # README: of no sample, as in WebDataset
                    self._found.add("members", member.name, what="no suffix", where=self.name)
                    continue
                same = bool(sample) and member.key == sample[0].key
                if sample and (not same or _is_full(sample, member)):
                    divided = divided or same
                    yield from self._rows(file, sample, divided)
                    sample, divided = [], same
                sample.append(member)
        except DamagedTarError as error:
            failure = self._failure("rest", "DamagedTar", str(error))
        yield from self._rows(file, sample, divided)
        if failure is not None:
            yield failure

    def _count_link(self, name: str) -> None:
        suffix = os.path.splitext(name)[1].lower()
        if not is_hidden(name) and (suffix in MEDIA_SUFFIXES or suffix[1:] == self._wanted):
            self._found.add("archive_links", name, where=self.name)

    def _rows(self, file: IO[bytes], sample: list[TarMember], divided: bool) -> Iterator[Item]:
        """A row for each picture of a sample.

        Args:
            divided: there are other members of this key, which are not in `sample`.
        """
        if not sample:
            return
        media = {member.extension: member for member in self._media(sample)}
        if not media:
            if self._wanted:
                yield self._missing(sample)
            else:
                for member in sample:
                    self._found.add("members", member.name, what=f".{member.extension}", where=self.name)
            return
        several = divided or len(media) > 1
        if len(media) > 1:
            self._found.add("several", None, where=self.name)
            self._found.names["several", self.name, ""] = list(media)[: MAX_NAMES + 1]
        texts = _Texts(file, sample)
        known: set[str] = set()
        for extension, member in media.items():
            item = self._row(texts, member, several)
            if item.id in known:  # an id that the pictures share
                item = replace(item, id=f"{item.id}.{extension}")
            known.add(item.id)
            yield item

    def _media(self, sample: list[TarMember]) -> list[TarMember]:
        """The pictures and clips of a sample: by the extension that the user names or its end, else by suffix."""
        if self._wanted is None:
            return [member for member in sample if _suffix(member) in MEDIA_SUFFIXES]
        exact = [member for member in sample if member.extension == self._wanted]
        return exact or [member for member in sample if member.extension.endswith(f".{self._wanted}")]

    def _missing(self, sample: list[TarMember]) -> Item:
        key = sample[0].key
        extensions = list(dict.fromkeys(member.extension for member in sample))
        content = Unreadable("Missing", f"no member {key}.{self._wanted}; it has {listed(extensions)}")
        return Item(Path(key), f"{self.name}/{key}", f"{self.name}/{key}", content=content)

    def _row(self, texts: _Texts, member: TarMember, several: bool) -> Item:
        """The row of a picture."""
        content: Content = ByteRange(self.url, member.start, member.size)
        prompt = ident = None
        fields: dict[str, str] = {}
        try:
            texts.check_unique(member)
            prompt = texts.find(member, self.options.prompt_column)
            ident = texts.find(member, self.options.id_column)
            fields = texts.fields(member, self.options.fields)
        except ImageError as error:
            content = Unreadable(error.kind, str(error))
        name = f"{self.name}/{member.name}"
        return Item(
            Path(member.name),
            ident or (name if several else f"{self.name}/{member.key}"),
            name,
            prompt,
            content=content,
            fields=fields,
        )


class _Texts:
    """The texts of a sample."""

    def __init__(self, file: IO[bytes], sample: list[TarMember]) -> None:
        self._file = file
        self._members = {member.extension: member for member in reversed(sample)}
        self._repeated = {name for name, count in Counter(member.extension for member in sample).items() if count > 1}

    def check_unique(self, member: TarMember) -> None:
        """Refuse a member whose name occurs twice.

        Raises:
            ImageError: it does.
        """
        if member.extension in self._repeated:
            raise ImageError("DuplicateKey", f"the archive has two members {member.key}.{member.extension} in a row")

    def find(self, picture: TarMember, column: str | None) -> str | None:
        """The text of a member, or of a key of the member `json`; None without it.

        Raises:
            ImageError: it is too large, no text, or there are two of it.
        """
        value, container = self._value(picture, column) if column is not None else (None, None)
        if is_missing(value):
            return None
        if not isinstance(value, str | int):
            name = container.name if container else ""
            raise ImageError("BadText", f"{name}: {column!r} is text, got {type(value).__name__}")
        return str(value)

    def fields(self, picture: TarMember, names: tuple[str, ...]) -> dict[str, str]:
        """What prompts name of a sample; errors as of `find`."""
        if ANY_FIELD in names:
            members = [name for name in self._members if f".{name}" not in MEDIA_SUFFIXES | {".json"}]
            return dict.fromkeys((*members, *(self._value(picture, None)[0] or ())), "")
        found: dict[str, str] = {}
        for name in names:
            members = [suffix.lstrip(".") for suffix in TEXT_SUFFIXES.get(name, (name,))]
            texts = (field_text(self._value(picture, member)[0]) for member in dict.fromkeys((name, *members)))
            if (text := next(filter(None, texts), None)) is not None:
                found[name] = text
        return found

    def _value(self, picture: TarMember, column: str | None) -> tuple[Any, TarMember | None]:
        """What a member or a key of the member `json` holds, and that member; None: the object of `json` itself."""
        found = self._beside(picture, column.lower().lstrip(".")) if column is not None else None
        container = found or self._beside(picture, "json")
        if container is None:
            return None, None
        self.check_unique(container)
        if container.size > MAX_FIELD_BYTES:
            raise ImageError("TooLarge", f"{container.name} has {container.size} bytes; the limit is {MAX_FIELD_BYTES}")
        self._file.seek(container.start)
        try:
            text = decode_text(self._file.read(container.size))
            if found:
                return text.strip(), container
            return (_object(text) if column is None else _object(text).get(column)), container
        except (ValueError, RecursionError) as error:
            raise ImageError("BadText", f"{container.name}: {one_line(error)}") from error

    def _beside(self, picture: TarMember, extension: str) -> TarMember | None:
        """The member with the picture's own name and that extension, else that of the sample."""
        own = picture.extension.rpartition(".")[0]
        return self._members.get(f"{own}.{extension}" if own else extension) or self._members.get(extension)


def _is_full(sample: list[TarMember], member: TarMember) -> bool:
    """Whether a sample is to be divided before `member`; not between a picture and its own texts, if possible."""
    if len(sample) < MAX_SAMPLE_MEMBERS:
        return False
    return (
        len(sample) >= 2 * MAX_SAMPLE_MEMBERS
        or os.path.splitext(member.name)[0] != os.path.splitext(sample[-1].name)[0]
    )


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"no JSON object but {type(value).__name__}")
    return value


def _suffix(member: TarMember) -> str:
    return "." + member.extension.rpartition(".")[2]
