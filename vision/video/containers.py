"""Video containers, detected by content: an allow-list that is checked before any demuxer starts.

FFmpeg also opens text files that name other files or hosts (HLS, DASH, concat, SDP) and file name patterns; none of
these is in the list. `ContainerFile` opens a file once, so the bytes that are checked are those that are decoded.
Independent of the decoders.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass

from mmspec.vision.video.sandbox import allow_open

HEADER_BYTES = 4096
"""Number of leading bytes that are inspected."""


class ContainerError(ValueError):
    """A file is in no allowed container; the message names the allowed ones and the format found."""


@dataclass(frozen=True)
class Container:
    """A video container.

    Attributes:
        name: Name in messages.
        demuxer: The only FFmpeg demuxer that may open it.
        matches: Whether the first bytes of a file are of this container.
    """

    name: str
    demuxer: str
    matches: Callable[[bytes], bool]


def _mov(header: bytes) -> bool:
    """Starts with a box of ISO media or QuickTime. Only `mdat` may have a size of 16 MiB or more."""
    boxes = (b"ftyp", b"moov", b"moof", b"styp", b"sidx", b"free", b"skip", b"wide", b"pnot", b"uuid")
    return header[4:8] == b"mdat" or (header[:1] == b"\0" and header[4:8] in boxes)


def _matroska(header: bytes) -> bool:
    """Starts with an EBML header that names its document type, which FFmpeg requires too."""
    return header.startswith(b"\x1a\x45\xdf\xa3") and any(name in header[:1024] for name in (b"matroska", b"webm"))


def _transport(header: bytes) -> bool:
    """Sync bytes one packet apart, with or without a timestamp before each packet."""
    for packet_size, offset in ((188, 0), (192, 4)):
        sync_bytes = header[offset : offset + 5 * packet_size : packet_size]
        if len(sync_bytes) >= 3 and set(sync_bytes) == {0x47}:
            return True
    return False


CONTAINERS = (
    Container("MP4/MOV", "mov", _mov),
    Container("Matroska/WebM", "matroska", _matroska),
    Container("AVI", "avi", lambda header: header[:4] == b"RIFF" and header[8:12] == b"AVI "),
    Container("MPEG-TS", "mpegts", _transport),
    Container("MPEG-PS", "mpeg", lambda header: header.startswith(b"\0\0\1\xba")),
    Container("GIF", "gif", lambda header: header[:6] in (b"GIF87a", b"GIF89a")),
    Container("Ogg", "ogg", lambda header: header.startswith(b"OggS\0")),
    Container("FLV", "flv", lambda header: header[:4] == b"FLV\1" and header[5:6] == b"\0"),
    Container("MPEG video", "mpegvideo", lambda header: header.startswith(b"\0\0\1\xb3")),
    Container("DV", "dv", lambda header: header[:3] == b"\x1f\x07\0" and header[3:4] in b"\x3f\xbf"),
    Container("WMV/ASF", "asf", lambda header: header.startswith(bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c"))),
)
"""The allow-list. References to other files inside a container are not followed: see `pyav_reader`."""
ALLOWED_CONTAINERS = ", ".join(container.name for container in CONTAINERS)

LFS_POINTER = "a Git LFS pointer, not the file itself: git lfs pull fetches it"
"""What a file is that a clone without Git LFS has in place of a large one."""
_KNOWN_FORMATS: tuple[tuple[str, str], ...] = (
    (r"\Aversion https://git-lfs\.github\.com/", LFS_POINTER),
    (r"\A(\xef\xbb\xbf)?\s*#EXTM3U", "an HLS playlist"),
    (r"\A(\xef\xbb\xbf)?\s*ffconcat version", "a concat script"),
    (r"<MPD[\s>]", "a DASH manifest"),
    (r"\Av=0\r?\n", "an SDP file"),
    (r"\A\s*\[(playlist|Reference)\]", "a playlist"),
    (r"\A(%!PS|\xc5\xd0\xd3\xc6)", "an EPS or PostScript file"),
    (r"\A.{0,1024}%PDF-", "a PDF file"),
    (r"\A\W{0,8}<[?!s].{0,3000}?<?svg[\s>]", "an SVG drawing"),
    (r"\A.{4}ftyp(heic|heix|heim|heis|hevc|hevx|mif1|msf1)", "a HEIC image"),
    (r"\A.{4}ftypavif", "an AVIF image"),
    (r"\A.{4}(ftyp|moov|mdat)|\A\x1a\x45\xdf\xa3|\ARIFF.{4}AVI ", "a video"),
    (r"\A\x89PNG", "a PNG image"),
    (r"\A\xff\xd8\xff", "a JPEG image"),
    (r"\ARIFF.{4}WEBP", "a WebP image"),
    (r"\A(II\*\x00|MM\x00\*)", "a TIFF image"),
    (r"\A8BPS", "a Photoshop file"),
    (r"\A\x00\x00\x01\x00", "an icon"),
    (r"\A(\x00\x00\x00\x0cjP  |\xff\x4f\xff\x51)", "a JPEG 2000 image"),
    (r"\A(\xff\x0a|\x00\x00\x00\x0cJXL )", "a JPEG XL image; convert it to PNG or JPEG"),
    (r"\APK\x03\x04", "a ZIP archive"),
    (r"\A(\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd)", "compressed (gzip, bzip2, xz or zstd)"),
    (r"\APAR1", "a Parquet file"),
    (r"\A.{257}ustar", "a tar archive"),
)


def describe_format(header: bytes) -> str:
    """The format of a file for messages: a known name, or its first bytes."""
    text = header.decode("latin-1")
    for pattern, name in _KNOWN_FORMATS:
        if re.search(pattern, text, re.DOTALL):
            return name
    return f"a file that begins with {header[:12]!r}" if header else "an empty file"


def detect_container(header: bytes) -> Container:
    """The container of a file with these first bytes.

    Raises:
        ContainerError: It is none of the allowed ones.
    """
    for container in CONTAINERS:
        if container.matches(header):
            return container
    raise ContainerError(f"allowed containers: {ALLOWED_CONTAINERS}; received {describe_format(header)}")


@dataclass(frozen=True, slots=True)
class FileBelow(os.PathLike[str]):
    """A file that was found to lie below a folder, and has to when it is opened: no link is on the way to it then.

    Attributes:
        folder: Absolute path; links on the way to it are followed.
        name: Of the file, from there, links resolved.
    """

    folder: str
    name: str

    def __fspath__(self) -> str:
        return os.path.join(self.folder, self.name)

    def open(self, flags: int) -> int:
        """A descriptor of the file: each folder on the way is opened from the one before.

        Raises:
            OSError: It cannot be opened, or a link is on the way now.
        """
        *folders, last = self.name.split(os.sep)
        if os.pardir in (*folders, last):
            raise OSError(f"{self.name} is not resolved: it has {os.pardir}")
        if os.open not in os.supports_dir_fd:  # Windows
            if os.path.realpath(self) != os.path.join(os.path.realpath(self.folder), self.name):
                raise OSError(f"{self.name} is a link now, or behind one")
            return os.open(self, flags)
        search = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY
        here = os.open(self.folder, search)
        try:
            for folder in folders:
                here, outer = os.open(folder, search | os.O_NOFOLLOW, dir_fd=here), here
                os.close(outer)
            return os.open(last, flags | os.O_NOFOLLOW, dir_fd=here)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise OSError(error.errno, f"{self.name} is a link now, or behind one") from error
            raise
        finally:
            os.close(here)


def open_regular_file(path: str | FileBelow) -> int:
    """Open a regular file for reading and return its descriptor. Does not block on pipes and devices.

    Raises:
        OSError: It cannot be opened, or is not a regular file.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with allow_open(2):
        descriptor = path.open(flags) if isinstance(path, FileBelow) else os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{os.fspath(path)} is not a regular file")
    return descriptor


def read_header(path: str | FileBelow) -> bytes:
    """The first `HEADER_BYTES` bytes of a file."""
    with io.FileIO(open_regular_file(path)) as file:
        return file.read(HEADER_BYTES) or b""


class ContainerFile:
    """An open video file of an allowed container.

    Args:
        source: A path, or the content of a file.

    Attributes:
        container: The detected container.

    Raises:
        ContainerError: It is in no allowed container.
        OSError: It cannot be opened.
    """

    def __init__(self, source: str | bytes | FileBelow) -> None:
        self._bytes, self._descriptor = b"", -1
        if isinstance(source, bytes):
            self._bytes, header = source, source[:HEADER_BYTES]
            self.container = detect_container(header)
            return
        self._descriptor = open_regular_file(source)
        try:
            header = self.open_stream().read(HEADER_BYTES) or b""
            self.container = detect_container(header)
        except BaseException:
            self.close()
            raise

    def open_stream(self) -> io.BytesIO | io.FileIO:
        """The content as a file object at its start. Use one at a time; closing it keeps the descriptor open."""
        if self._descriptor < 0:
            return io.BytesIO(self._bytes)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        return io.FileIO(self._descriptor, closefd=False)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()
