"""A cell of a table (bytes, a path, an address, or a struct of these) to the content of a row.

Tables are not trusted: a path stays in the folder of its table, an address is read only if the user permits it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from mmspec.app.errors import UsageError
from mmspec.app.io import images, videos
from mmspec.app.io.content import ByteRange, Content, InlineBytes, Unreadable, WebAddress, is_local
from mmspec.app.io.item import Item, SourceOptions

MEDIA_SUFFIXES = images.IMAGE_SUFFIXES | videos.VIDEO_SUFFIXES
IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "webp", "picture", "video", "bytes", "image_url", "url",
                 "image_path", "file_name", "path")  # fmt: skip
"""Names of columns that hold pictures, in the order of preference."""


def local_name(url: str, base: Path) -> str:
    """The name of an input in the rows: relative to `base` if it lies below; an address as it is."""
    return relative_name(Path(url), base) if is_local(url) else url


def relative_name(path: Path, base: Path) -> str:
    """`path` relative to `base`, or absolute if it is not below it; with forward slashes."""
    return name_below(os.path.abspath(path), os.path.abspath(base))


def name_below(path: str, root: str) -> str:
    """The same of absolute paths."""
    folder = root.rstrip(os.sep) + os.sep
    name = path[len(folder) :] if path.startswith(folder) else "." if path == root else path
    return name.replace(os.sep, "/")


def find_image_column(columns: Sequence[str], wanted: str | None, what: str) -> str:
    """The column of the pictures.

    Raises:
        UsageError: there is no such column, or none is known by its name.
    """
    if wanted is not None:
        return require_column(columns, wanted, "--image-column", what)
    names = {name.lower(): name for name in reversed(columns)}
    found = next((names[name] for name in IMAGE_COLUMNS if name in names), None)
    if found is None:
        raise UsageError(f"{what} has no column of pictures; it has {', '.join(columns)}: name one with --image-column")
    return found


def require_column(columns: Sequence[str], name: str, flag: str, what: str) -> str:
    """`name`, if it is a column.

    Raises:
        UsageError: it is not.
    """
    if name not in columns:
        raise UsageError(f"{what} has no column {name!r} ({flag}); it has {', '.join(columns)}")
    return name


def table_row(cell: Any, prompt: Any, ident: Any, number: int, name: str, folder: str, options: SourceOptions) -> Item:
    """A row of a table.

    Args:
        cell: value of the picture's column: bytes, text, or a mapping with "bytes" and "path".
        prompt: value of the prompt's column.
        ident: value of the id's column.
        number: of the row in the table.
        name: of the table.
        folder: what paths in the table are relative to, and may not leave.
    """
    content, path = cell_content(cell, folder, options.urls)
    for key, value, kinds in (("prompt", prompt, str), ("id", ident, str | int)):
        if value is not None and not isinstance(value, kinds):
            content = Unreadable("BadText", f"the {key} is text, got {type(value).__name__}")
    prompt = prompt if isinstance(prompt, str) and prompt else None
    ident = str(ident) if isinstance(ident, str | int) else f"{name}#{number}"
    return Item(Path(path or f"{name}#{number}"), ident, path or f"{name}#{number}", prompt, content=content)


def cell_content(cell: Any, folder: str, urls: str | None) -> tuple[Content, str]:
    """The content of a cell, and a name for it; the name is empty if the cell has none."""
    path: Any = None
    if isinstance(cell, Mapping):
        cell, path = cell.get("bytes"), cell.get("path")
    if isinstance(cell, bytes | bytearray | memoryview) and len(cell):
        return InlineBytes(bytes(cell)), PurePosixPath(path).name if isinstance(path, str) else ""
    named = cell if isinstance(cell, str) else path
    if not isinstance(named, str) or not named:
        got = "nothing" if named is None else type(named).__name__
        return Unreadable("Missing", f"no picture in this row: {got}"), ""
    return _named_content(named, folder, urls), named


def _named_content(named: str, folder: str, urls: str | None) -> Content:
    if named.lower().startswith(("http://", "https://")):
        if urls is None:
            return Unreadable("AddressNotAllowed", f"addresses in rows are read with --urls; got {named[:80]!r}")
        return WebAddress(named, public_only=urls != "any")
    outside = Unreadable("OutsideInput", f"{named[:80]!r} leads out of {folder}: paths are relative to the table")
    if not is_local(folder) or not is_local(named):
        url = named if not is_local(named) else f"{folder.rstrip('/')}/{named}"
        inside = not is_local(folder) and url.startswith(folder.rstrip("/") + "/") and ".." not in url.split("/")
        return ByteRange(url) if inside else outside
    if "\0" in named or not is_inside(folder, named):
        return outside
    return ByteRange(os.path.join(folder, named))


def is_inside(folder: str, name: str) -> bool:
    """Whether the path `name` in `folder` stays in it, symbolic links included."""
    if os.path.isabs(name):
        return False
    path = os.path.join(folder, name)
    parent, root = (_real_path(os.path.join(os.getcwd(), part)) for part in (os.path.dirname(path), folder))
    real = os.path.join(parent, os.path.basename(path))
    if os.path.islink(real) or os.path.basename(path) in ("", ".", ".."):
        real = os.path.realpath(path)
    return real == root or real.startswith(root.rstrip(os.sep) + os.sep)


@lru_cache(maxsize=4096)
def _real_path(folder: str) -> str:
    return os.path.realpath(folder)


__all__ = [
    "IMAGE_COLUMNS",
    "MEDIA_SUFFIXES",
    "cell_content",
    "find_image_column",
    "is_inside",
    "local_name",
    "name_below",
    "relative_name",
    "require_column",
    "table_row",
]
