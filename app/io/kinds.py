"""Whether bytes are a picture or a clip, by their first bytes: names of files, cells and addresses may say anything.

Reads headers only; whether they can be decoded is found out in the decoder process.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import Literal

from mmspec.app.errors import UsageError
from mmspec.vision.video.containers import (
    HEADER_BYTES,
    LFS_POINTER,
    ContainerError,
    FileBelow,
    describe_format,
    detect_container,
    read_header,
)

Kind = Literal["image", "video"]
_IMAGES = (
    (rb"\xff\xd8\xff", "jpg"), (rb"\x89PNG", "png"), (rb"GIF8[79]a", "gif"), (rb"RIFF.{4}WEBP", "webp"),
    (rb"BM.{4}\0\0\0\0", "bmp"), (rb"II[*+]\0|MM\0[*+]", "tiff"), (rb".{4}ftypavi[fs]", "avif"),
    (rb".{4}ftyp(hei[cxms]|hev[cxms]|mif1|msf1)", "heic"), (rb"P[14]\s", "pbm"), (rb"P[25]\s", "pgm"),
    (rb"P[36]\s", "ppm"), (rb"P7\s", "pam"), (rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51", "jp2"), (rb"8BPS", "psd"),
    (rb"\xff\x0a|\0\0\0\x0cJXL ", "jxl"),
)  # fmt: skip
"""First bytes of still images -> their suffix; those that are not decoded too, so that they are refused as such."""
_CLIPS = {"avi": "avi", "mpegts": "ts", "mpeg": "mpg", "mpegvideo": "mpg", "ogg": "ogv", "flv": "flv", "asf": "wmv"}
"""FFmpeg's name of a container -> the suffix of a clip in it."""


def media_kind(header: bytes) -> Kind | None:
    """What a file with these first bytes is: an image (a GIF too, of which one frame is taken), a video, or neither."""
    if _image_suffix(header) is not None:
        return "image"
    try:
        detect_container(header)
    except ContainerError:
        return None
    return "video"


def _image_suffix(header: bytes) -> str | None:
    return next((suffix for start, suffix in _IMAGES if re.match(start, header, re.DOTALL)), None)


def media_suffix(data: bytes) -> str:
    """The suffix of a picture or clip by its first bytes; "bin" for what is neither."""
    header = data[:HEADER_BYTES]
    if (suffix := _image_suffix(header)) is not None:
        return suffix
    try:
        demuxer = detect_container(header).demuxer
    except ContainerError:
        return "bin"
    if demuxer == "matroska":
        return "webm" if b"webm" in header[:1024] else "mkv"
    if demuxer == "mov":
        brand = header[8:12] if header[4:8] == b"ftyp" else b"qt  "
        return "3gp" if brand.startswith(b"3g") else "mov" if brand == b"qt  " else "mp4"
    return _CLIPS.get(demuxer, demuxer)


def is_clip(header: bytes, named_video: bool) -> bool:
    """Whether to decode it as a video: by content; what is not known by content is what its name says."""
    kind = media_kind(header)
    return named_video if kind is None else kind == "video"


def refuse_pointer(path: str | FileBelow) -> None:
    """
    Raises:
        UsageError: a list, table or archive is what a clone without Git LFS has in its place.
    """
    if os.path.isfile(path):
        with suppress(OSError):  # its reader has the message
            if describe_format(read_header(path)) == LFS_POINTER:
                raise UsageError(f"{os.fspath(path)} is {LFS_POINTER}")
