"""Decoding backends: decord, torchcodec, PyAV. All number frames in presentation order, from 0.

A reader reports the properties of a video and decodes the requested frames at the requested size, so memory depends on
what is read and not on the file. Frame selection and the choice of the backend are elsewhere.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from PIL import Image

from mmspec.vision.video.containers import ContainerFile
from mmspec.vision.video.sandbox import allow_open

VideoSource = str | bytes
"""A path, or the content of a file."""
FrameSize = tuple[int, int]
"""(width, height) in pixels."""

MAX_SEQUENTIAL_FRAMES = 1000
"""Distance in frames up to which decord decodes sequentially instead of seeking: seconds at worst."""
MAX_FRAME_PIXELS = 64_000_000
"""Largest frame in pixels; 8K has 33 million."""
THUMBNAIL_SIZE = 32
"""Side of a thumbnail in pixels."""
NO_STREAM_MESSAGE = "a video without frames: it has no video stream"
# FFmpeg's AVERROR_STREAM_NOT_FOUND and AVERROR_DECODER_NOT_FOUND.
_STREAM_NOT_FOUND, _DECODER_NOT_FOUND = "-1381258232", "-1128613112"


class NoFramesError(Exception):
    """No frame can be returned, and no other backend would find one."""


class EndedEarlyError(Exception):
    """Fewer frames can be decoded than the container declares.

    Attributes:
        num_frames: Number of frames that can be decoded.
    """

    def __init__(self, num_frames: int) -> None:
        super().__init__(f"only {num_frames} frames can be decoded")
        self.num_frames = num_frames


@dataclass(frozen=True)
class VideoInfo:
    """Properties of a video.

    Attributes:
        num_frames: Number of frames.
        fps: Average frame rate; 0 if unknown.
        duration: In seconds.
        width: In pixels, after rotation.
        height: In pixels, after rotation.
    """

    num_frames: int
    fps: float
    duration: float
    width: int
    height: int


class VideoReader(Protocol):
    """An open video."""

    info: VideoInfo

    def read(self, indices: Sequence[int], size: FrameSize) -> tuple[list[Image.Image], list[float]]:
        """Decode frames.

        Args:
            indices: Frame indices in rising order.
            size: Size of the returned images.

        Returns:
            RGB images, and their timestamps in seconds from the first frame of the video.

        Raises:
            EndedEarlyError: The video has fewer frames.
            Exception: Any error of the decoder.
        """

    def close(self) -> None:
        """Close the file."""


class DecordReader:
    """decord: fast seeking, applies the rotation of phone videos. Cannot decode AV1.

    Its seeking is inexact for open GOPs (usual in H.265), where frames after a key frame are presented before it: it
    lands a few frames late. So frames are decoded sequentially, unless the distance is large and test seeks are exact.
    """

    def __init__(self, source: VideoSource) -> None:
        self._file = ContainerFile(source)
        self._video: Any = self._open()
        num_frames = len(self._video)
        fps = float(self._video.get_avg_fps())
        height, width = self._video.next().shape[:2]
        self._size = (width, height)
        self._next_index = 1
        self.info = VideoInfo(num_frames, fps, _duration(num_frames, fps), width, height)

    def _open(self, width: int = -1, height: int = -1) -> Any:
        import decord

        native = self._file.native_source()
        source = io.BytesIO(native) if isinstance(native, bytes) else native
        try:
            with allow_open(0 if isinstance(native, bytes) else 1):
                return decord.VideoReader(source, width=width, height=height, num_threads=1)
        except Exception as error:
            if _STREAM_NOT_FOUND in str(error):
                raise NoFramesError(NO_STREAM_MESSAGE) from error
            if _DECODER_NOT_FOUND in str(error):
                raise ValueError("it has no decoder for this codec") from error
            raise

    def read(self, indices: Sequence[int], size: FrameSize) -> tuple[list[Image.Image], list[float]]:
        """See `VideoReader`."""
        if size != self._size:
            self._video = None  # released first: it holds a queue of large frames
            self._video = self._open(*size)
            self._size = size
            self._next_index = 0
        images = list[Image.Image]()
        for index in indices:
            self._seek(index)
            images.append(_decord_image(self._video.next(), size))
            self._next_index = index + 1
        return images, [float(start) for start, _ in self._video.get_frame_timestamp(list(indices))]

    def _seek(self, index: int) -> None:
        if index < self._next_index:
            self._video.seek(0)
            self._next_index = 0
        if index - self._next_index > MAX_SEQUENTIAL_FRAMES and self._seek_is_exact:
            self._video.seek_accurate(index)
            return
        for _ in range(index - self._next_index):  # `skip_frames` seeks inexactly too
            self._video.next()

    @cached_property
    def _seek_is_exact(self) -> bool:
        """Whether seeking to the first key frames gives the same frames as sequential decoding."""
        keys = [key for key in self._video.get_key_indices() if 0 < key <= MAX_SEQUENTIAL_FRAMES][:3]
        size = (THUMBNAIL_SIZE, THUMBNAIL_SIZE)
        sequential = self._open(*size)
        seeking = self._open(*size)
        next_index = 0
        for key in keys:
            for _ in range(key - next_index):
                sequential.next()
            seeking.seek_accurate(key)
            if _decord_image(sequential.next(), size) != _decord_image(seeking.next(), size):
                return False
            next_index = key + 1
        return bool(keys)

    def close(self) -> None:
        """See `VideoReader`. decord closes the file with the last reference."""
        self._video = None
        self._file.close()


def _decord_image(frame: Any, size: FrameSize) -> Image.Image:
    """A frame of decord as an image; decord reports the row padding of narrow frames as a fourth channel."""
    width, height = size
    rows = frame.asnumpy().reshape(height, -1)[:, : 3 * width]
    return Image.fromarray(rows.reshape(height, width, 3))


class TorchcodecReader:
    """torchcodec: exact, applies the rotation; supports the codecs of the installed FFmpeg."""

    def __init__(self, source: VideoSource) -> None:
        from torchcodec.decoders import VideoDecoder

        self._file = ContainerFile(source)
        with allow_open(1):
            # Scans the whole file once, so indices and timestamps are exact.
            self._video: Any = VideoDecoder(self._file.native_source())
        metadata = self._video.metadata
        num_frames = len(self._video)
        fps = float(metadata.average_fps or 0)
        duration = float(metadata.duration_seconds or _duration(num_frames, fps))
        self.info = VideoInfo(num_frames, fps, duration, metadata.width, metadata.height)

    def read(self, indices: Sequence[int], size: FrameSize) -> tuple[list[Image.Image], list[float]]:
        """See `VideoReader`. Decodes one frame at a time, since torchcodec decodes at full size."""
        images = list[Image.Image]()
        timestamps = list[float]()
        start = float(self._video.metadata.begin_stream_seconds or 0)
        for index in indices:
            frame = self._video.get_frame_at(index)
            image = Image.fromarray(frame.data.permute(1, 2, 0).contiguous().numpy())
            images.append(image if image.size == size else image.resize(size, Image.Resampling.BICUBIC))
            timestamps.append(float(frame.pts_seconds) - start)
        return images, timestamps

    def close(self) -> None:
        """See `VideoReader`."""
        self._video = None
        self._file.close()


class PyavReader:
    """PyAV: supports most files on every platform. Decodes from the start, so indices are exact; slow.

    It gets the open file and the one demuxer of its container, and refuses any other file that a demuxer requests.
    """

    def __init__(self, source: VideoSource) -> None:
        self._file = ContainerFile(source)
        with closing(self._open()) as container:
            stream = _video_stream(container)
            check_frame_size(stream.codec_context.width, stream.codec_context.height)
            num_frames = int(stream.frames)
            fps = float(stream.average_rate or 0)
            duration = stream.duration * stream.time_base if stream.duration else (container.duration or 0) / 1_000_000
            # Some containers do not declare the number of frames.
            num_frames = num_frames or sum(packet.size > 0 for packet in container.demux(stream))
        first = next(self._frames(), None) if num_frames else None
        if first is None:
            raise NoFramesError("a video without frames")
        self._rotation = int(getattr(first, "rotation", 0) or 0)  # phones store the orientation as metadata
        self._start_time = first.time
        width, height = (first.height, first.width) if self._rotation % 180 else (first.width, first.height)
        self.info = VideoInfo(num_frames, fps, float(duration) or _duration(num_frames, fps), width, height)

    def _open(self) -> Any:
        import av

        demuxer = self._file.container.demuxer
        options = {"format_whitelist": demuxer, "protocol_whitelist": "", "max_pixels": str(MAX_FRAME_PIXELS)}
        stream = self._file.open_stream()
        return av.open(stream, format=demuxer, container_options=options, io_open=_refuse_io_open, buffer_size=1 << 17)

    def _frames(self) -> Iterator[Any]:
        """All decodable frames. Opens the file again, since seeking to the start is not exact in every container."""
        from av.error import InvalidDataError

        with closing(self._open()) as container:
            stream = _video_stream(container)
            num_decoded = 0
            last_error = None
            for packet in container.demux(stream):
                try:
                    frames = packet.decode()
                except InvalidDataError as error:  # for example the last packet of a truncated file
                    last_error = error
                    continue
                num_decoded += len(frames)
                yield from frames
            if last_error is not None and not num_decoded:
                raise last_error

    def read(self, indices: Sequence[int], size: FrameSize) -> tuple[list[Image.Image], list[float]]:
        """See `VideoReader`."""
        wanted = set(indices)
        images = list[Image.Image]()
        timestamps = list[float]()
        index = -1
        width, height = reversed(size) if self._rotation % 180 else size
        for index, frame in enumerate(self._frames()):
            if index in wanted:
                image = frame.to_image(width=width, height=height)
                images.append(image.rotate(self._rotation, expand=True) if self._rotation else image)
                has_time = frame.time is not None and self._start_time is not None
                timestamps.append(frame.time - self._start_time if has_time else _duration(index, self.info.fps))
            if index >= indices[-1]:
                return images, timestamps
        raise EndedEarlyError(index + 1)

    def close(self) -> None:
        """See `VideoReader`."""
        self._file.close()


def check_frame_size(width: int, height: int, max_pixels: int = MAX_FRAME_PIXELS) -> None:
    """
    Raises:
        NoFramesError: The frames have more than `max_pixels`.
    """
    if width * height > max_pixels:
        raise NoFramesError(f"frames of {width} x {height} pixels; the limit is {max_pixels} pixels")


def _refuse_io_open(url: str, flags: int, options: dict[str, str]) -> Any:
    """Callback of PyAV for a demuxer that requests another file."""
    raise OSError(f"references to other files are not followed; the video refers to {url[:80]!r}")


def _video_stream(container: Any) -> Any:
    """The first video stream that is not an attached picture (cover art)."""
    from av.stream import Disposition

    for stream in container.streams.video:
        if not stream.disposition & Disposition.attached_pic:
            return stream
    raise NoFramesError(NO_STREAM_MESSAGE)


def _duration(num_frames: int, fps: float) -> float:
    return num_frames / fps if fps > 0 else 0.0


BACKENDS: dict[str, Callable[[VideoSource], VideoReader]] = {
    "decord": DecordReader,
    "torchcodec": TorchcodecReader,
    "pyav": PyavReader,
}
"""Readers by name, in the order in which backend="auto" tries them."""

__all__ = [
    "BACKENDS",
    "MAX_FRAME_PIXELS",
    "NO_STREAM_MESSAGE",
    "THUMBNAIL_SIZE",
    "EndedEarlyError",
    "FrameSize",
    "NoFramesError",
    "VideoInfo",
    "VideoReader",
    "VideoSource",
    "check_frame_size",
]
