"""Width and height of a picture from the first bytes of its file, for planning. Decodes nothing.

Numbers at known offsets of PNG, JPEG, WebP, GIF, BMP and TIFF; of what is damaged or turned by EXIF they may be wrong,
which makes a batch larger or smaller and nothing else.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

from mmspec.app.io.content import ByteRange, Content, InlineBytes, is_local
from mmspec.app.io.item import Item

SIZE_HEADER_BYTES = 1 << 16
"""Bytes in which a size is looked for: more than most metadata before it."""
Size = tuple[int, int]
"""Width and height."""


def picture_sizes(item: Item) -> list[Size | None]:
    """The size of each picture of a row; None for one that is not known without reading it whole."""
    return [header_size(_start(content)) for content in item.contents]


def _start(content: Content) -> bytes:
    """The first bytes of what is on this machine; none of what would have to be fetched, or cannot be read."""
    if isinstance(content, InlineBytes):
        return content.data[:SIZE_HEADER_BYTES]
    if not isinstance(content, ByteRange) or not is_local(content.url):
        return b""
    try:
        return content.read_start(SIZE_HEADER_BYTES)
    except (OSError, ValueError):
        return b""


def header_size(data: bytes) -> Size | None:
    """Width and height by a file's first bytes; None if they do not say."""
    try:
        size = next((read(data) for start, read in _FORMATS if re.match(start, data, re.DOTALL)), None)
    except struct.error:  # cut
        return None
    return size if size is not None and min(size) > 0 else None


def _at(layout: str, mask: int = -1) -> Callable[[bytes], Size]:
    """Reads two numbers at one place."""

    def read(data: bytes) -> Size:
        width, height = struct.unpack_from(layout, data)
        return width & mask, abs(height) & mask

    return read


def _webp_lossless(data: bytes) -> Size:
    (bits,) = struct.unpack_from("<21xI", data)
    return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1


def _webp_extended(data: bytes) -> Size:
    low, middle, high = struct.unpack_from("<24xHHH", data)
    return (low | (middle & 0xFF) << 16) + 1, (middle >> 8 | high << 8) + 1


def _jpeg(data: bytes) -> Size | None:
    """The first frame header (SOF), behind segments of metadata."""
    place = 2
    while place + 9 <= len(data):
        if data[place] != 0xFF:
            return None
        marker = data[place + 1]
        if marker == 0xFF or 0xD0 <= marker <= 0xD8 or marker == 1:  # fill bytes, markers without a segment
            place += 1 if marker == 0xFF else 2
            continue
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", data, place + 5)
            return width, height
        (length,) = struct.unpack_from(">H", data, place + 2)
        place += 2 + max(2, length)
    return None


def _tiff(data: bytes) -> Size | None:
    order = "<" if data[:2] == b"II" else ">"
    (place,) = struct.unpack_from(f"{order}I", data, 4)
    (count,) = struct.unpack_from(f"{order}H", data, place)
    found: dict[int, int] = {}
    for entry in range(min(count, 64)):
        tag, kind = struct.unpack_from(f"{order}HH", data, place + 2 + 12 * entry)
        if tag in (256, 257):
            form = "H" if kind == 3 else "I"
            (found[tag],) = struct.unpack_from(f"{order}{form}", data, place + 10 + 12 * entry)
    return (found[256], found[257]) if len(found) == 2 else None


_FORMATS: tuple[tuple[bytes, Callable[[bytes], Size | None]], ...] = (
    (rb"\x89PNG\r\n\x1a\n", _at(">16xII")),
    (rb"GIF8", _at("<6xHH")),
    (rb"BM", _at("<18xii")),
    (rb"RIFF.{8}VP8 ", _at("<26xHH", 0x3FFF)),
    (rb"RIFF.{8}VP8L", _webp_lossless),
    (rb"RIFF.{8}VP8X", _webp_extended),
    (rb"\xff\xd8\xff", _jpeg),
    (rb"II\*\0|MM\0\*", _tiff),
)
