"""PyAV: the reader that defines what the frames of a file are. Every platform, every codec of FFmpeg.

The packets are read once without decoding them; their presentation timestamps are the index of the frames. A frame is
returned only if the decoder gives it with its own timestamp, so a seek that lands elsewhere is noticed and repeated
from the start. Frames that are damaged, or depend on damaged ones, are never returned.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from PIL import Image

from mmspec.vision.video.completeness import find_cut
from mmspec.vision.video.containers import ContainerFile
from mmspec.vision.video.frame_index import (
    FIRST,
    Damage,
    FrameIndex,
    KeyFrame,
    PacketTimes,
    average_rate,
    index_packets,
    may_differ,
)
from mmspec.vision.video.presentation import Presentation
from mmspec.vision.video.reader import (
    MAX_FRAME_PIXELS,
    MAX_TOTAL_PIXELS,
    NO_STREAM_MESSAGE,
    DamagedError,
    FrameSize,
    NoFramesError,
    RecountedError,
    VideoInfo,
    VideoSource,
    check_frame_size,
    fit_size,
)

MIN_SEEK_FRAMES = 48
"""Frames that a seek must save; fewer are decoded."""
BROADCAST = frozenset({"mpegts", "mpeg"})
"""Demuxers of formats for broadcast."""
WITHOUT_TIMESTAMPS = frozenset({"avi", "h264", "mpegvideo"})
"""Demuxers of containers that store no presentation timestamps; FFmpeg makes them up, wrongly where B frames occur."""
MAX_NOT_CODED_BYTES = 8
"""Largest packet of MPEG-4 that only says to show the frame before again."""
_CUT_MESSAGES = ("prematurely", "partial file")
_LOG_LOCK = threading.Lock()


class _SeekMissedError(Exception):
    """A seek did not lead to the frame that it should."""


class PyavReader:
    """See `mmspec.vision.video.reader.VideoReader`.

    It gets the open file and the one demuxer of its container, and refuses any other file that a demuxer requests.
    """

    def __init__(self, source: VideoSource) -> None:
        self._file = ContainerFile(source)
        self._demuxer = self._file.container.demuxer
        if cut := find_cut(self._file.open_stream(), self._demuxer):
            raise DamagedError(f"the file is cut: {cut[0]} of at least {cut[1]} bytes; copy or download it again")
        self._index = self._scan()
        if not len(self._index):
            raise NoFramesError("a video without frames")
        width, height = self._find_presentation()
        self.info = VideoInfo(len(self._index), self._index.fps, self._index.duration, width, height)

    def _open(self) -> Any:
        import av

        options = {"format_whitelist": self._demuxer, "protocol_whitelist": "", "max_pixels": str(MAX_FRAME_PIXELS)}
        stream = self._file.open_stream()
        return av.open(
            stream, format=self._demuxer, container_options=options, io_open=_refuse_io_open, buffer_size=1 << 17
        )

    def _scan(self) -> FrameIndex:
        """The index of the frames, from the packets.

        Raises:
            DamagedError: Packets are missing at the end.
        """
        with _logged_errors() as logs, closing(self._open()) as container:
            stream = _video_stream(container)
            context = stream.codec_context
            check_frame_size(context.width, context.height)
            packets, seen = list[PacketTimes](), 0
            for packet in container.demux(stream):
                if packet.size:  # not the end
                    seen += 1
                    if not _is_invisible(packet, context.name):
                        flags = packet.is_keyframe, packet.is_corrupt, packet.is_discard, packet.duration or 0
                        packets.append(PacketTimes(packet.pts, packet.dts, *flags))
            if self._demuxer == "avi" and packets:  # whose empty packets, which repeat a frame, are left out
                seen = max(packet.dts or 0 for packet in packets) + 1
            declared = int(stream.frames) if self._demuxer in ("mov", "avi") else 0
            missing = max(0, declared - seen)
            errors = [message for _, name, message in logs if name.startswith(self._demuxer)]
            if any(word in error for error in errors for word in _CUT_MESSAGES) or missing > max(1, declared // 100):
                of = f" of {declared}" if missing else ""
                raise DamagedError(f"the file is cut or damaged: it has {seen}{of} frames; download it again")
            return index_packets(
                packets,
                float(stream.time_base),
                float(stream.average_rate or stream.guessed_rate or 0),
                by_order=self._demuxer in WITHOUT_TIMESTAMPS and bool(context.has_b_frames),
                is_broadcast=self._demuxer in BROADCAST,
                is_damaged=bool(errors or missing or any(packet.is_corrupt for packet in packets)),
                declared_duration=(container.duration or 0) / 1_000_000,
            )

    def _find_presentation(self) -> FrameSize:
        """How frames are shown, from the first one that the decoder gives. Returns its size as it is shown.

        Raises:
            NoFramesError: There is none.
            Exception: There is none, and the decoder reported an error.
        """
        from av.error import InvalidDataError

        last_error: Exception = NoFramesError("a video without frames")
        with closing(self._open()) as container:
            stream = _video_stream(container)
            for packet in container.demux(stream):
                try:
                    for frame in packet.decode():
                        self._presentation = Presentation.of(frame, stream)
                        return self._presentation.shown_size(frame.width, frame.height)
                except InvalidDataError as error:
                    last_error = error
        raise last_error

    def read(
        self, numbers: Sequence[int], by_time: bool, max_pixels: int
    ) -> tuple[list[int], list[float], list[Image.Image]]:
        indices = self._index.shown_at(numbers) if by_time else list(numbers)
        size = fit_size((self.info.width, self.info.height), min(max_pixels, MAX_TOTAL_PIXELS // len(indices)))
        wanted = [index for index in indices if index not in self._index.damaged]
        try:
            found = self._read(wanted, size)
        except _SeekMissedError:
            self._index.keys = []
            found = self._read(wanted, size)
        lost = [index for index in indices if index not in found]
        if lost:
            first, last = self._index.times[lost[0]], self._index.times[lost[-1]]
            where = f"at {first:.1f} s" if len(lost) == 1 else f"between {first:.1f} and {last:.1f} s"
            raise DamagedError(
                f"the file is damaged {where} of {self.info.duration:.1f} s: {len(lost)} of {len(indices)} frames to "
                "be read cannot be decoded; copy or download it again"
            )
        return indices, [self._index.times[index] for index in indices], [found[index] for index in indices]

    def _read(self, wanted: Sequence[int], size: FrameSize) -> dict[int, Image.Image]:
        """The good frames among those wanted, by index."""
        found = dict[int, Image.Image]()
        runs = list[tuple[KeyFrame, deque[int]]]()
        position = 0
        for index in wanted:
            key = self._index.key_before(index)
            is_far = key.number - position > MIN_SEEK_FRAMES
            if is_far or not runs:
                runs.append((key if is_far else FIRST, deque()))
            runs[-1][1].append(index)
            position = index
        for start, todo in runs:
            self._read_run(start, todo, size, found)
        return found

    def _read_run(self, start: KeyFrame, todo: deque[int], size: FrameSize, found: dict[int, Image.Image]) -> None:
        """Decode from `start` on until the frames `todo` are found or known to be lost."""
        damage = Damage(is_timed=bool(self._index.pts))
        index = start.number - 1
        with closing(self._decoded(start, damage)) as frames:
            for index, frame, is_good in frames:
                while todo and todo[0] < index:
                    self._check_lost(start, damage)
                    todo.popleft()
                if todo and todo[0] == index:
                    todo.popleft()
                    if is_good:
                        found[index] = self._presentation.to_image(frame, size)
                if not todo and self._index.pts:
                    return
        if todo or index + 1 != len(self._index):
            self._check_lost(start, damage)

    def _check_lost(self, start: KeyFrame, damage: Damage) -> None:
        """A frame that the packets promise was not decoded.

        Raises:
            _SeekMissedError: Perhaps after decoding from the first frame.
            RecountedError: There was no such frame: nothing is damaged.
        """
        if start.number:
            raise _SeekMissedError
        if not damage.is_seen:
            self._recount()

    def _decoded(self, start: KeyFrame, damage: Damage) -> Generator[tuple[int, Any, bool], None, None]:
        """(index, frame, whether it is good) of the frames from `start` on, in presentation order."""
        from av.error import InvalidDataError

        with closing(self._open()) as container:
            stream = _video_stream(container)
            if start.number:
                container.seek(start.dts, stream=stream)
            last = start.number - 1
            for packet in container.demux(stream):
                try:
                    frames = packet.decode()
                except InvalidDataError:
                    damage.begin(packet.pts)
                    continue
                for frame in frames:
                    is_good = damage.check(frame)
                    number = self._index.number(frame.pts) if self._index.pts else last + 1
                    if self._precedes(frame, number, start):
                        continue
                    if number is None or number <= last:
                        self._check_lost(start, damage)
                    else:
                        last = number
                        yield number, frame, is_good and number not in self._index.damaged

    def _precedes(self, frame: Any, number: int | None, start: KeyFrame) -> bool:
        """Whether a frame is presented before those of a run: it may depend on frames that were not decoded."""
        if number is None:
            return frame.pts is not None and frame.pts < self._index.pts[0]
        return number < start.number

    def _recount(self) -> None:
        """Count the frames by decoding all of them, and keep to that.

        Raises:
            RecountedError: In any case but the next one.
            DamagedError: The file is damaged, so its frames cannot be counted.
        """
        before, self._index = self._index, FrameIndex([], self._index.fps, self._index.duration)
        with closing(self._open()) as container:
            unit = float(_video_stream(container).time_base)
        damage = Damage(is_timed=False)
        pts = [frame.pts for _, frame, _ in self._decoded(FIRST, damage)]
        if damage.is_seen or before.damaged or not may_differ(before, pts):
            raise DamagedError(
                f"the file is damaged: {len(pts)} of {len(before)} frames can be decoded; copy or download it again"
            )
        is_rising = None not in pts and all(a < b for a, b in itertools.pairwise(pts))
        if is_rising:
            times = [(one - pts[0]) * unit for one in pts]
        else:
            times = [before.duration * number / len(pts) for number in range(len(pts))]
        self._index = FrameIndex(times, average_rate(times, before.fps), before.duration, pts if is_rising else [])
        raise RecountedError(len(times))

    def close(self) -> None:
        self._file.close()


@contextmanager
def _logged_errors() -> Iterator[list[tuple[int, str, str]]]:
    """(level, name, message) of what FFmpeg logs meanwhile as errors, repeated ones too."""
    import av.logging

    with _LOG_LOCK, av.logging.Capture() as logs:
        before = av.logging.get_level(), av.logging.get_skip_repeated()
        av.logging.set_level(av.logging.ERROR)
        av.logging.set_skip_repeated(False)
        try:
            yield logs
        finally:
            av.logging.set_level(before[0])
            av.logging.set_skip_repeated(before[1])


def _is_invisible(packet: Any, codec: str) -> bool:
    """Whether a packet gives no frame: a reference frame of VP8, or a repetition in MPEG-4."""
    if codec == "vp8":
        return not bytes(packet)[0] >> 4 & 1
    return codec == "mpeg4" and packet.size <= MAX_NOT_CODED_BYTES


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
