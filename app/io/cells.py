"""A cell of a table or list (bytes, a path, an address, base64, a struct or list of these) to the content of a row.

Tables are not trusted: a path stays in the folder of its table or the one that the user permits, an address is read
only if the user permits it. No cell is printed whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from mmspec.app.io import images, videos
from mmspec.app.io.content import ByteRange, Content, Pictures, Unreadable, WebAddress, is_local
from mmspec.app.io.inline import held_bytes, inline_text
from mmspec.app.io.web import MAX_URL_CHARS
from mmspec.vision.video.containers import FileBelow
from mmspec.vision.video.remote_table import BadValue

MEDIA_SUFFIXES = images.IMAGE_SUFFIXES | videos.VIDEO_SUFFIXES
IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "webp", "picture", "photo", "video", "bytes", "images",
                 "pictures", "photos", "image_url", "url", "image_path", "video_path", "file_name", "path")  # fmt: skip
"""Names of columns that hold pictures, in the order of preference."""
FILE_COLUMNS = ("file_name", "image", "path", "file", "filename", "images", "video", "videos", "image_path",
                "video_path", "url", "image_url", "video_url", "img", "picture", "photo")  # fmt: skip
"""The same of lists, in lower case."""
SERVED_FILES, SERVED_UPLOADS = "/data/local-files/?d=", "/data/upload/"
"""How Label Studio names files below its folders, which are `--root` here."""
_BYTES = bytes | bytearray | memoryview
MAX_NAME_BYTES = 3072
MAX_ROW_PICTURES = 64
"""Pictures of one row."""
MAX_CELL_DEPTH = 4
"""Lists and structs in each other."""


@dataclass(frozen=True, slots=True)
class Reach:
    """What a table or list may name.

    Attributes:
        folder: that of the table or list.
        root: the folder that `--root` permits and relative paths are relative to; None: `folder`.
        urls: as in `SourceOptions`.
    """

    folder: str
    root: str | None = None
    urls: str | None = None

    def describe(self) -> str:
        """For messages about paths outside."""
        if self.root is not None:
            return f"{self.folder or '.'} and of --root {self.root}"
        return f"{self.folder or '.'}; --root DIR permits another folder, which relative paths then start from"


def short_repr(value: object) -> str:
    """A value for a message, never the whole of a long one."""
    if isinstance(value, str | bytes) and len(value) > 60:
        return f"{value[:60]!r}... ({len(value)} {'characters' if isinstance(value, str) else 'bytes'})"
    text = repr(value) if not isinstance(value, Mapping | list | tuple) else type(value).__name__
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_missing(value: Any) -> bool:
    """Whether a cell is empty: None, NaN, NaT or NA as pandas writes them."""
    if value is None or value is Ellipsis:
        return True
    if isinstance(value, float):
        return value != value
    return type(value).__name__ in ("NAType", "NaTType") or (
        hasattr(value, "dtype") and value.shape == () and value != value
    )


def whole_number(value: Any) -> Any:
    """A float that is a whole number as an int: pandas makes floats of a column of ints where a cell is empty."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def relative_name(path: Path, base: Path) -> str:
    """`path` relative to `base`, the same however it is given; with forward slashes.

    Of what does not lie below `base` the links in both folders are resolved, and it begins with `..`.
    """
    full, root = os.path.abspath(path), os.path.abspath(base)
    name = name_below(full, root)
    if name != full.replace(os.sep, "/"):
        return name
    try:
        real = os.path.join(_real_path(os.path.dirname(full)), os.path.basename(full))
        return os.path.relpath(real, _real_path(root)).replace(os.sep, "/")
    except ValueError:  # another drive
        return name


def name_below(path: str, root: str) -> str:
    """The same of absolute paths."""
    folder = root.rstrip(os.sep) + os.sep
    name = path[len(folder) :] if path.startswith(folder) else "." if path == root else path
    return name.replace(os.sep, "/")


def listed(names: Sequence[str]) -> str:
    """Names for a message, not all of many."""
    text = ", ".join(names)
    return text if len(text) <= 160 else f"{text[:160]}... ({len(names)})"


def cell_content(cell: Any, reach: Reach) -> tuple[Content, str]:
    """The content of a cell, and a name for it; the name is empty if the cell has none.

    A cell is the bytes of a file; text: a path, an address, base64 or a data URL; a mapping with "bytes" and "path" or
    with one picture; or a list of these, which are several pictures of one prompt.
    """
    parts = list(_parts(cell, reach))
    if len(parts) == 1 and not _is_list(cell):
        return parts[0]
    if len(parts) > MAX_ROW_PICTURES:
        return Unreadable("TooMany", f"more than {MAX_ROW_PICTURES} pictures in one row"), ""
    failed = next((content for content, _ in parts if isinstance(content, Unreadable)), None)
    if failed is not None or not parts:
        return failed or Unreadable("Missing", "no picture in this row: an empty list"), ""
    return Pictures(tuple(content for content, _ in parts)), parts[0][1]


def _is_list(cell: Any) -> bool:
    return isinstance(cell, list | tuple) or (hasattr(cell, "tolist") and getattr(cell, "shape", ()) != ())


