"""Which frames of a file are shown, and when: edit lists, absent or absurd rates and timestamps, damage, cut files.

The frames show their number, so every returned frame is compared with the time that is said of it.
"""

from __future__ import annotations

import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from video_files import numbered_frame, read_number, write_video

from mmspec.vision.video import pyav_reader
from mmspec.vision.video.completeness import find_cut
from mmspec.vision.video.frame_index import PacketTimes, index_packets, may_differ
from mmspec.vision.video.frames import Frames, read_frames

av = pytest.importorskip("av")
FPS = 10
QUIET = {"libx265": {"x265-params": "log-level=none"}}


def numbered(path: Path, count: int = 100, codec: str = "libx264", gop: int = 10, fps: int = FPS, **more: Any) -> Path:
    options = {"g": str(gop), **QUIET.get(codec, {})}
    return write_video(path, [numbered_frame(i) for i in range(count)], codec, fps=fps, options=options, **more)


def numbers(frames: Frames) -> list[int]:
    return [read_number(image) for image in frames.images]


def trimmed(source: Path, target: Path, start: int, stop: int = 10**9) -> Path:
    """A copy of the packets from the first one on, which shows frames `start` to `stop`: `ffmpeg -ss -c copy`."""
    with av.open(str(source)) as old, av.open(str(target), "w", options={"avoid_negative_ts": "disabled"}) as new:
        stream = old.streams.video[0]
        copy = new.add_stream_from_template(stream)
        offset = round(start / FPS / stream.time_base)
        for packet in old.demux(stream):
            if packet.dts is None or packet.dts * stream.time_base >= Fraction(stop, FPS):
                continue
            packet.pts, packet.dts, packet.stream = packet.pts - offset, packet.dts - offset, copy
            new.mux(packet)
    return target


# --- edit lists, rates, times ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["mp4", "mov"])
def test_frames_before_the_edit_list_are_not_shown(suffix: str, tmp_path: Path) -> None:
    clip = trimmed(numbered(tmp_path / "in.mp4", gop=50), tmp_path / f"out.{suffix}", 30)
    frames = read_frames(clip, num_frames=7)
    assert numbers(frames) == [30, 40, 50, 60, 70, 80, 90] and frames.timestamps == pytest.approx(range(7), abs=1e-3)
    assert numbers(read_frames(clip, fps=1)) == numbers(frames)
    assert (frames.metadata.total_num_frames, frames.metadata.fps) == (70, FPS)
    assert frames.metadata.duration == pytest.approx(7)
    short = read_frames(trimmed(tmp_path / "in.mp4", tmp_path / "short.mp4", 45, 49), num_frames=50)
    assert numbers(short)[:3] == [45, 46, 47] and len(set(numbers(short))) == len(short.images) <= 7


def test_recordings_of_browsers(tmp_path: Path) -> None:
    """MediaRecorder: no duration, no number of frames, 1000 frames per second, varying times."""
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.integers(30, 170, 240)).tolist()
    pictures = [numbered_frame(i) for i in range(240)]
    clip = write_video(
        tmp_path / "a.webm",
        pictures,
        "libvpx",
        fps=1000,
        pts=times,
        format={"live": "1"},
        options={"deadline": "realtime"},
    )
    seconds = (times[-1] - times[0]) / 1000
    frames = read_frames(clip, fps=1)
    assert len(frames.images) == pytest.approx(seconds, abs=1)
    assert frames.metadata.duration == pytest.approx(seconds, abs=0.2)
    assert frames.metadata.fps == pytest.approx(239 / seconds)
    for number, time in zip(numbers(frames), frames.timestamps, strict=True):
        assert time == pytest.approx((times[number] - times[0]) / 1000, abs=2e-3)


