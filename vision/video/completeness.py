"""Whether a video file is cut: its length against what its container declares. Half a download is not a clip.

Reads only headers of the outermost elements. A file that declares nothing (a recording that was never closed) counts as
cut if it ends in the middle of a packet.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from typing import IO

MAX_ELEMENTS = 1 << 20
"""Outermost elements that are read: boxes, pages, tags."""
MIN_SHARE = 0.99
"""A file that has this share of its declared length counts as whole."""
_SEGMENT, _EBML = 0x18538067, 0x1A45DFA3
_ASF_FILE_PROPERTIES = bytes.fromhex("a1dcab8c47a9cf118ee400c00c205365")


def declared_length(file: IO[bytes], demuxer: str) -> int:
    """The length in bytes that the container of a file declares, or that its last element needs; 0 if unknown.

    Args:
        file: Its content, seekable.
        demuxer: FFmpeg's name of the container.
    """
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    measure = _MEASURES.get(demuxer)
    try:
        return 0 if measure is None else measure(file, size)
    except (struct.error, IndexError):  # the file ends within a header
        return size + 1


def find_cut(file: IO[bytes], demuxer: str) -> tuple[int, int] | None:
    """(bytes of the file, bytes that it should have) of a file that is cut, else None."""
    declared = declared_length(file, demuxer)
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    if demuxer in _WITHOUT_LENGTH:
        return (size, declared) if declared > size else None
    return (size, declared) if size < MIN_SHARE * declared else None


def _mov(file: IO[bytes], size: int) -> int:
    """End of the last box."""
    at = 0
    for _ in range(MAX_ELEMENTS):
        if at + 8 > size:
            break
        file.seek(at)
        length, _kind, large = struct.unpack(">I4sQ", (file.read(16) + bytes(8))[:16])
        length = large if length == 1 else length
        if length < 8:  # 0: up to the end of the file
            return 0
        at += length
    return at


def _matroska(file: IO[bytes], size: int) -> int:
    """End of the segment; live recordings declare none."""
    at = 0
    for _ in range(8):
        file.seek(at)
        head = file.read(12)
        name_length = _vint_length(head[0])
        name = int.from_bytes(head[:name_length], "big")
        data_length = _vint_length(head[name_length])
        value = int.from_bytes(head[name_length : name_length + data_length], "big") & ((1 << 7 * data_length) - 1)
        at += name_length + data_length + value
        if name == _SEGMENT:
            return 0 if value == (1 << 7 * data_length) - 1 else at
        if at >= size:
            break
    return 0


def _vint_length(first: int) -> int:
    """Bytes of a number of EBML, from its first byte."""
    if not first:
        raise struct.error("a number of more than eight bytes")
    return 9 - first.bit_length()


def _avi(file: IO[bytes], size: int) -> int:
    """End of the last RIFF list; recorders that were interrupted leave 0 or the largest number."""
    at = 0
    for _ in range(MAX_ELEMENTS):
        file.seek(at)
        head = file.read(8)
        if len(head) < 8 or head[:4] != b"RIFF":
            break
        length = struct.unpack("<I", head[4:])[0]
        if length in (0, 0xFFFFFFFF):
            return 0
        at += 8 + length + length % 2
    return at - 1 if at == size + 1 else at


def _asf(file: IO[bytes], size: int) -> int:
    """The length in the file properties, unless it is a broadcast."""
    head = file.read(1 << 16)
    at = head.find(_ASF_FILE_PROPERTIES)
    if at < 0 or len(head) < at + 92:
        return 0
    is_broadcast = head[at + 88] & 1
    return 0 if is_broadcast else int(struct.unpack_from("<Q", head, at + 40)[0])


def _flv(file: IO[bytes], size: int) -> int:
    """End of the last tag."""
    at = 9
    for _ in range(MAX_ELEMENTS):
        file.seek(at + 4)
        head = file.read(11)
        if len(head) < 11:
            return at if size in (at, at + 4) else max(at, size + 1)
        if head[0] & 0x1F not in (8, 9, 18):
            break
        at += 4 + 11 + int.from_bytes(head[1:4], "big")
    return at


def _ogg(file: IO[bytes], size: int) -> int:
    """End of the last page."""
    at = 0
    for _ in range(MAX_ELEMENTS):
        file.seek(at)
        head = file.read(27 + 255)
        if head[:4] != b"OggS":
            break
        count = head[26]
        if len(head) < 27 + count:
            return size + 1
        at += 27 + count + sum(head[27 : 27 + count])
    return at if at > size else 0


def _packets(file: IO[bytes], size: int) -> int:
    """End of the last packet of a transport stream."""
    head = file.read(4 * 192)
    packet, offset = (188, 0) if set(head[: 4 * 188 : 188]) == {0x47} else (192, 4)
    last = size - size % packet
    file.seek(last + offset)
    return last + packet if size % packet and file.read(1) == b"\x47" else 0


def _packs(file: IO[bytes], size: int) -> int:
    """End of the last pack of a program stream whose packs have 2048 bytes, as on discs."""
    file.seek(2048)
    if file.read(4) != b"\0\0\1\xba" or size % 2048 in (0, 4):
        return 0
    last = size - size % 2048
    file.seek(last)
    return last + 2048 if file.read(4) == b"\0\0\1\xba" else 0


_MEASURES: dict[str, Callable[[IO[bytes], int], int]] = {
    "mov": _mov,
    "matroska": _matroska,
    "avi": _avi,
    "asf": _asf,
    "flv": _flv,
    "ogg": _ogg,
    "mpegts": _packets,
    "mpeg": _packs,
}
_WITHOUT_LENGTH = {"flv", "ogg", "mpegts", "mpeg"}
