"""Video files to the frames that a model is shown, within limits; what is wrong becomes an `ImageError` of one line."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from mmspec.app.errors import one_line
from mmspec.app.images import ImageError, Shown, check_file, check_size, load_image
from mmspec.app.settings import FRAMES, MAX_PIXELS

SUFFIXES = frozenset((".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ogv"))


def load_clip(path: Path, frames: int = FRAMES, max_pixels: int = MAX_PIXELS) -> tuple[Image.Image, ...]:
    """Up to `frames` RGB frames of the video in `path`, evenly spread; all of a shorter one."""
    from mmspec.vision.frames import Uniform, read_frames

    check_file(path)
    try:
        read = read_frames(path, Uniform(frames))
    except ImportError as error:
        raise ImageError("NoVideoReader", one_line(error)) from error
    except MemoryError as error:
        raise ImageError("OutOfMemory", "not enough memory to decode it") from error
    except Exception as error:
        told = one_line(error, 600).removeprefix(f"{path}: ").replace(str(path), path.name)
        raise ImageError("BrokenVideo", told) from error
    check_size(read.metadata.width, read.metadata.height, max_pixels)  # large ones are read at a smaller size
    return tuple(read.images)


def load_shown(path: Path, frames: int = FRAMES, max_pixels: int = MAX_PIXELS) -> Shown:
    """The frames of a file that is named like a video, else the picture in it."""
    if path.suffix.lower() in SUFFIXES:
        return load_clip(path, frames, max_pixels)
    return load_image(path, max_pixels)


__all__ = ["SUFFIXES", "load_clip", "load_shown"]
