"""Frames out of a video: decord where it is installed and can read the file, else torchcodec, else PyAV.

Which frames is a sampler's business (`mmspec.interfaces.FrameSampler`). Runs before target and drafter, so that plain
and sped-up decoding see the same frames. On request the file is decoded in another process (`mmspec.vision.video.decoder_pool`).
Knows nothing of models.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from mmspec.interfaces import FrameSampler
from mmspec.vision.video.backends import READERS, NoFramesError, Reader
from mmspec.vision.video.containers import HEAD, ContainerError, container_of, head_of
from mmspec.vision.video.decode import MOST_FRAMES, Frames, Metadata, SamplerError, read_with
from mmspec.vision.video.decoder_pool import DecoderCrashedError, DecoderHungError, Isolated
from mmspec.vision.video.samplers import ByRate, Differing, Uniform, check_count, check_rate

logger = logging.getLogger("mmspec")

PIXELS_A_FRAME = 1_000_000
"""Frames are read no larger than that, unless told otherwise: no supported model looks at more of a clip."""


def read_frames(
    source: str | os.PathLike[str] | bytes,
    sampler: FrameSampler | None = None,
    *,
    num_frames: int | None = None,
    fps: float | None = None,
    max_frames: int = MOST_FRAMES,
    backend: str = "auto",
    max_pixels: int = PIXELS_A_FRAME,
    isolated: bool | Isolated = False,
) -> Frames:
    """Some frames of a video, in order.

    Args:
        source: a file, or what is in one.
        sampler: chooses the frames; without it, and without the next two, eight evenly spread.
        num_frames, fps: so many frames, or so many a second (`max_frames` at most), the very ones that transformers'
            `load_video` takes. Of a shorter video all frames, where transformers refuses.
        max_frames: how many may be read.
        backend: "decord", "torchcodec", "pyav", or "auto": the first of these that is installed and can read it.
        max_pixels: larger frames are read at a size that has no more, in the same proportions. 64 million pixels is
            the limit for all frames together.
        isolated: decode in another process, so that a file that crashes a decoder, or hangs it, costs that process
            and not this one. True starts one for this call; an `Isolated` keeps one for the next file.

    Raises:
        FileNotFoundError: no such file. ValueError: not a video that can be read, or one without frames, or options or
            a sampler that make no sense. A video is one of the containers of `mmspec.vision.video.containers`, by its
            content; a playlist, or any other file that names files, is none. ImportError: no reader is installed.
            TypeError: neither a path nor bytes.
        DecoderCrashedError, DecoderHungError: ValueErrors, and what became of the other process.
    """
    sampler = _sampler(sampler, num_frames, fps, max_frames)
    check_count("max_pixels", max_pixels)
    names = _names(backend)
    content, name = _content(source)

    def read(reader: str, opened: Reader) -> Frames:
        return read_with(opened, reader, name, sampler, max_frames, max_pixels)

    if not isolated:
        return _first(names, lambda reader: read(reader, READERS[reader](content)), name, backend)
    with nullcontext(isolated) if isinstance(isolated, Isolated) else Isolated() as other:
        return _first(names, lambda reader: read(reader, other.open(reader, content)), name, backend)


def _first(names: Sequence[str], read: Callable[[str], Frames], name: str, backend: str) -> Frames:
    """The frames as the first of the readers reads them that can."""
    missing, failed, crashed = [], [], False
    for reader in names:
        try:
            return read(reader)
        except ImportError as error:
            missing.append(reader)
            logger.debug("%s is not installed: %s", reader, error)
        except NoFramesError as error:
            raise ValueError(f"{name}: {error}") from error
        except SamplerError as error:
            raise error.inner from error.inner.__cause__
        except MemoryError:
            raise
        except DecoderHungError as error:  # the others are slower, if anything
            raise DecoderHungError(f"the decoder took too long on {name} ({reader}: {error})") from error
        except DecoderCrashedError as error:
            failed.append(f"{reader}: {error}")
            crashed = True
            logger.warning("%s crashed on %s (%s)", reader, name, error)
        except Exception as error:  # decord raises its own types
            failed.append(f"{reader}: {_told(error)}")
            logger.debug("%s cannot read %s: %s", reader, name, error)
    if crashed:
        raise DecoderCrashedError(f"the decoder crashed on {name} ({'; '.join(failed)[:300]})")
    if failed:
        more = "; PyAV reads more kinds of files: pip install av" if "pyav" in missing else ""
        raise ValueError(f"{name} is not a video that can be read ({'; '.join(failed)[:300]}{more})")
    if backend != "auto":
        raise ImportError(f"backend={backend!r} is not installed; pip install {_PACKAGES[backend]}, or take 'auto'")
    raise ImportError(f"reading videos needs one of {', '.join(missing)}: pip install 'mmspec[video]'")


def _told(error: Exception) -> str:
    """The last line of an error, without decord's time and place."""
    words = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", words[-1])


_PACKAGES = {"decord": "decord", "torchcodec": "torchcodec", "pyav": "av"}


def _sampler(sampler: FrameSampler | None, count: int | None, rate: float | None, most: int) -> FrameSampler:
    """The one way to choose that was asked for."""
    check_count("max_frames", most)
    asked = {"sampler": sampler, "num_frames": count, "fps": rate}
    given = [name for name, value in asked.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} each say which frames to read; give one of them.")
    if count is not None:
        check_count("num_frames", count)
        if count > most:
            raise ValueError(f"num_frames={count} is more than max_frames={most}; raise max_frames to read as many.")
        return Uniform(count, hf=True)
    if rate is not None:
        check_rate("fps", rate)
        return ByRate(rate, most, hf=True)
    return Uniform(min(Uniform().count, most)) if sampler is None else sampler


def _names(backend: str) -> tuple[str, ...]:
    if backend == "auto":
        return tuple(READERS)
    if backend not in READERS:
        raise ValueError(f"no backend is called {backend!r}; known: auto, {', '.join(READERS)}.")
    return (backend,)


def _content(source: str | os.PathLike[str] | bytes) -> tuple[str | bytes, str]:
    """What readers are given, and what messages call it."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        content = bytes(source)
        if not content:
            raise ValueError("0 bytes is not a video that can be read; give what is in a file, or its path.")
        name = f"a video of {len(content)} bytes"
        _check_container(content[:HEAD], name)
        return content, name
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"a video is given as a path or as bytes; got {type(source).__name__}.")
    file = Path(source)
    if not file.is_file():
        raise FileNotFoundError(f"no such video: {file}")
    if file.stat().st_size == 0:
        raise ValueError(f"{file} is not a video that can be read (it is empty)")
    _check_container(head_of(str(file)), str(file))
    return str(file), str(file)


def _check_container(head: bytes, name: str) -> None:
    """Refuse what is no allowed container before any reader is started; readers check what they open once more."""
    try:
        container_of(head)
    except ContainerError as error:
        raise ValueError(f"{name} is not a video that can be read ({error})") from error


__all__ = [
    "MOST_FRAMES",
    "ByRate",
    "DecoderCrashedError",
    "DecoderHungError",
    "Differing",
    "Frames",
    "Isolated",
    "Metadata",
    "Uniform",
    "read_frames",
]
