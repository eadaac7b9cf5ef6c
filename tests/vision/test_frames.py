"""Frames out of video files, with each reader: the right ones, and clear words for files that are none.

What is right is what PyAV decodes from the first frame to the last, and what transformers chooses. torchcodec is played
by a stand-in where it is not installed.
"""

from __future__ import annotations

import importlib.util
import os
import struct
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers.video_utils import VideoMetadata, default_sample_indices_fn, load_video
from video_files import grey_frame, grey_frame_numbers, write_audio_only, write_empty_video, write_video

from mmspec.vision.video import backends as readers
from mmspec.vision.video.frames import MAX_FRAMES, Fps, MostDifferent, Uniform, read_frames

av = pytest.importorskip("av")
pytest.importorskip("av.subtitles.stream")  # loaded late by PyAV itself, when a test may have hidden it
BACKENDS = ["decord", "torchcodec", "av"]
Picture = Callable[[int], np.ndarray]


def scene(number: int) -> np.ndarray:
    """A white square that moves, on a ground of its own colour: no two frames are alike."""
    picture = np.full((48, 80, 3), (5 * number % 200, 40, 200 - 7 * number % 200), dtype=np.uint8)
    place = 2 * number % 60
    picture[10:30, place : place + 16] = 255
    return picture


def all_of(path: Path) -> tuple[np.ndarray, list[float]]:
    """Every frame of a file and its time, by plain decoding from the start."""
    with av.open(str(path)) as container:
        decoded = [(frame.to_ndarray(format="rgb24"), frame.time) for frame in container.decode(video=0)]
    return np.stack([picture for picture, _ in decoded]), [time - decoded[0][1] for _, time in decoded]


def apart(image: Image.Image, picture: np.ndarray) -> float:
    """Mean difference of their colour values."""
    return float(np.abs(np.asarray(image).astype(int) - picture.astype(int)).mean())


class Played:
    """What torchcodec 0.17 documents of its `VideoDecoder`, in as far as it is used."""

    def __init__(self, source: str | bytes) -> None:
        import io

        with av.open(io.BytesIO(source) if isinstance(source, bytes) else source) as container:
            if not container.streams.video:
                raise ValueError("No valid stream found in input file. Is -1 of the desired media type?")
            stream = container.streams.video[0]
            self.frames = [
                (frame.to_image().rotate(frame.rotation, expand=True), frame.time) for frame in container.decode(stream)
            ]
            rate = float(stream.average_rate or 0)
        if not self.frames:
            raise ValueError("a video without frames")
        width, height = self.frames[0][0].size if self.frames else (0, 0)
        begin = self.frames[0][1] if self.frames else 0.0
        self.metadata = types.SimpleNamespace(
            average_fps=rate,
            duration_seconds=len(self.frames) / rate if rate else None,
            width=width,
            height=height,
            begin_stream_seconds=begin,
        )

    def __len__(self) -> int:
        return len(self.frames)

    def get_frame_at(self, index: int) -> Any:
        image, time = self.frames[index]
        data = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)
        return types.SimpleNamespace(data=data, pts_seconds=time)


def only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only this reader is installed; torchcodec is played if it is not there."""
    for other in BACKENDS:
        if other != name:
            monkeypatch.setitem(sys.modules, other, None)
    if name == "torchcodec":
        decoders = types.ModuleType("torchcodec.decoders")
        decoders.VideoDecoder = Played  # type: ignore[attr-defined]
        try:
            import torchcodec.decoders  # noqa: F401
        except Exception:
            monkeypatch.setitem(sys.modules, "torchcodec", types.ModuleType("torchcodec"))
            monkeypatch.setitem(sys.modules, "torchcodec.decoders", decoders)


@pytest.fixture(params=BACKENDS)
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Only this one is installed."""
    if request.param != "torchcodec":
        pytest.importorskip(request.param)
    only(request.param, monkeypatch)
    return {"av": "pyav"}.get(request.param, str(request.param))


