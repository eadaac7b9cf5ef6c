"""Reads frames of a video: those that a viewer of it sees, by their presentation timestamps.

Frames are selected by a sampler (`mmspec.interfaces.FrameSampler`), before target and drafter run, so speculative
decoding and the baseline see the same frames. Files can be decoded in another process
(`mmspec.vision.video.decoder_pool`). Independent of the models.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from mmspec.hints import install_hint
from mmspec.interfaces import FrameSampler
from mmspec.vision.video.backends import BACKENDS, NoFramesError, VideoReader
from mmspec.vision.video.containers import HEADER_BYTES, ContainerError, FileBelow, detect_container, read_header
from mmspec.vision.video.decode import MAX_FRAMES, Frames, SamplerError, read_with
from mmspec.vision.video.decode import FrameMetadata as FrameMetadata
from mmspec.vision.video.decoder_pool import DecoderPool, retry_if_killed
from mmspec.vision.video.reader import VideoSource
from mmspec.vision.video.samplers import Fps, Uniform, check_positive_int, check_positive_number
from mmspec.vision.video.samplers import MostDifferent as MostDifferent
from mmspec.vision.video.worker_process import DecoderCrashedError, DecoderHungError, DecoderStartError

logger = logging.getLogger("mmspec")

DEFAULT_MAX_PIXELS = 1_000_000
"""Default limit on the pixels of a frame: no supported model uses a higher resolution for videos."""
_PIP_NAMES = {"decord": "decord", "torchcodec": "torchcodec", "pyav": "av"}


def read_frames(
    source: str | os.PathLike[str] | bytes,
    sampler: FrameSampler | None = None,
    *,
    num_frames: int | None = None,
    fps: float | None = None,
    max_frames: int = MAX_FRAMES,
    backend: str = "auto",
    max_pixels: int = DEFAULT_MAX_PIXELS,
    isolated: bool | DecoderPool = False,
) -> Frames:
    """Read frames of a video, in order.

    Args:
        source: A path, or the content of a file, in one of the containers of `mmspec.vision.video.containers` (detected
            by content). Playlists and other files that refer to files are refused.
        sampler: Selects the frames. Default without `num_frames` and `fps`: eight evenly spaced frames.
        num_frames: Number of frames; the same ones as transformers' `load_video` where the frame rate is constant, else
            by time. All frames of a shorter video, where transformers raises.
        fps: Frames per second, `max_frames` at most; likewise.
        max_frames: Limit on the number of frames.
        backend: "pyav", "torchcodec", "decord", or "auto": the first of these that is installed and can read it.
            decord refuses files of which it shows other frames than PyAV.
        max_pixels: Larger frames are scaled down to this number of pixels, aspect ratio preserved. All frames together
            are limited to 64 million pixels.
        isolated: Decode in another process, so that a file that crashes a decoder, or makes it hang, does not affect
            this one. True starts a process for this call; a `DecoderPool` reuses its processes.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The source is not a readable video or has no frames, the file is cut, a frame that was selected is
            damaged, or an option or the sampler is invalid.
        ImportError: No backend is installed.
        TypeError: `source` is neither a path nor bytes.
        DecoderCrashedError: A ValueError; the decoder of an isolated call crashed.
        DecoderHungError: A ValueError; it timed out.
    """
    sampler = _resolve_sampler(sampler, num_frames, fps, max_frames)
    check_positive_int("max_pixels", max_pixels)
    names = _backend_names(backend)
    content, name = _resolve_source(source)

    def read_all(reader: VideoReader, backend_name: str) -> Frames:
        return read_with(reader, backend_name, name, sampler, max_frames, max_pixels)

    if not isolated:
        return _read_with_fallback(names, lambda key: read_all(BACKENDS[key](content), key), name, backend)
    with nullcontext(isolated) if isinstance(isolated, DecoderPool) else DecoderPool() as pool:

        def read_isolated(key: str) -> Frames:
            return retry_if_killed(lambda: read_all(pool.open_video(key, content), key))

        return _read_with_fallback(names, read_isolated, name, backend)


def _read_with_fallback(names: Sequence[str], read: Callable[[str], Frames], name: str, backend: str) -> Frames:
    """The frames from the first backend that can read the video.

    Args:
        names: Backends in order.
        read: Reads the frames with the backend of that name.
        name: Name of the video, for messages.
        backend: The backend argument of the call.
    """
    missing = list[str]()
    failures = list[str]()
    crashed = False
    for key in names:
        try:
            return read(key)
        except ImportError as error:
            missing.append(key)
            logger.debug("%s is not installed: %s", key, error)
        except NoFramesError as error:
            raise ValueError(f"{name}: {error}") from error
        except SamplerError as error:
            raise error.original from error.original.__cause__
        except (MemoryError, DecoderStartError):
            raise
        except DecoderHungError as error:  # the remaining backends are not faster
            raise DecoderHungError(f"the decoder took too long on {name} ({key}: {error})") from error
        except DecoderCrashedError as error:
            failures.append(f"{key}: {error}")
            crashed = True
            logger.warning("%s crashed on %s (%s)", key, name, error)
        except Exception as error:  # decord raises its own types
            failures.append(f"{key}: {_last_line(error)}")
            logger.debug("%s cannot read %s: %s", key, name, error)
    if crashed:
        raise DecoderCrashedError(f"the decoder crashed on {name} ({'; '.join(failures)[:300]})")
    if failures:
        hint = "; PyAV reads more kinds of files: pip install av" if "pyav" in missing else ""
        raise ValueError(f"{name} is not a video that can be read ({'; '.join(failures)[:300]}{hint})")
    if backend != "auto":
        raise ImportError(f"backend={backend!r} is not installed; pip install {_PIP_NAMES[backend]}, or use 'auto'")
    raise ImportError(f"reading videos needs one of {', '.join(missing)}: {install_hint('video')}")


def _last_line(error: Exception) -> str:
    """The last line of an exception's message, without decord's prefix of time and source line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", lines[-1])