def _parts(cell: Any, reach: Reach, depth: int = 0) -> Iterator[tuple[Content, str]]:
    """Content and name of each picture in a cell, one more than `MAX_ROW_PICTURES` at most."""
    if _is_list(cell):
        number = 0
        for one in cell if depth < MAX_CELL_DEPTH else ():
            if isinstance(one, int | float) and not is_missing(one):
                yield _bad("a list of numbers")
                return
            for part in _parts(one, reach, depth + 1):
                number += 1
                yield part
                if number > MAX_ROW_PICTURES:
                    return
        return
    if isinstance(cell, Mapping) and not {"bytes", "path"} & set(cell):
        inner = [cell[name] for name in IMAGE_COLUMNS if is_candidate(cell.get(name))][:1] or _unnamed(cell)
        if len(inner) > 1:
            yield _bad(f"a struct of several: {listed(list(map(str, cell)))}")
            return
        if inner and depth < MAX_CELL_DEPTH:
            yield from _parts(inner[0], reach, depth + 1)
            return
    yield _one(cell, reach)


def _unnamed(struct: Mapping[Any, Any]) -> list[Any]:
    """The fields of a struct that may hold its picture, none of a known name; of text if there are no others."""
    found = [value for value in struct.values() if is_candidate(value)]
    return [value for value in found if not isinstance(value, str)] or found


def is_candidate(value: Any) -> bool:
    """Whether a field of a struct may hold a picture."""
    return isinstance(value, Mapping | str | _BYTES) or _is_list(value)


def _one(cell: Any, reach: Reach) -> tuple[Content, str]:
    path: Any = None
    if isinstance(cell, Mapping):
        data, path = cell.get("bytes"), cell.get("path")
        cell = data if isinstance(data, BadValue) or (isinstance(data, _BYTES) and len(data)) else path
    if isinstance(cell, BadValue):
        return _bad(cell.message) if cell.kind == "BadCell" else (Unreadable(cell.kind, cell.message), "")
    if isinstance(cell, _BYTES) and len(cell):
        return held_bytes(bytes(cell)), PurePosixPath(path).name if isinstance(path, str) and is_path(path) else ""
    if is_missing(cell) or cell in ("", b""):
        return Unreadable("Missing", "no picture in this row: nothing"), ""
    if not isinstance(cell, str):
        return _bad(type(cell).__name__)
    if (inline := inline_text(cell)) is not None:
        return inline, ""
    return (_named_content(plain_path(cell), reach), cell) if is_path(cell) else _bad(short_repr(cell))


def _bad(got: str) -> tuple[Content, str]:
    message = f"a picture is bytes, a path, an address or base64; got {got}"
    return Unreadable("BadCell", message), ""


def _named_content(named: str, reach: Reach) -> Content:
    if named.lower().startswith(("http://", "https://")):
        if reach.urls is None:
            return Unreadable("AddressNotAllowed", f"addresses in rows are read with --urls; got {short_repr(named)}")
        return WebAddress(named, public_only=reach.urls != "any")
    found = find_inside(named, reach)
    if found is None:
        return Unreadable("OutsideInput", f"{short_repr(named)} leads out of {reach.describe()}")
    path, file = found
    return ByteRange(path, file=file)


def is_path(name: str) -> bool:
    """Whether it may be a path or address: no control characters, valid Unicode, no longer than file systems permit."""
    if len(name) > MAX_URL_CHARS:
        return False
    try:
        data = os.fsencode(name)
    except UnicodeEncodeError:
        return False
    if name.lower().startswith(("http://", "https://")):
        return True
    printable = all(code >= 32 and code != 127 for code in data)
    return printable and len(data) <= MAX_NAME_BYTES and all(len(part) <= 255 for part in data.split(b"/"))


def plain_path(name: str) -> str:
    """A path as other programs write it, in quotes, as a `file://` address, or as Label Studio serves it, as a path."""
    if len(name) > 2 and name[0] == name[-1] == '"':
        name = name[1:-1]
    if name.startswith(SERVED_FILES):
        return unquote(name.removeprefix(SERVED_FILES))
    if name.startswith(SERVED_UPLOADS) and not os.path.lexists(name):
        return name.removeprefix("/data/")
    parts = urlsplit(name) if name[:7].lower() == "file://" else None
    return unquote(parts.path) if parts is not None and parts.netloc in ("", "localhost") else name


def find_inside(name: str, reach: Reach) -> tuple[str, FileBelow | None] | None:
    """The path or address of `name` if it stays in what may be reached, symbolic links included, else None.

    With a path comes where it has to lie when it is opened: a folder may have become a link by then.
    """
    tops = [reach.folder] if reach.root is None else [reach.root, reach.folder]
    if not is_local(tops[0]) or not is_local(name):
        url = name if not is_local(name) else f"{tops[0].rstrip('/')}/{name}"
        remote = [top for top in tops if not is_local(top)]
        inside = any(url.startswith(top.rstrip("/") + "/") for top in remote) and ".." not in url.split("/")
        return (url, None) if inside and not name.startswith("/") else None
    path = os.path.join(tops[0], name)
    if "\\" in name and not os.path.lexists(path):  # as Windows writes it
        path = os.path.join(tops[0], name.replace("\\", "/"))
    found = (_file_below(path, top) for top in tops if is_local(top))
    return next(((path, file) for file in found if file is not None), None)


def _file_below(path: str, folder: str) -> FileBelow | None:
    """The file of a path, if it lies below a folder, links resolved."""
    parent, root = (_real_path(os.path.join(os.getcwd(), part)) for part in (os.path.dirname(path), folder))
    real = os.path.join(parent, os.path.basename(path))
    if os.path.islink(real) or os.path.basename(path) in ("", ".", ".."):
        real = os.path.realpath(path)
    top = root.rstrip(os.sep) + os.sep
    return FileBelow(root, real[len(top) :] or ".") if real == root or real.startswith(top) else None


@lru_cache(maxsize=4096)
def _real_path(folder: str) -> str:
    return os.path.realpath(folder)
