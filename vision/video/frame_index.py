"""The frames of a video in presentation order, from the timestamps of its packets: what a viewer of the file sees.

Number, times and rate of the frames come from here and not from what a container declares: edit lists hide frames,
recorders of browsers declare 1000 frames per second and no duration, broken files lack packets. Independent of the
decoders.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

MAX_RATE_DEVIATION = 0.05
"""A declared frame rate that differs by more from the measured one is not used."""
MAX_JUMP_S = 3600.0
"""A timestamp that is later than the one before by more seconds is a new start of the clock, or broken."""
MAX_BROADCAST_JUMP_S = 10.0
"""The same in broadcast streams, as in FFmpeg."""
MAX_REGULAR = 2.0
"""Ratio of the long to the usual distances of frames up to which a broadcast stream has a constant frame rate."""
MIN_HOLE = 1.5
"""Length of a hole in units of the longest usual distance of two frames."""
MAX_JITTER = 0.5
"""Distance, in frames, of the times of a constant frame rate from even ones."""
MAX_LAST = 3.0
"""Frames that the last one of a constant frame rate may last; containers are inexact about it."""
MAX_FPS = 1000.0
MAX_LEADING_FRAMES = 16
"""Frames at the start of a stream that may depend on frames before it, so that no decoder shows them."""


@dataclass(frozen=True, slots=True)
class PacketTimes:
    """What a demuxer says of one packet.

    Attributes:
        pts: Presentation timestamp in units of the stream; None if unknown.
        dts: Decoding timestamp, likewise.
        is_key: Whether decoding can start here.
        is_corrupt: Whether parts of it are missing.
        is_hidden: Whether an edit list hides it.
        duration: In units of the stream; 0 if unknown.
    """

    pts: int | None
    dts: int | None
    is_key: bool
    is_corrupt: bool = False
    is_hidden: bool = False
    duration: int = 0


class KeyFrame(NamedTuple):
    """A frame that decoding can start at: its index and decoding timestamp."""

    number: int
    dts: int


FIRST = KeyFrame(0, 0)
"""The first packet, whatever its timestamp."""


@dataclass
class FrameIndex:
    """Frames in presentation order.

    Attributes:
        times: Seconds from the first frame.
        fps: Average frame rate; 0 if unknown.
        duration: In seconds.
        pts: Timestamps of the decoded frames, rising; empty where frames can be told by their order only.
        damaged: Indices of frames that are missing in the file, or depend on missing ones.
        keys: Frames that decoding can start at, rising.
    """

    times: list[float]
    fps: float
    duration: float
    pts: list[int] = field(default_factory=list)
    damaged: set[int] = field(default_factory=set)
    keys: list[KeyFrame] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.times)

    @property
    def is_constant(self) -> bool:
        """Whether all frames are shown equally long, but for the rounding of their times."""
        step = self.times[-1] / (len(self) - 1) if len(self) > 1 else 0.0
        is_even = all(abs(time - number * step) <= MAX_JITTER * step for number, time in enumerate(self.times))
        return step <= 0 or (is_even and self.duration - self.times[-1] <= MAX_LAST * step)

    def shown_at(self, numbers: Sequence[int]) -> list[int]:
        """Indices of the frames that are shown when these would be if all were shown equally long; none twice."""
        if self.is_constant or len(numbers) >= len(self):
            return list(numbers)
        step = self.duration / len(self)
        return sorted({max(0, bisect_right(self.times, number * step) - 1) for number in numbers})

    def number(self, pts: int | None) -> int | None:
        """The index of the frame with that timestamp; None if there is none."""
        if pts is None:
            return None
        at = bisect_left(self.pts, pts)
        return at if at < len(self.pts) and self.pts[at] == pts else None

    def key_before(self, index: int) -> KeyFrame:
        """The last frame up to `index` that decoding can start at."""
        at = bisect_right(self.keys, (index, 1 << 64))
        return self.keys[at - 1] if at else FIRST


def index_packets(
    packets: Sequence[PacketTimes],
    time_base: float,
    declared_fps: float,
    *,
    by_order: bool = False,
    is_broadcast: bool = False,
    is_damaged: bool = False,
    declared_duration: float = 0.0,
) -> FrameIndex:
    """The index of a stream.

    Args:
        packets: In the order of decoding.
        time_base: Seconds of one unit.
        declared_fps: Frame rate that the container declares; 0 if none.
        by_order: The timestamps are those of decoding, as in AVI with B frames.
        is_broadcast: Of a format for broadcast: recordings begin anywhere, and their clock may start again.
        is_damaged: The demuxer found damage, so a hole in the times is one of frames and not a pause of the picture.
    """
    packets = _from_first_key(packets) if is_broadcast else packets
    packets = [packet for packet in packets if not packet.is_hidden]
    if any(packet.pts is None for packet in packets):
        fps = declared_fps if 0 < declared_fps <= MAX_FPS else 0.0
        times = [number / fps if fps else 0.0 for number in range(len(packets))]
        return FrameIndex(times, fps, len(packets) / fps if fps else 0.0)
    max_jump = MAX_BROADCAST_JUMP_S if is_broadcast else MAX_JUMP_S
    segments = list(_split_at_jumps(packets, max_jump / time_base))
    pts, times, damaged = list[int](), list[float](), set[int]()
    for segment in segments:
        interval, longest = _usual_intervals(segment)
        start = times[-1] + interval * time_base if times else 0.0
        has_holes = is_damaged or (is_broadcast and longest <= MAX_REGULAR * interval)
        min_hole = MIN_HOLE * longest if has_holes and longest else math.inf
        end = declared_duration / time_base if is_damaged and len(segments) == 1 and not is_broadcast else 0.0
        shown, bad = _present(segment, interval, min_hole, None if times or is_broadcast else -interval, end)
        damaged |= {len(pts) + number for number in bad}
        times += [start + (one - shown[0]) * time_base for one in shown]
        pts += shown
    fps = average_rate(times, declared_fps)
    last = max(packets, key=lambda packet: packet.pts or 0).duration * time_base if len(segments) == 1 else 0.0
    end = last if last > 0 else (1 / fps if fps else 0.0)
    index = FrameIndex(times, fps, (times[-1] if times else 0.0) + end, damaged=damaged)
    if not index.is_constant:
        index.fps = min(fps, len(times) / index.duration)  # less where the last frame is held
    if len(segments) == 1 and not by_order and len(set(pts)) == len(pts):
        index.pts = pts
        starts = (packet for packet in packets if packet.is_key and packet.dts is not None)
        index.keys = sorted(KeyFrame(bisect_left(pts, packet.pts or 0), packet.dts or 0) for packet in starts)
    return index


def average_rate(times: Sequence[float], declared: float) -> float:
    """Frames per second: the declared rate if the times agree with it."""
    span = times[-1] - times[0] if times else 0.0
    if span <= 0:
        return declared if 0 < declared <= MAX_FPS else 0.0
    measured = (len(times) - 1) / span
    return declared if declared > 0 and abs(measured / declared - 1) <= MAX_RATE_DEVIATION else measured


def _from_first_key(packets: Sequence[PacketTimes]) -> Sequence[PacketTimes]:
    """Without what precedes the first key frame of a recording that begins in the middle: no decoder shows it."""
    first = next((number for number, packet in enumerate(packets) if packet.is_key), 0)
    if not first:
        return packets
    start = packets[first].pts
    return [one for one in packets[first:] if start is None or one.pts is None or one.pts >= start]


def _split_at_jumps(packets: Sequence[PacketTimes], max_jump: float) -> Iterator[list[PacketTimes]]:
    """Parts within which the decoding timestamps rise, as in files that were put one after the other."""
    part, last = list[PacketTimes](), None
    for packet in packets:
        clock = packet.pts if packet.dts is None else packet.dts
        jumps = packet.dts is not None and last is not None and not last <= packet.dts <= last + max_jump
        if part and jumps:
            # The break is reported for the last packets, which only lack their successors.
            yield [*part[:-3], *(replace(one, is_corrupt=False) for one in part[-3:])]
            part = []
        part.append(packet)
        last = clock if packet.dts is not None else last
    if part:
        yield part


def _usual_intervals(packets: Sequence[PacketTimes]) -> tuple[float, float]:
    """The median distance of two frames in units of the stream, and that which nine of ten do not exceed."""
    pts = sorted(packet.pts or 0 for packet in packets)
    distances = sorted(b - a for a, b in itertools.pairwise(pts) if b > a)
    return (distances[len(distances) // 2], distances[len(distances) * 9 // 10]) if distances else (0.0, 0.0)


def _present(
    packets: Sequence[PacketTimes], interval: float, min_hole: float, begin: float | None, end: float
) -> tuple[list[int], set[int]]:
    """Timestamps in presentation order, those of missing frames included, and the indices of damaged frames.

    Args:
        packets: In the order of decoding.
        interval: Usual distance of two frames.
        min_hole: Frames are missing where the distance is larger.
        begin: Such a distance is also looked for between this and the first timestamp; None: it is not.
        end: Likewise between the last timestamp and this; 0: it is not.
    """
    pts = sorted(packet.pts or 0 for packet in packets)
    edges = [*([] if begin is None else [begin]), *pts, *([end] if end else [])]
    holes = [(a, b) for a, b in itertools.pairwise(edges) if b - a > min_hole]
    bad = _dependent(packets, {int(one) for hole in holes for one in hole})
    for a, b in holes:
        count = max(1, min(round((b - a) / interval) - 1, 10 * len(packets)))
        missing = [round(a + (b - a) * (number + 1) / (count + 1)) for number in range(count)]
        bad.update(missing)
        pts += missing
    shown = sorted(pts)
    return shown, {number for number, one in enumerate(shown) if one in bad}


def _dependent(packets: Sequence[PacketTimes], edges: set[int]) -> set[int]:
    """Timestamps of frames that are corrupt or depend on corrupt or missing ones.

    Args:
        packets: In the order of decoding.
        edges: Timestamps of the frames on both sides of a hole. The damage may lie before the hole, so the whole group
            of frames that depend on one key frame is taken, except for a key frame after the hole.
    """
    bad = set[int]()
    group, is_bad = list[int](), False
    for packet in packets:
        pts = packet.pts or 0
        if packet.is_key:
            group, is_bad = [], False
        group.append(pts)
        if packet.is_corrupt:
            is_bad = True
        elif pts in edges and len(group) > 1:
            is_bad = True
            bad.update(group)
        if is_bad:
            bad.add(pts)
    return bad


class Damage:
    """Follows which frames depend on damaged ones: all after the damage, up to the next key frame.

    Args:
        is_timed: The frames have timestamps; otherwise it is unknown how many were lost, and damage has no end.

    Attributes:
        is_seen: There was some.
    """

    def __init__(self, is_timed: bool) -> None:
        self.is_seen = False
        self._is_timed = is_timed
        self._since: int | None = None

    def begin(self, pts: int | None) -> None:
        """The packet or frame of this timestamp is damaged."""
        self.is_seen = True
        self._since = max(self._since or 0, pts or 0)

    def check(self, frame: Any) -> bool:
        """Whether a decoded frame is as it was encoded."""
        if frame.is_corrupt:
            self.begin(frame.pts)
        elif self._since is not None and self._is_timed and frame.key_frame and (frame.pts or 0) > self._since:
            self._since = None
        return self._since is None


def may_differ(index: FrameIndex, decoded: Sequence[int | None]) -> bool:
    """Whether an undamaged file may give these frames: no fewer than packets, but for half frames in packets of their
    own (fields of interlaced video), and frames at the start that depend on what is not there."""
    missing = len(index) - len(decoded)
    if missing <= 0 or len(decoded) <= 0.55 * len(index):
        return len(decoded) >= 0.45 * len(index)
    return missing <= MAX_LEADING_FRAMES and bool(index.pts) and decoded[0] == index.pts[missing]
