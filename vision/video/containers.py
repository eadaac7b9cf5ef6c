"""Which container a video file is, by its content: an allow-list, checked before any demuxer is started.

FFmpeg also opens text files that name other files or hosts (HLS, DASH, concat, SDP) and patterns of file names; none of
these is a container. `Input` opens a file once, so that what was checked is what is decoded. Knows no decoder.
"""

from __future__ import annotations

import io
import os
import re
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass

from mmspec.vision.video.sandbox import files

HEAD = 4096
"""Bytes from the start of a file that are looked at."""


class ContainerError(ValueError):
    """A file that is none of the allowed containers; the message names them and what was received."""


@dataclass(frozen=True)
class Container:
    """A kind of video file.

    Attributes:
        name: for messages. demuxer: the one demuxer of FFmpeg that may open it. matches: whether the first bytes of a
            file are of this kind. probed: whether a library that chooses the demuxer by itself chooses this one too;
            such a library is not given the file otherwise.
    """

    name: str
    demuxer: str
    matches: Callable[[bytes], bool]
    probed: bool = True


def _mov(head: bytes) -> bool:
    """A box of ISO media or QuickTime comes first. A size of 16 MiB or more is usual of `mdat` alone."""
    boxes = (b"ftyp", b"moov", b"moof", b"styp", b"sidx", b"free", b"skip", b"wide", b"pnot", b"uuid")
    return head[4:8] == b"mdat" or (head[:1] == b"\0" and head[4:8] in boxes)


def _matroska(head: bytes) -> bool:
    """An EBML header that names its document type, as FFmpeg also demands."""
    return head.startswith(b"\x1a\x45\xdf\xa3") and any(name in head[:1024] for name in (b"matroska", b"webm"))


def _transport(head: bytes) -> bool:
    """Sync bytes at the distance of packets, with or without time codes before them."""
    for packet, first in ((188, 0), (192, 4)):
        marks = head[first : first + 5 * packet : packet]
        if len(marks) >= 3 and set(marks) == {0x47}:
            return True
    return False