def test_the_frames_that_were_chosen(reader: str, tmp_path: Path) -> None:
    file = write_video(tmp_path / "clip.mp4", 24)
    frames = read_frames(file, Uniform(4))
    assert grey_frame_numbers(frames.images) == [3, 9, 15, 21] == Uniform(4).sample(24, 10)
    assert frames.timestamps == pytest.approx([0.3, 0.9, 1.5, 2.1])
    assert all(image.mode == "RGB" and image.size == (64, 64) for image in frames.images)
    assert grey_frame_numbers(read_frames(str(file)).images) == Uniform(8).sample(24, 10)
    assert len(read_frames(write_video(tmp_path / "short.mp4", 3)).images) == 3


class Choice:
    """A sampler that says just that."""

    def __init__(self, *chosen: int) -> None:
        self.chosen = list(chosen)

    def sample(self, total: int, fps: float) -> list[int]:
        return self.chosen


@pytest.mark.parametrize(("chosen", "words"), [([], "chose 0"), ([99], "rising numbers below 5"), ([3, 1], "rising")])
def test_samplers_that_choose_badly(reader: str, chosen: list[int], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        read_frames(write_video(tmp_path / "clip.mp4", 5), Choice(*chosen))


def test_too_many(reader: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"between 1 and {MAX_FRAMES}"):
        read_frames(write_video(tmp_path / "clip.mp4", 5), Choice(*range(MAX_FRAMES + 1)))


@pytest.mark.parametrize("content", [b"", b"no video at all" * 50, b"\0" * 3000])
def test_files_that_are_no_videos(reader: str, content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "clip.mp4"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="not a video that can be read") as failed:
        read_frames(file)
    assert "\n" not in str(failed.value) and str(file) in str(failed.value) and ".cc:" not in str(failed.value)


def test_a_video_without_frames(reader: str, tmp_path: Path) -> None:
    write_empty_video(tmp_path / "none.mp4")
    words = "not a video that can be read" if reader == "torchcodec" else "a video without frames"
    with pytest.raises(ValueError, match=words):
        read_frames(tmp_path / "none.mp4")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such video"):
        read_frames(tmp_path / "clip.mp4")


def test_without_a_reader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = write_video(tmp_path / "clip.mp4", 3)
    for name in BACKENDS:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'mmspec\[video\]'"):
        read_frames(file)


def test_what_one_reader_cannot_read_the_other_may(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    decord = pytest.importorskip("decord")

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Check failed: st_nb >= 0")

    monkeypatch.setattr(decord, "VideoReader", refuse)
    assert grey_frame_numbers(read_frames(write_video(tmp_path / "clip.mp4", 6), Uniform(2)).images) == [1, 4]


@pytest.mark.parametrize("total", [1, 2, 7, 8, 9, 1000])
@pytest.mark.parametrize("count", [1, 4, 8])
def test_evenly(total: int, count: int) -> None:
    chosen = Uniform(count).sample(total, 25.0)
    assert len(chosen) == min(count, total) and chosen == sorted(set(chosen))
    assert chosen[0] >= 0 and chosen[-1] < total
    assert abs((chosen[0] + chosen[-1]) - (total - 1)) <= 2, "not in the middle"


# --- against plain decoding -------------------------------------------------------------------------------------------

CODECS = [("libx264", "mp4"), ("libx265", "mp4"), ("libvpx-vp9", "webm"), ("libx264", "mkv"), ("mpeg4", "avi")]


@pytest.mark.parametrize(("codec", "suffix"), CODECS)
def test_every_frame_is_the_one_that_plain_decoding_gives(reader: str, codec: str, suffix: str, tmp_path: Path) -> None:
    quiet = {"x265-params": "log-level=none"} if codec == "libx265" else {}
    made = [scene(number) for number in range(30)]
    file = write_video(tmp_path / f"clip.{suffix}", made, codec, options={"g": "12", **quiet})
    pictures, times = all_of(file)
    for chosen in (range(30), [0, 29], [5, 6, 11, 12, 13, 25], [17]):
        frames = read_frames(file, Choice(*chosen))
        assert frames.metadata.frames_indices == tuple(chosen) and frames.metadata.video_backend == reader
        for index, image, time in zip(chosen, frames.images, frames.timestamps, strict=True):
            off = [apart(image, picture) for picture in pictures]
            assert off[index] < 1.5 and off[index] == min(off), f"frame {index} looks like {int(np.argmin(off))}"
            assert time == pytest.approx(times[index], abs=1e-3)


@pytest.mark.parametrize("codec", ["libx264", "libx265"])
def test_decord_jumps_only_where_it_lands_well(codec: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """H.265 as its encoder makes it by default: a jump shows a frame that comes later."""
    decord = pytest.importorskip("decord")
    quiet = {"x265-params": "log-level=none"} if codec == "libx265" else {}
    file = write_video(
        tmp_path / "clip.mp4", [scene(number) for number in range(60)], codec, options={"g": "12", **quiet}
    )
    pictures, _ = all_of(file)
    monkeypatch.setattr(readers, "NEAR", 30)
    jumps, seek = list[int](), decord.VideoReader.seek_accurate

    def spy(self: Any, index: int) -> None:
        jumps.append(index)
        seek(self, index)

    monkeypatch.setattr(decord.VideoReader, "seek_accurate", spy)
    frames = read_frames(file, Choice(3, 35, 59), backend="decord")
    for index, image in zip((3, 35, 59), frames.images, strict=True):
        assert int(np.argmin([apart(image, picture) for picture in pictures])) == index
    assert (35 in jumps) == (codec == "libx264") and 59 not in jumps, "24 frames are near"


@pytest.mark.parametrize("width", [10, 16, 24, 34, 48, 62, 66, 98])
def test_narrow_frames(reader: str, width: int, tmp_path: Path) -> None:
    """decord counts the padding of a line as colours."""
    ramp = np.zeros((40, width, 3), dtype=np.uint8)
    ramp[:, :, 0], ramp[:, :, 1] = np.linspace(20, 230, width), np.linspace(20, 230, 40)[:, None]
    file = write_video(tmp_path / "clip.mp4", [ramp] * 3)
    assert apart(read_frames(file).images[1], ramp) < 12
    small = read_frames(file, max_pixels=12 * width).images[1]
    assert apart(small, np.asarray(Image.fromarray(ramp).resize(small.size))) < 14


def test_bytes_are_read_like_the_file(reader: str, tmp_path: Path) -> None:
    file = write_video(tmp_path / "clip.mp4", 12)
    one, two = read_frames(file, Uniform(4)), read_frames(file.read_bytes(), Uniform(4))
    assert one.timestamps == two.timestamps and one.metadata == two.metadata
    assert np.array_equal(one.array(), two.array()) and one.array().shape == (4, 64, 64, 3)
    assert one.array().dtype == np.uint8


def test_the_name_of_a_file_says_nothing(reader: str, tmp_path: Path) -> None:
    write_video(tmp_path / "clip.mp4", 6).rename(tmp_path / "clip.avi")
    assert grey_frame_numbers(read_frames(tmp_path / "clip.avi", Uniform(2)).images) == [1, 4]


def test_what_a_video_is(reader: str, tmp_path: Path) -> None:
    file = write_video(tmp_path / "clip.mp4", [scene(number) for number in range(15)], fps=5)
    held = read_frames(file, Uniform(3)).metadata
    assert (held.total_num_frames, held.fps, held.width, held.height, held.frames_indices) == (
        15,
        5.0,
        80,
        48,
        (2, 7, 12),
    )
    assert held.duration == pytest.approx(3.0, abs=0.01) and held.video_backend == reader
    theirs = VideoMetadata(**held.for_processor())
    assert theirs.timestamps == [0.4, 1.4, 2.4] and theirs.total_num_frames == 15


PTS = [0, 100, 150, 700, 710, 1500, 1600, 1700, 3000, 3010]


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
@pytest.mark.parametrize("late", [0, 5000])
def test_times_of_a_variable_rate(reader: str, suffix: str, late: int, tmp_path: Path) -> None:
    """The times that are written in the file, from the first frame on."""
    file = write_video(tmp_path / f"clip.{suffix}", 10, pts=[time + late for time in PTS])
    frames = read_frames(file, Choice(0, 2, 3, 5, 9))
    assert grey_frame_numbers(frames.images) == [0, 2, 3, 5, 9]
    assert frames.timestamps == pytest.approx([0.0, 0.15, 0.7, 1.5, 3.01], abs=1e-3)


@pytest.mark.parametrize(("turn", "matrix"), [(90, (0, 1, -1, 0)), (180, (-1, 0, 0, -1)), (270, (0, -1, 1, 0))])
def test_a_phone_held_upright(reader: str, turn: int, matrix: tuple[int, ...], tmp_path: Path) -> None:
    """The header of an mp4 says how the picture is turned, clockwise; what is returned stands upright."""
    picture = np.zeros((48, 80, 3), dtype=np.uint8)
    picture[:16, :24] = 250  # in the upper left corner
    file = write_video(tmp_path / "clip.mp4", [picture] * 3)
    data = bytearray(file.read_bytes())
    place = data.find(b"tkhd") + 4 + 4 + 20 + 16
    a, b, c, d = (65536 * value for value in matrix)
    assert struct.unpack(">9i", data[place : place + 36]) == (65536, 0, 0, 0, 65536, 0, 0, 0, 1 << 30)
    data[place : place + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    file.write_bytes(data)
    frames = read_frames(file)
    upright = np.rot90(picture, -turn // 90)
    assert frames.images[0].size == (upright.shape[1], upright.shape[0])
    assert (frames.metadata.width, frames.metadata.height) == frames.images[0].size
    assert apart(frames.images[0], upright) < 4
    small = read_frames(file, max_pixels=960).images[0]
    assert apart(small, np.asarray(Image.fromarray(upright).resize(small.size))) < 8


# --- which frames -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [{"num_frames": 5}, {"num_frames": 24}, {"fps": 2}, {"fps": 3.7}, {"fps": 0.1}])
def test_numbers_mean_the_frames_that_transformers_reads(reader: str, asked: dict[str, Any], tmp_path: Path) -> None:
    file = write_video(tmp_path / "clip.mp4", 24)
    mine = read_frames(file, **asked)
    with pytest.MonkeyPatch.context() as patching:
        patching.setitem(sys.modules, "av", av)
        patching.delitem(sys.modules, "torchcodec", raising=False)  # transformers looks for it, and may find our player
        pictures, theirs = load_video(str(file), **asked, backend="pyav")
    assert list(mine.metadata.frames_indices) == list(theirs.frames_indices)
    assert all(apart(image, picture) < 1.5 for image, picture in zip(mine.images, pictures, strict=True))


@pytest.mark.parametrize("total", [1, 2, 7, 31, 90, 1000])
@pytest.mark.parametrize("rate", [23.976, 30.0, 1.0])
def test_the_convention_of_transformers(total: int, rate: float) -> None:
    held = VideoMetadata(total_num_frames=total, fps=rate)
    for count in range(1, min(total, 40)):
        assert Uniform(count, hf=True).sample(total, rate) == default_sample_indices_fn(held, num_frames=count).tolist()
    for wanted in (0.1, 0.5, 1, 2, 7.5):
        if wanted > rate:
            continue
        theirs = default_sample_indices_fn(held, fps=wanted).tolist()
        assert Fps(wanted, 1000, hf=True).sample(total, rate) == theirs
        middle = Fps(wanted, 1000).sample(total, rate)
        edges = [*theirs, total]
        assert all(begin <= index < end for begin, index, end in zip(edges, middle, edges[1:], strict=False))
        few = Fps(wanted, 4, hf=True).sample(total, rate)
        assert few == (theirs if len(theirs) <= 4 else Uniform(4, hf=True).sample(total, rate))


def test_more_frames_than_there_are(reader: str, tmp_path: Path) -> None:
    file = write_video(tmp_path / "clip.mp4", 5)
    for asked in ({"num_frames": 50}, {"fps": 100}, {"sampler": Fps(99)}, {"sampler": MostDifferent(9)}):
        assert grey_frame_numbers(read_frames(file, **asked).images) == [0, 1, 2, 3, 4]  # type: ignore[arg-type]
    assert len(read_frames(file, fps=10, max_frames=3).images) == 3
    assert len(read_frames(file, max_frames=3).images) == 3


def test_a_video_of_one_frame(reader: str, tmp_path: Path) -> None:
    file = write_video(tmp_path / "clip.mp4", 1)
    samplers = [Uniform(1), Uniform(8, hf=True), Fps(0.01), Fps(30), MostDifferent(1), MostDifferent(8)]
    for frames in (*(read_frames(file, sampler) for sampler in samplers), read_frames(file, fps=1)):
        assert (grey_frame_numbers(frames.images), frames.timestamps, frames.metadata.total_num_frames) == (
            [0],
            [0.0],
            1,
        )


def test_what_is_seen_briefly_is_kept(reader: str, tmp_path: Path) -> None:
    """Three shots, one of them four frames long, and a flash."""
    colours = (
        [(200, 30, 30)] * 28 + [(255, 255, 255)] + [(200, 30, 30)] * 11 + [(20, 160, 40)] * 4 + [(20, 30, 180)] * 20
    )
    file = write_video(tmp_path / "clip.mp4", [np.full((48, 64, 3), colour, np.uint8) for colour in colours])
    seen = {colours[index] for index in read_frames(file, MostDifferent(4)).metadata.frames_indices}
    assert seen == set(colours)
    assert {colours[index] for index in Uniform(4).sample(len(colours), 10)} != set(colours)


@pytest.mark.parametrize("seed", range(5))
def test_each_is_the_one_least_like_those_before(seed: int) -> None:
    """The same by plain loops."""
    rng = torch.Generator().manual_seed(seed)
    seen = torch.randint(0, 256, (20, 4, 4, 3), generator=rng, dtype=torch.uint8)
    chosen = list(range(0, 100, 5))

    def off(a: int, b: int) -> float:
        return float((seen[a].float() - seen[b].float()).abs().mean()) + 0.5 * abs(chosen[a] - chosen[b]) / chosen[-1]

    taken = [min(range(20), key=lambda one: sum(off(one, other) for other in range(20)))]
    while len(taken) < 6:
        taken.append(max(range(20), key=lambda one: min(off(one, other) for other in taken)))
    assert MostDifferent(6, 20).select(chosen, seen) == [chosen[place] for place in sorted(taken)]


def test_where_nothing_moves_frames_are_spread() -> None:
    still = torch.full((33, 4, 4, 3), 77, dtype=torch.uint8)
    taken = MostDifferent(5, 33).select(list(range(33)), still)
    assert taken == [0, 8, 16, 24, 32]


class Watching:
    """Looks at frames 1, 4 and 7, and takes those it is told to."""

    def __init__(self, *taken: int) -> None:
        self.taken, self.seen = list(taken), torch.empty(0)

    def sample(self, total: int, fps: float) -> list[int]:
        return [1, 4, 7]

    def select(self, indices: list[int], thumbnails: Tensor) -> list[int]:
        self.seen = thumbnails
        return self.taken


def test_samplers_that_look(reader: str, tmp_path: Path) -> None:
    file, watching = write_video(tmp_path / "clip.mp4", 9), Watching(4, 7)
    assert grey_frame_numbers(read_frames(file, watching).images) == [4, 7]
    assert watching.seen.dtype == torch.uint8 and watching.seen.shape == (3, 32, 32, 3)
    assert [round((float(one.float().mean()) - 8) / 8) for one in watching.seen] == [1, 4, 7]
    for wrong, words in (((2,), "among those it looked at"), ((7, 4), "rising"), ((), "chose 0")):
        with pytest.raises(ValueError, match=words):
            read_frames(file, Watching(*wrong))


def test_the_error_of_a_sampler_is_its_own(reader: str, tmp_path: Path) -> None:
    """And no reason to try another reader."""

    class Broken(Choice):
        def sample(self, total: int, fps: float) -> list[int]:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        read_frames(write_video(tmp_path / "clip.mp4", 3), Broken())


# --- sizes and memory -------------------------------------------------------------------------------------------------


def test_large_frames_are_read_small(reader: str, tmp_path: Path) -> None:
    picture = np.kron(np.arange(24, dtype=np.uint8).reshape(4, 6) * 10, np.ones((60, 60), np.uint8))
    file = write_video(tmp_path / "clip.mp4", [np.repeat(picture[..., None], 3, 2)] * 4)
    frames = read_frames(file, Uniform(2), max_pixels=10_000)
    assert (frames.metadata.width, frames.metadata.height) == (360, 240)
    assert frames.images[0].size == (122, 81)  # 3 to 2, in 10,000 pixels
    for image in frames.images:
        assert apart(image, np.asarray(Image.fromarray(np.repeat(picture[..., None], 3, 2)).resize(image.size))) < 4
    assert read_frames(file, max_pixels=10**9).images[0].size == (360, 240), "never made larger"


def test_frames_that_are_too_large_for_anything(reader: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("mmspec.vision.video.decode.MAX_FRAME_PIXELS", 1000)
    with pytest.raises(ValueError, match="frames of 64 x 64 pixels; 1000 pixels is the limit"):
        read_frames(write_video(tmp_path / "clip.mp4", 3))


@pytest.mark.parametrize("size", [(1, 1), (7, 3000), (3840, 2160), (64, 64)])
@pytest.mark.parametrize("most", [1, 5, 1000, 10**7])
def test_sizes_that_fit(size: tuple[int, int], most: int) -> None:
    from mmspec.vision.video.decode import _fit_size

    width, height = _fit_size(size, most)
    assert 1 <= width <= size[0] and 1 <= height <= size[1] and width * height <= most
    assert most < size[0] * size[1] or (width, height) == size


MEMORY = """
import re, sys
from pathlib import Path
from mmspec.vision.video.frames import Differing, read_frames
frames = read_frames(sys.argv[1], num_frames=24, backend=sys.argv[2])
assert len(frames.images) == 24 and frames.metadata.width == 3840, frames.metadata
read_frames(sys.argv[1], Differing(4, 24), backend=sys.argv[2])
# Not ru_maxrss, which a process inherits from the one that started it, here a test worker of any size.
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1)) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is told in other units elsewhere")
@pytest.mark.parametrize("backend", ["decord", "pyav"])
def test_a_4k_clip_takes_less_than_a_gigabyte(backend: str, tmp_path: Path) -> None:
    """The whole process, torch and transformers included: 24 frames at full size would be 0.6 GB as they are."""
    pytest.importorskip({"pyav": "av"}.get(backend, backend))
    picture = np.zeros((2160, 3840, 3), dtype=np.uint8)
    picture[500:900, 700:1900] = (200, 120, 40)
    file = write_video(tmp_path / "clip.mp4", [picture] * 24, options={"preset": "ultrafast"})
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(file), backend], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 1000, f"{done.stdout} MiB"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are counted there")
def test_files_are_closed(reader: str, tmp_path: Path) -> None:
    file = write_video(tmp_path / "clip.mp4", 12)
    (tmp_path / "broken.mp4").write_bytes(file.read_bytes()[:-200])
    (tmp_path / "none.mp4").write_bytes(b"nothing")

    def several() -> int:
        for _ in range(3):
            read_frames(file)
            read_frames(file, MostDifferent(2, 6), max_pixels=500)
            for wrong in ("broken.mp4", "none.mp4"):
                with pytest.raises(ValueError, match=r"not a video|a video without frames"):
                    read_frames(tmp_path / wrong)
            with pytest.raises(ValueError, match="chose 0"):
                read_frames(file, Choice())
        return len(os.listdir("/proc/self/fd"))

    assert several() == several()


# --- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"num_frames": 4, "fps": 2}, "num_frames and fps each say which frames to read"),
        ({"num_frames": 4, "sampler": Uniform(2)}, "sampler and num_frames each say"),
        ({"num_frames": 0}, "num_frames must be a whole number of at least 1; got 0"),
        ({"num_frames": -3}, "num_frames must .* got -3"),
        ({"num_frames": 2.5}, "num_frames must .* got 2.5"),
        ({"num_frames": True}, "num_frames must .* got True"),
        ({"num_frames": 300}, "num_frames=300 is more than max_frames=256; raise max_frames"),
        ({"fps": 0}, "fps must be a positive number of frames a second; got 0"),
        ({"fps": -1.5}, "fps must .* got -1.5"),
        ({"fps": float("nan")}, "fps must .* got nan"),
        ({"fps": float("inf")}, "fps must .* got inf"),
        ({"max_frames": 0}, "max_frames must .* got 0"),
        ({"max_pixels": 0}, "max_pixels must .* got 0"),
        ({"backend": "opencv"}, "no backend is called 'opencv'; known: auto, decord, torchcodec, pyav"),
    ],
)
def test_options_that_make_no_sense(asked: dict[str, Any], words: str, tmp_path: Path) -> None:
    """Told before any file is opened."""
    with pytest.raises(ValueError, match=words) as failed:
        read_frames(tmp_path / "not there.mp4", **asked)
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Uniform(0), "count must .* got 0"),
        (lambda: Fps(0), "rate must .* got 0"),
        (lambda: Fps(1, max_frames=0), "most must .* got 0"),
        (lambda: MostDifferent(0), "count must .* got 0"),
        (lambda: MostDifferent(9, num_candidates=8), r"looks must lie between count \(9\) and 256.*got 8"),
        (lambda: MostDifferent(9, num_candidates=400), "looks must .* got 400"),
        (lambda: Fps(1).sample(10, 0.0), "a video that says how fast it is; fps is 0.0"),
    ],
)
def test_samplers_that_make_no_sense(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_neither_a_path_nor_bytes() -> None:
    with pytest.raises(TypeError, match="a path or as bytes; got int"):
        read_frames(7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 bytes is not a video"):
        read_frames(b"")


def test_bytes_that_are_no_video(reader: str) -> None:
    with pytest.raises(ValueError, match=r"^a video of 800 bytes is not a video that can be read") as failed:
        read_frames(b"no video" * 100)
    assert "\n" not in str(failed.value)


def test_a_song(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With each reader alone, but torchcodec, whose words are its own."""
    file = write_audio_only(tmp_path / "song.mp4")
    for name, module in (("decord", "decord"), ("pyav", "av")):
        if importlib.util.find_spec(module) is None:
            continue
        with pytest.raises(ValueError, match="there is no video stream in it") as failed:
            read_frames(file, backend=name)
        assert str(failed.value).startswith(str(file))
    only("torchcodec", monkeypatch)
    with pytest.raises(ValueError, match="not a video that can be read"):
        read_frames(file)


def test_the_cover_of_a_song_is_no_video(tmp_path: Path) -> None:
    class Stream:
        def __init__(self, *disposition: str) -> None:
            from av.stream import Disposition

            self.disposition = Disposition(0)
            for name in disposition:
                self.disposition |= Disposition[name]

    def container(*streams: Stream) -> Any:
        return types.SimpleNamespace(streams=types.SimpleNamespace(video=streams))

    cover, clip = Stream("attached_pic"), Stream("default")
    assert readers._video_stream(container(cover, clip)) is clip
    with pytest.raises(readers.NoFramesError, match="no video stream"):
        readers._video_stream(container(cover))


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "webm"])
@pytest.mark.parametrize("share", [0.9, 0.5])
def test_a_truncated_file_is_read_as_far_as_it_goes(
    suffix: str, share: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    noisy = [np.concatenate([rng.integers(0, 255, (16, 64, 3), dtype=np.uint8), grey_frame(n)[16:]]) for n in range(24)]
    codec = "libvpx-vp9" if suffix == "webm" else "libx264"
    format = {"movflags": "faststart"} if suffix == "mp4" else {}
    file = write_video(tmp_path / f"clip.{suffix}", noisy, codec, format=format)
    pictures, _ = all_of(file)
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    for readers_there in (["decord", "av"], ["av"]):
        with monkeypatch.context() as patching:
            for name in set(BACKENDS) - set(readers_there):
                patching.setitem(sys.modules, name, None)
            caplog.clear()
            frames = read_frames(file, Uniform(24))
        many = len(frames.images)
        assert 0.6 * share * 24 < many < 24
        assert all(apart(image, picture) < 6 for image, picture in zip(frames.images[:-1], pictures, strict=False))
        assert frames.metadata.total_num_frames == many
        if suffix == "mp4":
            assert f"ends early: {many} of 24 frames can be decoded" in caplog.text


def test_a_file_cut_before_its_first_frame(reader: str, tmp_path: Path) -> None:
    file = write_video(tmp_path / "clip.mp4", 24, format={"movflags": "faststart"})
    data = file.read_bytes()
    file.write_bytes(data[: data.index(b"mdat") + 6])
    with pytest.raises(ValueError, match=r"not a video that can be read|a video without frames") as failed:
        read_frames(file)
    assert str(file) in str(failed.value) and "\n" not in str(failed.value)


# --- which reader -----------------------------------------------------------------------------------------------------


def test_av1_is_left_to_the_next_reader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """decord says that there is no stream where it only has no decoder."""
    pytest.importorskip("decord")
    monkeypatch.setitem(sys.modules, "torchcodec", None)
    if "libsvtav1" not in av.codecs_available:
        pytest.skip("PyAV cannot write AV1")
    file = write_video(tmp_path / "clip.mp4", 10, "libsvtav1", options={"svtav1-params": "preset=12"})
    frames = read_frames(file, Uniform(3))
    assert grey_frame_numbers(frames.images) == [1, 5, 8] and frames.metadata.video_backend == "pyav"
    with pytest.raises(ValueError, match="decord: it has no decoder for this kind of video") as failed:
        read_frames(file, backend="decord")
    assert str(file) in str(failed.value)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ValueError, match="pip install av"):
        read_frames(file)


def test_the_first_reader_that_can(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, order = write_video(tmp_path / "clip.mp4", 3), list[str]()

    def of(name: str, works: bool) -> Any:
        def make(source: Any) -> Any:
            order.append(name)
            if not works:
                raise RuntimeError("no")
            return readers.PyavReader(source)

        return make

    monkeypatch.setitem(readers.BACKENDS, "decord", of("decord", False))
    monkeypatch.setitem(readers.BACKENDS, "torchcodec", of("torchcodec", True))
    assert read_frames(file).metadata.video_backend == "torchcodec" and order == ["decord", "torchcodec"]
    assert read_frames(file, backend="pyav").metadata.video_backend == "pyav" and len(order) == 2
    with pytest.raises(ValueError, match=r"not a video that can be read \(decord: no\)"):
        read_frames(file, backend="decord")


def test_a_backend_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = write_video(tmp_path / "clip.mp4", 3)
    for name, package in (("decord", "decord"), ("torchcodec", "torchcodec"), ("pyav", "av")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ImportError, match=f"backend='{name}' is not installed; pip install {package}"):
            read_frames(file, backend=name)


def test_no_memory_is_no_fault_of_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(source: Any) -> Any:
        raise MemoryError

    monkeypatch.setitem(readers.BACKENDS, "decord", full)
    with pytest.raises(MemoryError):
        read_frames(write_video(tmp_path / "clip.mp4", 3))
