"""Video files to the frames that a model gets, within limits; every problem is an `ImageError` of one line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mmspec.app.caption.config import MAX_PIXELS
from mmspec.app.caption.option_fields import FRAMES
from mmspec.app.errors import one_line
from mmspec.app.io.images import (
    ImageError,
    Media,
    Video,
    check_file,
    check_image_size,
    convert_decoder_errors,
    load_image,
)
from mmspec.app.io.kinds import is_clip
from mmspec.vision.video.containers import HEADER_BYTES, FileBelow, read_header

if TYPE_CHECKING:
    from mmspec.interfaces import FrameSampler
    from mmspec.vision.video.decoder_pool import DecoderPool

_FORMATS = (
    ".mp4 .m4v .mov .qt .mkv .webm .avi .divx .mpg .mpeg .mpe .m1v .m2v .mpv .vob .mod .ogv .ogg .ogm .wmv .asf .flv "
    ".f4v .3gp .3g2 .ts .mts .m2ts .m2t .tod .dv"
)
VIDEO_SUFFIXES = frozenset(_FORMATS.split())
AMBIGUOUS_SUFFIXES = frozenset({".ts", ".ogg", ".mod", ".asf", ".mpv", ".dv", ".tod"})
"""Those that other kinds of files have too."""


def load_video(
    source: Path | FileBelow | bytes,
    frames: int | FrameSampler = FRAMES,
    max_pixels: int = MAX_PIXELS,
    isolated: bool | DecoderPool = False,
) -> Video:
    """RGB frames of a video.

    Args:
        source: a path, or the content of a file.
        frames: number of evenly spread frames (all of a shorter video), or a sampler.
        max_pixels: limit of width times height.
        isolated: decode in another process, as in `mmspec.vision.video.frames.read_frames`: a crash of the decoder is
            then an error of this file.

    Raises:
        ImageError: the file cannot be read or decoded.
    """
    from mmspec.vision.video.frames import Uniform, read_frames

    path = Path("video") if isinstance(source, bytes) else Path(source)
    if not isinstance(source, bytes):
        check_file(path)
    with convert_decoder_errors("BrokenVideo", path):
        read = read_frames(source, Uniform(frames) if isinstance(frames, int) else frames, isolated=isolated)
    check_image_size(read.metadata.width, read.metadata.height, max_pixels)  # large ones are decoded at a smaller size
    return Video(tuple(read.images), read.metadata.for_processor())


def load_media(
    source: Path | FileBelow | bytes,
    frames: int | FrameSampler = FRAMES,
    max_pixels: int = MAX_PIXELS,
    isolated: bool | DecoderPool = False,
    named_video: bool | None = None,
) -> Media:
    """The frames of a video or the image in a file, whatever its name says. Arguments as for `load_video`.

    Args:
        named_video: what to take content of no known kind for; None: by the suffix of the path.

    Raises:
        ImageError: the file cannot be read or decoded.
    """
    if not isinstance(source, bytes):
        check_file(Path(source))
        named_video = Path(source).suffix.lower() in VIDEO_SUFFIXES if named_video is None else named_video
        try:
            header = read_header(source if isinstance(source, FileBelow) else str(source))
        except OSError as error:
            raise ImageError("Unreadable", one_line(error)) from error
    else:
        header = source[:HEADER_BYTES]
    if is_clip(header, bool(named_video)):
        return load_video(source, frames, max_pixels, isolated)
    return load_image(source, max_pixels, isolated)