CONTAINERS = (
    Container("MP4/MOV", "mov", _mov),
    Container("Matroska/WebM", "matroska", _matroska),
    Container("AVI", "avi", lambda head: head[:4] == b"RIFF" and head[8:12] == b"AVI "),
    Container("MPEG-TS", "mpegts", _transport, probed=False),  # its probe has no certain answer
    Container("MPEG-PS", "mpeg", lambda head: head.startswith(b"\0\0\1\xba")),
    Container("GIF", "gif", lambda head: head[:6] in (b"GIF87a", b"GIF89a")),
    Container("Ogg", "ogg", lambda head: head.startswith(b"OggS\0")),
    Container("FLV", "flv", lambda head: head[:4] == b"FLV\1" and head[5:6] == b"\0"),
    Container("WMV/ASF", "asf", lambda head: head.startswith(bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c"))),
)
"""All that is opened. Nothing in them is followed to another file: see `mmspec.vision.video.backends`."""
ALLOWED = ", ".join(container.name for container in CONTAINERS)

_KNOWN: tuple[tuple[str, str], ...] = (
    (r"\A(\xef\xbb\xbf)?\s*#EXTM3U", "an HLS playlist"),
    (r"\A(\xef\xbb\xbf)?\s*ffconcat version", "a concat script"),
    (r"<MPD[\s>]", "a DASH manifest"),
    (r"\Av=0\r?\n", "an SDP file"),
    (r"\A\s*\[(playlist|Reference)\]", "a playlist"),
    (r"\A(%!PS|\xc5\xd0\xd3\xc6)", "an EPS or PostScript file"),
    (r"\A.{0,1024}%PDF-", "a PDF file"),
    (r"\A\W{0,8}<[?!s].{0,3000}?<?svg[\s>]", "an SVG drawing"),
    (r"\A.{4}ftyp(heic|heix|heim|heis|hevc|hevx|mif1|msf1)", "a HEIC picture (install pillow-heif to read it)"),
    (r"\A.{4}ftypavif", "an AVIF picture"),
    (r"\A.{4}(ftyp|moov|mdat)|\A\x1a\x45\xdf\xa3|\ARIFF.{4}AVI ", "a video"),
    (r"\A\x89PNG", "a PNG picture"),
    (r"\A\xff\xd8\xff", "a JPEG picture"),
    (r"\ARIFF.{4}WEBP", "a WebP picture"),
    (r"\A(II\*\x00|MM\x00\*)", "a TIFF picture"),
    (r"\A8BPS", "a Photoshop file"),
    (r"\A\x00\x00\x01\x00", "an icon"),
    (r"\A(\x00\x00\x00\x0cjP  |\xff\x4f\xff\x51)", "a JPEG 2000 picture"),
    (r"\APK\x03\x04", "a ZIP archive"),
)


def named(head: bytes) -> str:
    """What a file seems to be, for messages: the name of a format, or its first bytes."""
    text = head.decode("latin-1")
    for pattern, name in _KNOWN:
        if re.search(pattern, text, re.DOTALL):
            return name
    return f"a file that begins with {head[:12]!r}" if head else "an empty file"


def container_of(head: bytes) -> Container:
    """The container whose first bytes these are.

    Raises:
        ContainerError: none of the allowed ones.
    """
    for container in CONTAINERS:
        if container.matches(head):
            return container
    raise ContainerError(f"allowed containers: {ALLOWED}; received {named(head)}")


def certain(head: bytes) -> bool:
    """Whether no probe for text can match: these read up to the first zero byte, and there is no text before it.

    decord also takes the content up to there for a file name.
    """
    start, zero, _ = head.partition(b"\0")
    return bool(zero) and len(start) < 256 and not set(start) & set(b"\n\r<%*?/[{")


def opened(path: str) -> int:
    """A file descriptor of a regular file; pipes and devices are not waited for.

    Raises:
        OSError: it cannot be opened, or is not regular.
    """
    with files(1):
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path} is not a regular file")
    return handle


def head_of(path: str) -> bytes:
    """The first bytes of a file."""
    with io.FileIO(opened(path)) as file:
        return file.read(HEAD) or b""


class Input:
    """A video file, or what is in one, that is open and of an allowed container.

    Raises:
        ContainerError: it is of no allowed container. OSError: it cannot be opened.
    """

    def __init__(self, source: str | bytes) -> None:
        self._bytes, self._path, self._handle = b"", "", -1
        if isinstance(source, bytes):
            self._bytes, head = source, source[:HEAD]
            self.container, self._certain = container_of(head), certain(head)
            return
        self._path, self._handle = os.path.abspath(source), opened(source)
        try:
            head = self.stream().read(HEAD) or b""
            self.container, self._certain = container_of(head), certain(head)
        except BaseException:
            self.close()
            raise

    def stream(self) -> io.BytesIO | io.FileIO:
        """The content as a Python file at its start; one is used at a time. Closing it leaves the input open."""
        if self._handle < 0:
            return io.BytesIO(self._bytes)
        os.lseek(self._handle, 0, os.SEEK_SET)
        return io.FileIO(self._handle, closefd=False)

    def native(self) -> str | bytes:
        """The content for a library that opens files by itself: bytes, or a path that leads to this very file.

        Raises:
            ContainerError: such a library might take it for something else.
        """
        if not self.container.probed or not self._certain:
            raise ContainerError(f"{self.container.name} with such a header is read by PyAV only")
        if self._handle < 0:
            return self._bytes
        os.lseek(self._handle, 0, os.SEEK_SET)
        folder = {"linux": "/proc/self/fd", "darwin": "/dev/fd"}.get(sys.platform, "")
        link = f"{folder}/{self._handle}"
        return link if folder and os.path.exists(link) else self._path  # Windows has no such links

    def close(self) -> None:
        """Close the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __del__(self) -> None:
        self.close()


__all__ = [
    "ALLOWED",
    "CONTAINERS",
    "HEAD",
    "Container",
    "ContainerError",
    "Input",
    "container_of",
    "head_of",
    "named",
    "opened",
]