def _resolve_sampler(
    sampler: FrameSampler | None, num_frames: int | None, fps: float | None, max_frames: int
) -> FrameSampler:
    """The sampler that the arguments of `read_frames` specify.

    Raises:
        ValueError: More than one of `sampler`, `num_frames` and `fps` is set, or a value is invalid.
    """
    check_positive_int("max_frames", max_frames)
    options = {"sampler": sampler, "num_frames": num_frames, "fps": fps}
    used = [name for name, value in options.items() if value is not None]
    if len(used) > 1:
        raise ValueError(f"{' and '.join(used)} exclude each other; use one of them.")
    if num_frames is not None:
        check_positive_int("num_frames", num_frames)
        if num_frames > max_frames:
            raise ValueError(f"num_frames={num_frames} is more than max_frames={max_frames}; raise max_frames.")
        return Uniform(num_frames, hf=True)
    if fps is not None:
        check_positive_number("fps", fps)
        return Fps(fps, max_frames, hf=True)
    return Uniform(min(Uniform().num_frames, max_frames)) if sampler is None else sampler


def _backend_names(backend: str) -> tuple[str, ...]:
    if backend == "auto":
        return tuple(BACKENDS)
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; available: auto, {', '.join(BACKENDS)}.")
    return (backend,)


def _resolve_source(source: str | os.PathLike[str] | bytes) -> tuple[VideoSource, str]:
    """The input of the readers, and the name of the video in messages.

    Raises:
        ValueError: It is empty, or in no allowed container.
        TypeError: It is neither a path nor bytes.
        FileNotFoundError: There is no such file.
    """
    if isinstance(source, (bytes, bytearray, memoryview)):
        content = bytes(source)
        if not content:
            raise ValueError("0 bytes is not a video that can be read; pass the content of a file, or its path.")
        name = f"a video of {len(content)} bytes"
        _check_container(content[:HEADER_BYTES], name)
        return content, name
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"a video must be a path or bytes; got {type(source).__name__}.")
    file = Path(source)
    if not file.is_file():
        raise FileNotFoundError(f"no such video: {file}")
    if file.stat().st_size == 0:
        raise ValueError(f"{file} is not a video that can be read (it is empty)")
    opened = source if isinstance(source, FileBelow) else str(file)
    _check_container(read_header(opened), str(file))
    return opened, str(file)


def _check_container(header: bytes, name: str) -> None:
    """Refuse other containers before a reader starts; readers check the file that they open again.

    Raises:
        ValueError: The header is of no allowed container.
    """
    try:
        detect_container(header)
    except ContainerError as error:
        raise ValueError(f"{name} is not a video that can be read ({error})") from error