@pytest.mark.parametrize(
    ("suffix", "codec"),
    [("avi", "mpeg4"), ("avi", "libx264"), ("mpg", "mpeg1video"), ("vob", "mpeg2video"), ("m2ts", "libx264"),
     ("flv", "flv1"), ("asf", "wmv2"), ("m2v", "mpeg2video"), ("3gp", "mpeg4")],
)  # fmt: skip
def test_timestamps_with_reordered_frames(suffix: str, codec: str, tmp_path: Path) -> None:
    """Containers without presentation timestamps, or without a start at 0."""
    bf = {} if codec in ("flv1", "wmv2") else {"bf": "2"}
    pictures = [numbered_frame(i) for i in range(50)]
    format_name = {"vob": {"packetsize": "2048"}}.get(suffix, {})
    clip = write_video(tmp_path / f"a.{suffix}", pictures, codec, fps=25, options={"g": "12", **bf}, format=format_name)
    frames = read_frames(clip, num_frames=10)
    assert numbers(frames) == list(range(0, 50, 5))
    assert frames.timestamps == pytest.approx([i / 5 for i in range(10)], abs=0.01)
    assert frames.metadata.total_num_frames == 50 and frames.metadata.duration == pytest.approx(2, abs=0.05)


def test_a_file_put_together_of_two(tmp_path: Path) -> None:
    """The clock starts again and the size changes."""
    parts = [
        write_video(tmp_path / f"{side}.ts", [numbered_frame(i, side) for i in range(20)], options={"g": "5"})
        for side in (160, 320)
    ]
    (tmp_path / "both.ts").write_bytes(parts[0].read_bytes() + parts[1].read_bytes())
    frames = read_frames(tmp_path / "both.ts", num_frames=10)
    assert numbers(frames) == [0, 4, 8, 12, 16, 0, 4, 8, 12, 16]
    assert frames.timestamps == pytest.approx([0.4 * i for i in range(10)], abs=1e-3)
    assert {image.size for image in frames.images} == {(160, 160)}


