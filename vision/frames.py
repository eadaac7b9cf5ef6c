"""Frames out of a video file: decord where it is installed and can read the file, else PyAV.

Which frames is a sampler's business (`mmspec.interfaces.FrameSampler`). Runs before target and drafter, so that plain
and sped-up decoding see the same frames. Knows nothing of models.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from mmspec.interfaces import FrameSampler

logger = logging.getLogger("mmspec")

MOST_FRAMES = 256
"""Frames that one call may decode."""
MOST_PIXELS = 64_000_000
"""Pixels that one frame may have: 8K is 33 million."""

NO_STREAM = "a video without frames: there is no video stream in it"


@dataclass(frozen=True)
class Frames:
    """RGB pictures, and the second of each."""

    images: list[Image.Image]
    times: list[float]


@dataclass(frozen=True)
class Uniform:
    """`count` frames, each from the middle of one of `count` equal stretches; all of them if there are no more."""

    count: int = 8

    def sample(self, total: int, fps: float) -> list[int]:
        """See `mmspec.interfaces.FrameSampler`."""
        count = min(self.count, total)
        return [(2 * number + 1) * total // (2 * count) for number in range(count)]


Reader = Callable[[str, FrameSampler], Frames]


def read_frames(path: str | os.PathLike[str], sampler: FrameSampler | None = None) -> Frames:
    """The frames of a video that `sampler` (default: eight, evenly) chooses.

    Raises:
        FileNotFoundError: no such file. ValueError: not a video that can be read, or one without frames, or a sampler
            that chooses none, too many, or frames that do not exist. ImportError: no reader is installed.
    """
    file, sampler = Path(path), sampler or Uniform()
    if not file.is_file():
        raise FileNotFoundError(f"no such video: {file}")
    missing, failed = [], []
    for name, read in (("decord", _decord), ("av", _pyav)):
        try:
            return read(str(file), sampler)
        except ImportError:
            missing.append(name)
        except _NoFramesError as error:
            raise ValueError(f"{file}: {error}") from error
        except Exception as error:  # decord raises its own types, and fails on AV1
            failed.append(
                f"{name}: {str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__}"
            )
            logger.debug("%s cannot read %s: %s", name, file, error)
    if not failed:
        raise ImportError(f"reading videos needs one of {', '.join(missing)}: pip install 'mmspec[video]'")
    raise ValueError(f"{file} is not a video that can be read ({'; '.join(failed)[:300]})")


class _NoFramesError(Exception):
    """The file is a video, but there is nothing to return."""


def _chosen(sampler: FrameSampler, total: int, fps: float) -> list[int]:
    """The sampler's choice, checked."""
    if total < 1:
        raise _NoFramesError("a video without frames")
    chosen = sampler.sample(total, fps)
    if not chosen or len(chosen) > MOST_FRAMES:
        raise _NoFramesError(f"between 1 and {MOST_FRAMES} frames can be read; the sampler chose {len(chosen)}")
    if any(not 0 <= index < total for index in chosen) or list(chosen) != sorted(set(chosen)):
        raise _NoFramesError(f"the sampler must choose rising numbers below {total}; it chose {chosen[:8]}")
    return chosen


def _check_size(width: int, height: int) -> None:
    if width * height > MOST_PIXELS:
        raise _NoFramesError(f"frames of {width} x {height} pixels; {MOST_PIXELS} pixels is the limit")


def _decord(path: str, sampler: FrameSampler) -> Frames:
    import decord

    try:
        video = decord.VideoReader(path, num_threads=1)
    except Exception as error:
        if "cannot find video stream" in str(error):
            raise _NoFramesError(NO_STREAM) from error
        raise
    fps = float(video.get_avg_fps()) or 1.0
    chosen = _chosen(sampler, len(video), fps)
    height, width = video[0].shape[:2]
    _check_size(width, height)
    array = video.get_batch(chosen).asnumpy()
    return Frames([Image.fromarray(frame) for frame in array], [index / fps for index in chosen])


def _pyav(path: str, sampler: FrameSampler) -> Frames:
    import av

    with av.open(path) as container:
        if not container.streams.video:
            raise _NoFramesError(NO_STREAM)
        stream = container.streams.video[0]
        _check_size(stream.codec_context.width, stream.codec_context.height)
        total = stream.frames or sum(1 for _ in container.decode(stream))  # some containers do not say
        fps = float(stream.average_rate or 1)
        chosen = _chosen(sampler, total, fps)
        container.seek(0)
        return _picked(container.decode(stream), chosen, fps)


def _picked(decoded: Any, chosen: Sequence[int], fps: float) -> Frames:
    wanted, images, times = set(chosen), list[Image.Image](), list[float]()
    for index, frame in enumerate(decoded):
        if index in wanted:
            images.append(frame.to_image())
            times.append(frame.time if frame.time is not None else index / fps)
        if index >= chosen[-1]:
            break
    if not images:
        raise _NoFramesError("a video without frames")
    return Frames(images, times)


__all__ = ["Frames", "Uniform", "read_frames"]
