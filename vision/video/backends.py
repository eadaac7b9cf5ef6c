"""Three ways to decode a video file: decord, torchcodec, PyAV. All number frames as a viewer sees them, from 0.

A reader says what a file holds, and decodes the frames it is asked for, at the size it is asked for, so that memory
hangs on what is read and not on the file. Which frames, and which reader, is decided elsewhere.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from PIL import Image

from mmspec.vision.video.containers import Input
from mmspec.vision.video.sandbox import files

Source = str | bytes
"""A path, or what is in a file."""
Size = tuple[int, int]
"""Width and height in pixels."""

NEAR = 1000
"""Frames that decord reads in a row rather than jump: seconds at worst."""
MOST_PIXELS = 64_000_000
"""Pixels that one frame of a file may have: 8K is 33 million."""
THUMBNAIL = 32
"""Edge of a picture that tells frames apart."""
NO_STREAM = "a video without frames: there is no video stream in it"
# What FFmpeg says when it finds no stream of a kind, and when it has no decoder for the one it finds.
_STREAM_NOT_FOUND, _DECODER_NOT_FOUND = "-1381258232", "-1128613112"


class NoFramesError(Exception):
    """There is nothing to return, and no other reader would find more."""


class EndedEarlyError(Exception):
    """Fewer frames can be decoded than the file promises. `total` is how many."""

    def __init__(self, total: int) -> None:
        super().__init__(f"only {total} frames can be decoded")
        self.total = total


@dataclass(frozen=True)
class About:
    """What a file holds: frames, frames a second (the average; 0 if unknown), seconds, and pixels as shown, upright."""

    total: int
    fps: float
    duration: float
    width: int
    height: int


class Reader(Protocol):
    """An open video."""

    about: About

    def read(self, chosen: Sequence[int], size: Size) -> tuple[list[Image.Image], list[float]]:
        """Frames by rising number as RGB pictures of `size`, and the second of each, counted from the first frame.

        Raises:
            EndedEarlyError: there are fewer frames. Anything else: the decoder's own errors.
        """

    def close(self) -> None:
        """Let go of the file."""


class Decord:
    """decord: quick at jumping, turns phone videos upright. Cannot decode AV1.

    Its jumps are not to be trusted: where frames after a key frame are shown before it (open groups of pictures, usual
    in H.265) they land a few frames late. So frames lie in a row unless that is far and a few jumps prove right.
    """

    def __init__(self, source: Source) -> None:
        self._input = Input(source)
        self._video: Any = self._open()
        total, fps = len(self._video), float(self._video.get_avg_fps())
        height, width = self._video.next().shape[:2]
        self._size, self._next = (width, height), 1
        self.about = About(total, fps, _seconds(total, fps), width, height)

    def _open(self, width: int = -1, height: int = -1) -> Any:
        import decord

        native = self._input.native()
        source = io.BytesIO(native) if isinstance(native, bytes) else native
        try:
            with files(0 if isinstance(native, bytes) else 1):
                return decord.VideoReader(source, width=width, height=height, num_threads=1)
        except Exception as error:
            if _STREAM_NOT_FOUND in str(error):
                raise NoFramesError(NO_STREAM) from error
            if _DECODER_NOT_FOUND in str(error):
                raise ValueError("it has no decoder for this kind of video") from error
            raise

    def read(self, chosen: Sequence[int], size: Size) -> tuple[list[Image.Image], list[float]]:
        """See `Reader`."""
        if size != self._size:
            self._video = None  # first: it holds a queue of large frames
            self._video, self._size, self._next = self._open(*size), size, 0
        images = list[Image.Image]()
        for index in chosen:
            self._go(index)
            images.append(_picture(self._video.next(), size))
            self._next = index + 1
        return images, [float(begin) for begin, _ in self._video.get_frame_timestamp(list(chosen))]

    def _go(self, index: int) -> None:
        if index < self._next:
            self._video.seek(0)
            self._next = 0
        if index - self._next > NEAR and self._jumps_well:
            self._video.seek_accurate(index)
            return
        for _ in range(index - self._next):  # `skip_frames` jumps too
            self._video.next()

    @cached_property
    def _jumps_well(self) -> bool:
        """Whether jumps to the first key frames land where reading in a row does."""
        keys = [key for key in self._video.get_key_indices() if 0 < key <= NEAR][:3]
        inch, at = (THUMBNAIL, THUMBNAIL), 0
        row, jumping = self._open(*inch), self._open(*inch)
        for key in keys:
            for _ in range(key - at):
                row.next()
            jumping.seek_accurate(key)
            if _picture(row.next(), inch) != _picture(jumping.next(), inch):
                return False
            at = key + 1
        return bool(keys)

    def close(self) -> None:
        """See `Reader`. decord lets go with the last reference."""
        self._video = None
        self._input.close()


def _picture(frame: Any, size: Size) -> Image.Image:
    """A frame of decord, which takes the padding of narrow lines for a fourth colour."""
    width, height = size
    lines = frame.asnumpy().reshape(height, -1)[:, : 3 * width]
    return Image.fromarray(lines.reshape(height, width, 3))


class Torchcodec:
    """torchcodec: exact, upright, and as able as the FFmpeg that it finds."""

    def __init__(self, source: Source) -> None:
        from torchcodec.decoders import VideoDecoder

        self._input = Input(source)
        with files(1):
            self._video: Any = VideoDecoder(
                self._input.native()
            )  # looks through the whole file once, so numbers and times are right
        held = self._video.metadata
        total, fps = len(self._video), float(held.average_fps or 0)
        self.about = About(total, fps, float(held.duration_seconds or _seconds(total, fps)), held.width, held.height)

    def read(self, chosen: Sequence[int], size: Size) -> tuple[list[Image.Image], list[float]]:
        """See `Reader`. One frame at a time, since torchcodec decodes at full size."""
        images, times = list[Image.Image](), list[float]()
        begin = float(self._video.metadata.begin_stream_seconds or 0)
        for index in chosen:
            frame = self._video.get_frame_at(index)
            image = Image.fromarray(frame.data.permute(1, 2, 0).contiguous().numpy())
            images.append(image if image.size == size else image.resize(size, Image.Resampling.BICUBIC))
            times.append(float(frame.pts_seconds) - begin)
        return images, times

    def close(self) -> None:
        """See `Reader`."""
        self._video = None
        self._input.close()


class Pyav:
    """PyAV: reads most kinds of files, on any machine. Decodes from the start, so that numbers are exact; not quick.

    It is given the open file and the one demuxer of its container, and refuses whatever else a demuxer asks for.
    """

    def __init__(self, source: Source) -> None:
        self._input = Input(source)
        with closing(self._open()) as container:
            stream = _video_stream(container)
            check_frame(stream.codec_context.width, stream.codec_context.height)
            total, fps = int(stream.frames), float(stream.average_rate or 0)
            time = stream.duration * stream.time_base if stream.duration else (container.duration or 0) / 1_000_000
            total = total or sum(packet.size > 0 for packet in container.demux(stream))  # some containers do not say
        first = next(self._frames(), None) if total else None
        if first is None:
            raise NoFramesError("a video without frames")
        self._turn = int(getattr(first, "rotation", 0) or 0)  # phones write how to hold a video, not turned pixels
        self._begin = first.time
        width, height = (first.height, first.width) if self._turn % 180 else (first.width, first.height)
        self.about = About(total, fps, float(time) or _seconds(total, fps), width, height)

    def _open(self) -> Any:
        import av

        demuxer = self._input.container.demuxer
        options = {"format_whitelist": demuxer, "protocol_whitelist": "", "max_pixels": str(MOST_PIXELS)}
        stream = self._input.stream()
        return av.open(stream, format=demuxer, container_options=options, io_open=_refuse, buffer_size=1 << 17)

    def _frames(self) -> Iterator[Any]:
        """All frames that can be decoded, from a file opened anew: seeking to the start is not exact in all of them."""
        from av.error import InvalidDataError

        with closing(self._open()) as container:
            stream, many, wrong = _video_stream(container), 0, None
            for packet in container.demux(stream):
                try:
                    frames = packet.decode()
                except InvalidDataError as error:  # the end of a truncated file, for one
                    wrong = error
                    continue
                many += len(frames)
                yield from frames
            if wrong is not None and not many:
                raise wrong

    def read(self, chosen: Sequence[int], size: Size) -> tuple[list[Image.Image], list[float]]:
        """See `Reader`."""
        wanted, images, times, index = set(chosen), list[Image.Image](), list[float](), -1
        width, height = reversed(size) if self._turn % 180 else size
        for index, frame in enumerate(self._frames()):
            if index in wanted:
                image = frame.to_image(width=width, height=height)
                images.append(image.rotate(self._turn, expand=True) if self._turn else image)
                known = frame.time is not None and self._begin is not None
                times.append(frame.time - self._begin if known else _seconds(index, self.about.fps))
            if index >= chosen[-1]:
                return images, times
        raise EndedEarlyError(index + 1)

    def close(self) -> None:
        """See `Reader`."""
        self._input.close()


def check_frame(width: int, height: int, most: int = MOST_PIXELS) -> None:
    """Refuse frames that are too large.

    Raises:
        NoFramesError: more pixels than `most`.
    """
    if width * height > most:
        raise NoFramesError(f"frames of {width} x {height} pixels; {most} pixels is the limit")


def _refuse(url: str, flags: int, options: dict[str, str]) -> Any:
    """A demuxer that asks for another file is not given it."""
    raise OSError(f"a video is read from its own file only; it refers to {url[:80]!r}")


def _video_stream(container: Any) -> Any:
    """The first video stream that is no cover picture of a song."""
    from av.stream import Disposition

    for stream in container.streams.video:
        if not stream.disposition & Disposition.attached_pic:
            return stream
    raise NoFramesError(NO_STREAM)


def _seconds(frames: int, fps: float) -> float:
    return frames / fps if fps > 0 else 0.0


READERS: dict[str, Callable[[Source], Reader]] = {"decord": Decord, "torchcodec": Torchcodec, "pyav": Pyav}
"""By name, in the order in which they are tried."""

__all__ = [
    "MOST_PIXELS",
    "NO_STREAM",
    "READERS",
    "THUMBNAIL",
    "About",
    "EndedEarlyError",
    "NoFramesError",
    "Reader",
    "Size",
    "Source",
    "check_frame",
]
