"""Fields of rows in prompts: `{name}` stands for a column of the row, or for what lies beside its picture.

A field is, in this order, a column of the list or table (of an archive a member or a key of the member json), the text
file of its name beside the picture (`photo.tags` for `{tags}`), a key of a JSON file beside it, or what the path says.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mmspec.app.errors import one_line
from mmspec.app.io.text import decode_text

if TYPE_CHECKING:
    from mmspec.app.io.item import Item

ANY_FIELD = "*"
"""In place of names: all fields of a row."""
MAX_FIELD_BYTES = 1 << 16
"""Largest text or JSON file beside a picture, or member of an archive, that is read."""
TEXT_SUFFIXES = {"caption": (".caption", ".txt")}
"""Field -> suffixes of its file beside a picture, where it is not that of its name alone."""
PATH_FIELDS: dict[str, Callable[[str], str]] = {
    "name": lambda path: os.path.splitext(os.path.basename(path))[0],
    "file_name": os.path.basename,
    "folder": lambda path: os.path.basename(os.path.dirname(path)),
}
"""What the path of a picture says."""
_NAME = r'([^\W\d][^{}"\n:,;|=]*)'
"""As people name columns, "Tags (en)", in any script; not JSON, nor a choice of words."""
_FIELD = re.compile(rf"\{{\{{{_NAME}\}}\}}|\{{{_NAME}\}}")
_ANSWER = re.compile(r"answer([1-9]\d{0,3})")


class MissingFieldError(Exception):
    """A row has not the field of this name."""


def normalized(name: str) -> str:
    """A field's or column's name without case, blanks, dashes and forms of Unicode: "File Name" and "file_name" are
    one."""
    return "_".join(unicodedata.normalize("NFC", name).casefold().replace("-", " ").split())


def field_names(text: str) -> list[str]:
    """The fields that a prompt names, each once. `{{name}}` is `{name}` as it stands; other braces are text."""
    return list(dict.fromkeys(found[2] for found in _FIELD.finditer(text) if found[2]))


def answer_number(name: str) -> int | None:
    """N of the field `answerN`, the answer to the Nth prompt; None for another field."""
    found = _ANSWER.fullmatch(name)
    return int(found[1]) if found else None


def fill(text: str, values: Mapping[str, str]) -> str:
    """A prompt with its fields replaced, all at once: braces in values are text.

    Raises:
        MissingFieldError: a field without a value.
    """

    def value(found: re.Match[str]) -> str:
        if found[1]:
            return f"{{{found[1]}}}"
        if found[2] not in values:
            raise MissingFieldError(found[2])
        return values[found[2]]

    return _FIELD.sub(value, text)


def field_text(value: Any) -> str | None:
    """A cell as text: numbers as they are written, lists with commas; None of what is empty or no text."""
    if isinstance(value, str):
        return "\n".join(value.splitlines()).strip() or None
    if isinstance(value, float):
        return None if value != value else str(int(value)) if value.is_integer() else str(value)
    if isinstance(value, bool | int):
        return str(value)
    if isinstance(value, list | tuple):
        parts = list(map(field_text, value))
        return ", ".join(part for part in parts if part is not None) or None
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) and value else None


def field_texts(row: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, str]:
    """The fields of a row that are not empty.

    Args:
        names: field -> name of its cell, as of `wanted`.
    """
    texts = {field: field_text(row.get(name)) for field, name in names.items()}
    return {field: text for field, text in texts.items() if text is not None}


def wanted(fields: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """Field -> the name of what a source has, for the fields that it has."""
    known = {normalized(name): name for name in reversed(list(names))}
    if ANY_FIELD in fields:
        return {name: name for name in known.values()}
    return {field: known[normalized(field)] for field in fields if normalized(field) in known}


def add_fields(item: Item, fields: tuple[str, ...]) -> Mapping[str, str]:
    """The fields of a row: those that its source gave, and what lies beside its picture or its path says.

    Raises:
        ValueError: the text file of a field cannot be read; one line.
    """
    values = dict(item.fields)
    name = os.path.abspath(item.path) if item.content is None else item.file_name or item.id
    if ANY_FIELD in fields:
        keys = _json_beside(item) if item.content is None else {}
        return {**add_fields(item, ("caption", *PATH_FIELDS)), **dict.fromkeys(keys, "")}
    beside: dict[str, Any] | None = None
    for field in fields:
        if field in values:
            continue
        found, key = None, normalized(field)
        if item.content is None:
            suffixes = TEXT_SUFFIXES.get(key, (f".{field}",))
            found = next(filter(None, (field_text(_read_beside(item, suffix)) for suffix in suffixes)), None)
            if found is None:
                beside = _json_beside(item) if beside is None else beside
                found = field_texts(beside, wanted((field,), beside)).get(field)
        if found is None and key in PATH_FIELDS:
            found = PATH_FIELDS[key](name) or None
        if found is not None:
            values[field] = found
    return values


def _json_beside(item: Item) -> dict[str, Any]:
    """The object of `photo.json`, or of `photo.jpg.json` as downloaders write it."""
    with suppress(ValueError, RecursionError):
        found = json.loads(_read_beside(item, ".json") or "null")
        if isinstance(found, dict):
            return found
    return {}


def _read_beside(item: Item, suffix: str) -> str | None:
    """The text of `photo.jpg.txt`, as downloaders write it, else of `photo.txt`; None if there is neither.

    Raises:
        ValueError: it cannot be read, is large, or no text.
    """
    from mmspec.vision.video.containers import FileBelow, open_regular_file

    for cut in (str, lambda name: os.path.splitext(name)[0]):
        below, path = item.below, f"{cut(str(item.path))}{suffix}"
        if not os.path.lexists(path):  # most fields have no file
            continue
        try:
            file = path if below is None else FileBelow(below.folder, f"{cut(below.name)}{suffix}")
            with os.fdopen(open_regular_file(file), "rb") as stream:
                data = stream.read(MAX_FIELD_BYTES + 1)
            if len(data) > MAX_FIELD_BYTES:
                raise ValueError(f"it has more than {MAX_FIELD_BYTES} bytes")
            return decode_text(data)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or one_line(error, 120)
            raise ValueError(f"{os.path.basename(path)}: {reason}") from error
    return None
