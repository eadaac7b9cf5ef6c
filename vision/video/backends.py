"""Decoding backends: PyAV, torchcodec, decord. All number frames in presentation order, from 0.

A reader reports the properties of a video and decodes the requested frames at the requested size, so memory depends on
what is read and not on the file. Frame selection and the choice of the backend are elsewhere.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image

from mmspec.vision.video.containers import ContainerFile
from mmspec.vision.video.pyav_reader import PyavReader
from mmspec.vision.video.reader import (
    MAX_FRAME_PIXELS as MAX_FRAME_PIXELS,
)
from mmspec.vision.video.reader import (
    NO_STREAM_MESSAGE,
    THUMBNAIL_SIZE,
    FrameSize,
    NoFramesError,
    VideoInfo,
    VideoReader,
    VideoSource,
)
from mmspec.vision.video.reader import (
    check_frame_size as check_frame_size,
)
from mmspec.vision.video.sandbox import allow_open

MAX_DIFFERENCE = 12.0
"""Mean difference of the colour values of two readers' thumbnails up to which they show the same frame."""
# FFmpeg's AVERROR_STREAM_NOT_FOUND and AVERROR_DECODER_NOT_FOUND.
_STREAM_NOT_FOUND, _DECODER_NOT_FOUND = "-1381258232", "-1128613112"


class DecordReader:
    """decord: an option for files of which it shows the same frames as PyAV; it is slower.

    It numbers the frames that an edit list hides, and replaces damaged ones by their neighbours. So number, times and
    thumbnails of the frames are compared with those of PyAV, which defines them. Cannot decode AV1.
    """

    def __init__(self, source: VideoSource) -> None:
        self._truth = PyavReader(source)
        self.info = self._truth.info
        if not self._truth.is_plain:
            raise ValueError("mirrored, transparent and HDR clips can be read by PyAV only")
        self._file = ContainerFile(source)
        self._video: Any = self._open()
        if len(self._video) != self.info.num_frames:
            raise ValueError(f"it counts {len(self._video)} frames, of which {self.info.num_frames} are shown")

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

    def shown_at(self, numbers: Sequence[int]) -> list[int]:
        """See `VideoReader`."""
        return self._truth.shown_at(numbers)

    def read(self, indices: Sequence[int], size: FrameSize) -> tuple[list[Image.Image], list[float]]:
        thumbnails, times = self._truth.read(indices, (THUMBNAIL_SIZE, THUMBNAIL_SIZE))
        self._video = None  # released first: it holds a queue of large frames
        self._video = self._open(*size)
        images, position = list[Image.Image](), 0
        for index in indices:
            for _ in range(index - position):  # its seeking is inexact for open GOPs
                self._video.next()
            images.append(_decord_image(self._video.next(), size))
            position = index + 1
        for index, image, thumbnail in zip(indices, images, thumbnails, strict=True):
            if _difference(image, thumbnail) > MAX_DIFFERENCE:
                raise ValueError(f"it shows another frame {index} than PyAV")
        return images, times

    def close(self) -> None:
        """See `VideoReader`. decord closes the file with the last reference."""
        self._video = None
        self._file.close()
        self._truth.close()


def _difference(image: Image.Image, thumbnail: Image.Image) -> float:
    small = image.resize(thumbnail.size, Image.Resampling.BICUBIC)
    return float(np.abs(np.asarray(small).astype(int) - np.asarray(thumbnail).astype(int)).mean())


def _decord_image(frame: Any, size: FrameSize) -> Image.Image:
    """A frame of decord as an image; decord reports the row padding of narrow frames as a fourth channel."""
    width, height = size
    rows = frame.asnumpy().reshape(height, -1)[:, : 3 * width]
    return Image.fromarray(rows.reshape(height, width, 3))


class TorchcodecReader:
    """torchcodec: exact; supports the codecs of the installed FFmpeg.

    It applies the rotation, and neither mirroring, the shape of the pixels, transparency nor HDR.
    """

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

    def shown_at(self, numbers: Sequence[int]) -> list[int]:
        """See `VideoReader`. torchcodec gives times of frames but no index by time: the rate is taken for constant."""
        return list(numbers)

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
        self._video = None
        self._file.close()


def _duration(num_frames: int, fps: float) -> float:
    return num_frames / fps if fps > 0 else 0.0


BACKENDS: dict[str, Callable[[VideoSource], VideoReader]] = {
    "pyav": PyavReader,
    "torchcodec": TorchcodecReader,
    "decord": DecordReader,
}
"""Readers by name, in the order in which backend="auto" tries them."""
