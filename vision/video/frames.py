"""Reads frames of a video: those that a viewer of it sees, by their presentation timestamps.

Frames are selected by a sampler (`mmspec.interfaces.FrameSampler`), before target and drafter run, so speculative
decoding and the baseline see the same frames. Files can be decoded in another process
(`mmspec.vision.video.decoder_pool`). Independent of the models.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

from mmspec.hints import install_hint
from mmspec.interfaces import FrameSampler
from mmspec.messages import one_line
from mmspec.vision.video.containers import FileBelow
from mmspec.vision.video.decode import MAX_FRAMES, Frames, SamplerError, read_with
from mmspec.vision.video.decode import FrameMetadata as FrameMetadata
from mmspec.vision.video.decoder_pool import DecoderPool, retry_if_killed
from mmspec.vision.video.pyav_reader import PyavReader
from mmspec.vision.video.reader import NoFramesError, VideoReader, VideoSource
from mmspec.vision.video.samplers import Fps, Uniform, check_positive_int, check_positive_number
from mmspec.vision.video.worker_process import DecoderCrashedError, DecoderHungError, DecoderStartError

DEFAULT_MAX_PIXELS = 1_000_000
"""Default limit on the pixels of a frame: no supported model uses a higher resolution for videos."""


def read_frames(
    source: str | os.PathLike[str] | bytes,
    sampler: FrameSampler | None = None,
    *,
    num_frames: int | None = None,
    fps: float | None = None,
    max_frames: int = MAX_FRAMES,
    backend: str = "pyav",
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
        backend: "pyav" (or "auto", which is the same).
        max_pixels: Larger frames are scaled down to this number of pixels, aspect ratio preserved. All frames together
            are limited to 64 million pixels.
        isolated: Decode in another process, so that a file that crashes a decoder, or makes it hang, does not affect
            this one. True starts a process for this call; a `DecoderPool` reuses its processes.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The source is not a readable video or has no frames, the file is cut, a frame that was selected is
            damaged, or an option or the sampler is invalid.
        ImportError: PyAV is not installed.
        TypeError: `source` is neither a path nor bytes.
        DecoderCrashedError: A ValueError; the decoder of an isolated call crashed.
        DecoderHungError: A ValueError; it timed out.
    """
    if backend not in ("auto", "pyav"):
        raise ValueError(f"backend must be 'pyav', got {backend!r:.40}: others show other frames.")
    sampler = _resolve_sampler(sampler, num_frames, fps, max_frames)
    check_positive_int("max_pixels", max_pixels)
    content, name = _resolve_source(source)

    def read_all(reader: VideoReader) -> Frames:
        return read_with(reader, name, sampler, max_frames, max_pixels)

    try:
        if not isolated:
            return read_all(PyavReader(content))
        with nullcontext(isolated) if isinstance(isolated, DecoderPool) else DecoderPool() as pool:
            return retry_if_killed(lambda: read_all(pool.open_video(content)))
    except ImportError as error:
        raise ImportError(f"reading videos needs PyAV ({one_line(error, 80)}): {install_hint('video')}") from error
    except NoFramesError as error:
        raise ValueError(f"{name}: {error}") from error
    except SamplerError as error:
        raise error.original from error.original.__cause__
    except (MemoryError, DecoderStartError):
        raise
    except DecoderHungError as error:
        raise DecoderHungError(f"the decoder took too long on {name} ({error})") from error
    except DecoderCrashedError as error:
        raise DecoderCrashedError(f"the decoder crashed on {name} ({error})") from error
    except Exception as error:  # decoders raise exceptions of any type
        raise ValueError(f"{name} is not a video that can be read ({one_line(error, 300)})") from error


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


def _resolve_source(source: str | os.PathLike[str] | bytes) -> tuple[VideoSource, str]:
    """The input of the readers, and the name of the video in messages.

    Raises:
        ValueError: It is empty.
        TypeError: It is neither a path nor bytes.
        FileNotFoundError: There is no such file.
    """
    if isinstance(source, (bytes, bytearray, memoryview)):
        if not (content := bytes(source)):
            raise ValueError("0 bytes is not a video that can be read; pass the content of a file, or its path.")
        return content, f"a video of {len(content)} bytes"
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"a video must be a path or bytes; got {type(source).__name__}.")
    file = Path(source)
    if not file.is_file():
        raise FileNotFoundError(f"no such video: {file}")
    if file.stat().st_size == 0:
        raise ValueError(f"{file} is not a video that can be read (it is empty)")
    return source if isinstance(source, FileBelow) else str(file), str(file)