@pytest.mark.parametrize("codec", ["libx264", "libx265"])
def test_seeking_gives_the_same_frames(codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H.265 has open groups of frames by default: frames after a key frame are presented before it."""
    clip = numbered(tmp_path / "a.mp4", 120, codec, gop=12)
    monkeypatch.setattr(pyav_reader, "MIN_SEEK_FRAMES", 1)
    jumps = list[int]()
    original = pyav_reader.PyavReader._read_run

    def spy(self: Any, start: Any, *rest: Any) -> None:
        jumps.append(start.number)
        original(self, start, *rest)

    monkeypatch.setattr(pyav_reader.PyavReader, "_read_run", spy)
    assert numbers(read_frames(clip, num_frames=11)) == [i * 120 // 11 for i in range(11)]
    assert len(set(jumps)) > 5
    assert [round(time * FPS) for time in read_frames(clip, num_frames=11).timestamps] == [
        i * 120 // 11 for i in range(11)
    ]


def test_a_seek_that_lands_elsewhere_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = numbered(tmp_path / "a.mp4", 60, gop=12)
    monkeypatch.setattr(pyav_reader, "MIN_SEEK_FRAMES", 1)
    key_before = pyav_reader.FrameIndex.key_before

    def late(self: Any, index: int) -> Any:
        key = key_before(self, index)
        return key._replace(dts=self.keys[-1].dts) if key.number else key

    monkeypatch.setattr(pyav_reader.FrameIndex, "key_before", late)
    assert numbers(read_frames(clip, num_frames=6)) == [0, 10, 20, 30, 40, 50]


def test_fields_in_packets_of_their_own_are_recounted() -> None:
    packets = [PacketTimes(i, i, i % 20 == 0) for i in range(40)]
    index = index_packets(packets, 0.02, 50.0)
    assert may_differ(index, list(range(0, 40, 2))) and not may_differ(index, [*range(30)])
    assert may_differ(index, [*range(3, 40)]) and not may_differ(index, [*range(37)])


# --- damage -----------------------------------------------------------------------------------------------------------

FILES = [("libx264", "mp4"), ("libx264", "mkv"), ("libx264", "ts"), ("libx265", "mp4"), ("mpeg4", "avi"),
         ("mpeg2video", "ts"), ("libvpx", "webm"), ("wmv2", "asf")]  # fmt: skip


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], bytes]:
    folder = tmp_path_factory.mktemp("clips")
    found = {}
    for codec, suffix in FILES:
        format_options = {"movflags": "faststart"} if suffix == "mp4" else {}
        fps = 25 if codec == "mpeg2video" else FPS
        found[codec, suffix] = numbered(
            folder / f"{codec}.{suffix}", 100, codec, fps=fps, format=format_options
        ).read_bytes()
    return found


def check_frames(content: bytes, fps: int, num_frames: int) -> bool:
    """Whether the frames were read; every one is that of its time (one lost packet of AVI shifts them by one)."""
    try:
        frames = read_frames(content, num_frames=num_frames)
    except ValueError as error:
        if "\n" in str(error) or len(str(error)) > 300:
            raise
        return False
    for number, time in zip(numbers(frames), frames.timestamps, strict=True):
        assert abs(number - time * fps) < 1.2, (numbers(frames), frames.timestamps)
    return True


@pytest.mark.every(2)
@pytest.mark.parametrize(("codec", "suffix"), FILES)
@pytest.mark.parametrize("share", [0.45, 0.7])
def test_damage_is_never_spliced(codec: str, suffix: str, share: float, clips: Any) -> None:
    content, fps = clips[codec, suffix], 25 if codec == "mpeg2video" else FPS
    assert check_frames(content, fps, 50)
    at, length = int(len(content) * share), len(content) // 8
    for junk in (bytes(length), random.Random(0).randbytes(length)):
        bad = content[:at] + junk + content[at + length :]
        read = check_frames(bad, fps, 50)
        assert not read or codec in ("libvpx", "wmv2"), "these decode a damaged packet as another picture"
        check_frames(bad, fps, 2)


def test_damage_elsewhere_does_not_matter(clips: Any) -> None:
    """Frames that are asked for and whole are returned; the message says where the damage is."""
    content = bytearray(clips["libx264", "mkv"])
    at = len(content) * 7 // 10
    content[at : at + 100] = bytes(100)
    assert numbers(read_frames(bytes(content), num_frames=2)) == [0, 50]
    with pytest.raises(ValueError, match=r"damaged between [5-7]\.\d and [6-9]\.\d s of 10\.0 s: \d+ of 50 frames"):
        read_frames(bytes(content), num_frames=50)


@pytest.mark.parametrize(("codec", "suffix"), FILES)
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_cut_clip_is_not_a_whole_one(codec: str, suffix: str, share: float, clips: Any) -> None:
    content = clips[codec, suffix]
    with pytest.raises(ValueError, match=r"the file is cut|not a video that can be read|without frames|damaged"):
        read_frames(content[: int(len(content) * share) + 7], num_frames=8)  # not between two packets


@pytest.mark.parametrize("suffix", ["flv", "ogg", "webm"])
def test_files_without_a_length_that_end_in_a_packet(suffix: str, tmp_path: Path) -> None:
    import io

    if suffix == "ogg":
        page = b"OggS" + bytes(22) + b"\1\x64" + bytes(100)
        whole, demuxer = page * 5, "ogg"
    elif suffix == "flv":
        whole, demuxer = numbered(tmp_path / "a.flv", 20, "flv1").read_bytes(), "flv"
    else:
        whole, demuxer = numbered(tmp_path / "a.webm", 20, "libvpx").read_bytes(), "matroska"
    assert find_cut(io.BytesIO(whole), demuxer) is None
    for size in (len(whole) // 2 + 3, len(whole) * 3 // 4 + 1):
        assert find_cut(io.BytesIO(whole[:size]), demuxer) is not None


@pytest.mark.parametrize("seed", range(3))
def test_find_cut_of_any_bytes(seed: int) -> None:
    """Never an exception, and never long."""
    import io

    rng = random.Random(seed)
    for demuxer in ("mov", "matroska", "avi", "asf", "flv", "ogg", "mpegts", "mpeg", "gif"):
        for size in (0, 1, 9, 40, 5000):
            find_cut(io.BytesIO(rng.randbytes(size)), demuxer)
            find_cut(io.BytesIO(bytes(size)), demuxer)


# --- the index --------------------------------------------------------------------------------------------------------


def packets(*pts: int | None, keys: tuple[int, ...] = (0,), **more: Any) -> list[PacketTimes]:
    return [PacketTimes(one, i, i in keys, **more) for i, one in enumerate(pts)]


def test_index_counts_what_is_shown() -> None:
    order = packets(0, 3, 1, 2, 6, 4, 5)
    index = index_packets([*order[:1], *order[1:]], 0.5, 2.0)
    assert index.times == [0, 0.5, 1, 1.5, 2, 2.5, 3] and index.fps == 2 and index.duration == 3.5
    assert [index.number(pts) for pts in (0, 6, 7, None)] == [0, 6, None, None]
    hidden = [PacketTimes(i, i, i == 0, is_hidden=i < 4) for i in range(10)]
    assert len(index_packets(hidden, 0.1, 10.0)) == 6
    assert index_packets([], 0.1, 10.0).duration <= 0.1


def test_index_without_or_with_absurd_times() -> None:
    unknown = index_packets(packets(0, None, 2), 0.1, 25.0)
    assert unknown.times == [0, 0.04, 0.08] and not unknown.pts
    assert index_packets(packets(0, None), 0.1, 90000.0).fps == 0
    rate = index_packets(packets(*range(0, 1000, 40)), 0.001, 1000.0)
    assert rate.fps == pytest.approx(25) and rate.duration == pytest.approx(1)
    clock = [PacketTimes(pts, pts, True) for pts in (0, 1, 2, 10**9, 3, 4)]
    index = index_packets(clock, 0.1, 10.0)
    assert max(index.times) < 1 and index.times == sorted(index.times) and not index.pts


def test_index_of_holes() -> None:
    shown = [PacketTimes(i, i, i % 5 == 0) for i in range(30) if i not in range(12, 15)]
    assert not index_packets(shown, 0.1, 10.0).damaged, "a pause of the picture"
    damaged = index_packets(shown, 0.1, 10.0, is_damaged=True)
    assert len(damaged) == 30 and damaged.damaged == {10, 11, 12, 13, 14}
    assert index_packets(shown, 0.1, 10.0, is_broadcast=True).damaged == {10, 11, 12, 13, 14}
    late = index_packets([PacketTimes(i, i, i == 7) for i in range(4, 12)], 0.1, 10.0, is_damaged=True)
    assert len(late) == 12 and {0, 1, 2, 3} <= late.damaged
    middle = index_packets([PacketTimes(i, i, i == 7) for i in range(4, 12)], 0.1, 10.0, is_broadcast=True)
    assert len(middle) == 5 and not middle.damaged
    endless = [*packets(0, 1, 2, 3, keys=(0,)), PacketTimes(10**4, 4, True)]
    assert len(index_packets(endless, 0.1, 10.0, is_damaged=True)) <= 60


def test_names_of_cameras_in_a_folder(tmp_path: Path) -> None:
    """By content where a suffix is shared with other kinds of files."""
    from mmspec.app.io.sources import is_media_file

    codecs = {"m2ts": "libx264", "asf": "wmv2", "wmv": "wmv2", "flv": "flv1", "3gp": "h264"}
    for suffix in ("ts", "vob", "m2v", "mpeg", *codecs):
        codec = codecs.get(suffix, "mpeg2video")
        assert is_media_file(numbered(tmp_path / f"a.{suffix}", 3, codec, fps=25))
    (tmp_path / "b.ts").write_text("export const answer: number = 42;\n" * 20)
    (tmp_path / "c.mod").write_bytes(b"module" * 200)
    assert not is_media_file(tmp_path / "b.ts") and not is_media_file(tmp_path / "c.mod")
