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
    LFS_POINTER,
    ContainerError,
    FileBelow,
    describe_format,
    detect_container,
    read_header,
)

Kind = Literal["image", "video"]
_IMAGES = re.compile(
    rb"\x89PNG|\xff\xd8\xff|GIF8[79]a|RIFF.{4}WEBP|II[*+]\0|MM\0[*+]|P[1-7]\s|BM.{4}\0\0\0\0"
    rb"|.{4}ftyp(avi[fs]|hei[cxms]|hev[cxms]|mif1|msf1)|\0\0\0\x0cjP  |\xff\x4f\xff\x51|8BPS|\xff\x0a|\0\0\0\x0cJXL ",
    re.DOTALL,
)
"""Formats of still images; those that are not decoded too, so that they are refused as what they are."""


def media_kind(header: bytes) -> Kind | None:
    """What a file with these first bytes is: an image (a GIF too, of which one frame is taken), a video, or neither."""
    if _IMAGES.match(header):
        return "image"
    try:
        detect_container(header)
    except ContainerError:
        return None
    return "video"


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
