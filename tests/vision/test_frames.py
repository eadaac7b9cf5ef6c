"""Frames of video files, and error messages for unreadable files.

The reference is sequential decoding by PyAV, and the sampling of transformers.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.video_utils import VideoMetadata, default_sample_indices_fn, load_video
from video_files import grey_frame_numbers, write_video

from mmspec.vision.video import frames as frames_module
from mmspec.vision.video import pyav_reader
from mmspec.vision.video.frames import MAX_FRAMES, Fps, Uniform, read_frames

av = pytest.importorskip("av")
pytest.importorskip("av.subtitles.stream")  # loaded late by PyAV itself, when a test may have hidden it
Picture = Callable[[int], np.ndarray]


def scene(number: int) -> np.ndarray:
    """A moving white square on a background that changes colour: all frames differ."""
    picture = np.full((48, 80, 3), (5 * number % 200, 40, 200 - 7 * number % 200), dtype=np.uint8)
    x = 2 * number % 60
    picture[10:30, x : x + 16] = 255
    return picture


def all_of(path: Path) -> tuple[np.ndarray, list[float]]:
    """Every frame of a file and its timestamp, by sequential decoding."""
    with av.open(str(path)) as container:
        decoded = [(frame.to_ndarray(format="rgb24"), frame.time) for frame in container.decode(video=0)]
    return np.stack([picture for picture, _ in decoded]), [time - decoded[0][1] for _, time in decoded]


def difference(image: Image.Image, picture: np.ndarray) -> float:
    """Mean absolute difference of the colour values."""
    return float(np.abs(np.asarray(image).astype(int) - picture.astype(int)).mean())


def test_reads_the_sampled_frames(tmp_path: Path) -> None:
    file = write_video(tmp_path / "clip.mp4", 24)
    frames = read_frames(file, Uniform(4))
    assert grey_frame_numbers(frames.images) == [3, 9, 15, 21] == Uniform(4).sample(24, 10)
    assert frames.timestamps == pytest.approx([0.3, 0.9, 1.5, 2.1])
    assert all(image.mode == "RGB" and image.size == (64, 64) for image in frames.images)
    assert grey_frame_numbers(read_frames(str(file)).images) == Uniform(8).sample(24, 10)
    assert len(read_frames(write_video(tmp_path / "short.mp4", 3)).images) == 3


class FixedSampler:
    """A sampler that returns fixed indices."""

    def __init__(self, *chosen: int) -> None:
        self.chosen = list(chosen)

    def sample(self, total: int, fps: float) -> list[int]:
        return self.chosen


@pytest.mark.parametrize(
    ("chosen", "message"), [([], "selected 0"), ([99], "rising indices below 5"), ([3, 1], "rising")]
)
def test_invalid_indices_of_a_sampler(chosen: list[int], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_frames(write_video(tmp_path / "clip.mp4", 5), FixedSampler(*chosen))


def test_too_many_frames(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"between 1 and {MAX_FRAMES}"):
        read_frames(write_video(tmp_path / "clip.mp4", 5), FixedSampler(*range(MAX_FRAMES + 1)))


def test_without_a_reader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = write_video(tmp_path / "clip.mp4", 3)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ImportError, match=r"needs PyAV .*: pip install -e '.*\[video\]'"):
        read_frames(file)


@pytest.mark.parametrize("total", [1, 2, 7, 8, 9, 1000])
@pytest.mark.parametrize("count", [1, 4, 8])
def test_uniform(total: int, count: int) -> None:
    chosen = Uniform(count).sample(total, 25.0)
    assert len(chosen) == min(count, total) and chosen == sorted(set(chosen))
    assert chosen[0] >= 0 and chosen[-1] < total
    assert abs((chosen[0] + chosen[-1]) - (total - 1)) <= 2, "not in the middle"


# --- against plain decoding -------------------------------------------------------------------------------------------

CODECS = [("libx264", "mp4"), ("libx265", "mp4"), ("libvpx-vp9", "webm"), ("libx264", "mkv"), ("mpeg4", "avi")]


@pytest.mark.parametrize(("codec", "suffix"), CODECS)
def test_frames_equal_sequential_decoding(codec: str, suffix: str, tmp_path: Path) -> None:
    quiet = {"x265-params": "log-level=none"} if codec == "libx265" else {}
    pictures_in = [scene(number) for number in range(30)]
    file = write_video(tmp_path / f"clip.{suffix}", pictures_in, codec, options={"g": "12", **quiet})
    pictures, times = all_of(file)
    for chosen in (range(30), [0, 29], [5, 6, 11, 12, 13, 25], [17]):
        frames = read_frames(file, FixedSampler(*chosen))
        assert frames.metadata.frames_indices == tuple(chosen) and frames.metadata.video_backend == "pyav"
        for index, image, time in zip(chosen, frames.images, frames.timestamps, strict=True):
            off = [difference(image, picture) for picture in pictures]
            assert off[index] < 1.5 and off[index] == min(off), f"frame {index} looks like {int(np.argmin(off))}"
            assert time == pytest.approx(times[index], abs=1e-3)


@pytest.mark.parametrize("width", [10, 16, 24, 34, 48, 62, 66, 98])
def test_narrow_frames(width: int, tmp_path: Path) -> None:
    ramp = np.zeros((40, width, 3), dtype=np.uint8)
    ramp[:, :, 0], ramp[:, :, 1] = np.linspace(20, 230, width), np.linspace(20, 230, 40)[:, None]
    file = write_video(tmp_path / "clip.mp4", [ramp] * 3)
    assert difference(read_frames(file).images[1], ramp) < 12
    small = read_frames(file, max_pixels=12 * width).images[1]
    assert difference(small, np.asarray(Image.fromarray(ramp).resize(small.size))) < 14


def test_bytes_equal_the_file(tmp_path: Path) -> None:
    file = write_video(tmp_path / "clip.mp4", 12)
    one, two = read_frames(file, Uniform(4)), read_frames(file.read_bytes(), Uniform(4))
    assert one.timestamps == two.timestamps and one.metadata == two.metadata
    assert np.array_equal(one.array(), two.array()) and one.array().shape == (4, 64, 64, 3)
    assert one.array().dtype == np.uint8


def test_metadata(tmp_path: Path) -> None:
    file = write_video(tmp_path / "clip.mp4", [scene(number) for number in range(15)], fps=5)
    metadata = read_frames(file, Uniform(3)).metadata
    assert (metadata.total_num_frames, metadata.fps, metadata.width, metadata.height, metadata.frames_indices) == (
        15,
        5.0,
        80,
        48,
        (2, 7, 12),
    )
    assert metadata.duration == pytest.approx(3.0, abs=0.01) and metadata.video_backend == "pyav"
    expected = VideoMetadata(**metadata.for_processor())
    assert expected.timestamps == [0.4, 1.4, 2.4] and expected.total_num_frames == 15


PTS = [0, 100, 150, 700, 710, 1500, 1600, 1700, 3000, 3010]


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
@pytest.mark.parametrize("late", [0, 5000])
def test_timestamps_of_a_variable_frame_rate(suffix: str, late: int, tmp_path: Path) -> None:
    """Timestamps of the file, relative to the first frame."""
    file = write_video(tmp_path / f"clip.{suffix}", 10, pts=[time + late for time in PTS])
    frames = read_frames(file, FixedSampler(0, 2, 3, 5, 9))
    assert grey_frame_numbers(frames.images) == [0, 2, 3, 5, 9]
    assert frames.timestamps == pytest.approx([0.0, 0.15, 0.7, 1.5, 3.01], abs=1e-3)


# --- which frames -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"num_frames": 5}, {"num_frames": 24}, {"fps": 2}, {"fps": 3.7}, {"fps": 0.1}])
def test_num_frames_and_fps_equal_transformers(options: dict[str, Any], tmp_path: Path) -> None:
    file = write_video(tmp_path / "clip.mp4", 24)
    actual = read_frames(file, **options)
    pictures, expected = load_video(str(file), **options, backend="pyav")
    assert list(actual.metadata.frames_indices) == list(expected.frames_indices)
    assert all(difference(image, picture) < 1.5 for image, picture in zip(actual.images, pictures, strict=True))


@pytest.mark.parametrize("total", [1, 2, 7, 31, 90, 1000])
@pytest.mark.parametrize("rate", [23.976, 30.0, 1.0])
def test_hf_sampling_equals_transformers(total: int, rate: float) -> None:
    metadata = VideoMetadata(total_num_frames=total, fps=rate)
    for count in range(1, min(total, 40)):
        assert (
            Uniform(count, hf=True).sample(total, rate)
            == default_sample_indices_fn(metadata, num_frames=count).tolist()
        )
    for fps in (0.1, 0.5, 1, 2, 7.5):
        if fps > rate:
            continue
        expected = default_sample_indices_fn(metadata, fps=fps).tolist()
        assert Fps(fps, 1000, hf=True).sample(total, rate) == expected
        middle = Fps(fps, 1000).sample(total, rate)
        edges = [*expected, total]
        assert all(begin <= index < end for begin, index, end in zip(edges, middle, edges[1:], strict=False))
        limited = Fps(fps, 4, hf=True).sample(total, rate)
        assert limited == (expected if len(expected) <= 4 else Uniform(4, hf=True).sample(total, rate))


def test_more_frames_requested_than_available(tmp_path: Path) -> None:
    file = write_video(tmp_path / "clip.mp4", 5)
    for options in ({"num_frames": 50}, {"fps": 100}, {"sampler": Fps(99)}):
        assert grey_frame_numbers(read_frames(file, **options).images) == [0, 1, 2, 3, 4]  # type: ignore[arg-type]
    assert len(read_frames(file, fps=10, max_frames=3).images) == 3
    assert len(read_frames(file, max_frames=3).images) == 3


def test_a_video_of_one_frame(tmp_path: Path) -> None:
    file = write_video(tmp_path / "clip.mp4", 1)
    samplers = [Uniform(1), Uniform(8, hf=True), Fps(0.01), Fps(30)]
    for frames in (*(read_frames(file, sampler) for sampler in samplers), read_frames(file, fps=1)):
        assert (grey_frame_numbers(frames.images), frames.timestamps, frames.metadata.total_num_frames) == (
            [0],
            [0.0],
            1,
        )


# --- sizes and memory -------------------------------------------------------------------------------------------------


def test_max_pixels(tmp_path: Path) -> None:
    picture = np.kron(np.arange(24, dtype=np.uint8).reshape(4, 6) * 10, np.ones((60, 60), np.uint8))
    file = write_video(tmp_path / "clip.mp4", [np.repeat(picture[..., None], 3, 2)] * 4)
    frames = read_frames(file, Uniform(2), max_pixels=10_000)
    assert (frames.metadata.width, frames.metadata.height) == (360, 240)
    assert frames.images[0].size == (122, 81)  # 3 to 2, in 10,000 pixels
    for image in frames.images:
        assert (
            difference(image, np.asarray(Image.fromarray(np.repeat(picture[..., None], 3, 2)).resize(image.size))) < 4
        )
    assert read_frames(file, max_pixels=10**9).images[0].size == (360, 240), "never scaled up"


def test_frames_above_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("mmspec.vision.video.reader.MAX_FRAME_PIXELS", 1000)
    with pytest.raises(ValueError, match="frames of 64 x 64 pixels; the limit is 1000 pixels"):
        read_frames(write_video(tmp_path / "clip.mp4", 3))


@pytest.mark.parametrize("size", [(1, 1), (7, 3000), (3840, 2160), (64, 64)])
@pytest.mark.parametrize("max_pixels", [1, 5, 1000, 10**7])
def test_fit_size(size: tuple[int, int], max_pixels: int) -> None:
    from mmspec.vision.video.reader import fit_size

    width, height = fit_size(size, max_pixels)
    assert 1 <= width <= size[0] and 1 <= height <= size[1] and width * height <= max_pixels
    assert max_pixels < size[0] * size[1] or (width, height) == size


MEMORY = """
import re, sys
from pathlib import Path
from mmspec.vision.video.frames import read_frames
frames = read_frames(sys.argv[1], num_frames=24)
assert len(frames.images) == 24 and frames.metadata.width == 3840, frames.metadata
# Not ru_maxrss, which a process inherits from its parent, here a test worker of any size.
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1)) // 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_4k_clip_takes_less_than_a_gigabyte(tmp_path: Path) -> None:
    """Peak memory of the process, torch and transformers included; 24 full-size frames alone would be 0.6 GB."""
    picture = np.zeros((2160, 3840, 3), dtype=np.uint8)
    picture[500:900, 700:1900] = (200, 120, 40)
    file = write_video(tmp_path / "clip.mp4", [picture] * 24, options={"preset": "ultrafast"})
    done = subprocess.run([sys.executable, "-c", MEMORY, str(file)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1000, f"{done.stdout} MiB"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files in /proc")
def test_files_are_closed(tmp_path: Path) -> None:
    file = write_video(tmp_path / "clip.mp4", 12)
    (tmp_path / "broken.mp4").write_bytes(file.read_bytes()[:-200])
    (tmp_path / "none.mp4").write_bytes(b"nothing")

    def several() -> int:
        for _ in range(3):
            read_frames(file)
            read_frames(file, Uniform(2), max_pixels=500)
            for wrong in ("broken.mp4", "none.mp4"):
                with pytest.raises(ValueError, match=r"not a video|a video without frames|the file is cut"):
                    read_frames(tmp_path / wrong)
            with pytest.raises(ValueError, match="selected 0"):
                read_frames(file, FixedSampler())
        return len(os.listdir("/proc/self/fd"))

    gc.collect()  # files of earlier tests, which would otherwise be closed in between
    assert several() == several()


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_frames": 4, "fps": 2}, "num_frames and fps exclude each other"),
        ({"num_frames": 4, "sampler": Uniform(2)}, "sampler and num_frames exclude each other"),
        ({"backend": "decord"}, "backend must be .pyav., got .decord."),
        ({"num_frames": 0}, "num_frames must be an integer of at least 1; got 0"),
        ({"num_frames": -3}, "num_frames must .* got -3"),
        ({"num_frames": 2.5}, "num_frames must .* got 2.5"),
        ({"num_frames": True}, "num_frames must .* got True"),
        ({"num_frames": 300}, "num_frames=300 is more than max_frames=256; raise max_frames"),
        ({"fps": 0}, "fps must be positive and finite; got 0"),
        ({"fps": -1.5}, "fps must .* got -1.5"),
        ({"fps": float("nan")}, "fps must .* got nan"),
        ({"fps": float("inf")}, "fps must .* got inf"),
        ({"max_frames": 0}, "max_frames must .* got 0"),
        ({"max_pixels": 0}, "max_pixels must .* got 0"),
    ],
)
def test_invalid_options(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Raised before any file is opened."""
    with pytest.raises(ValueError, match=message) as failed:
        read_frames(tmp_path / "not there.mp4", **options)
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Uniform(0), "num_frames must .* got 0"),
        (lambda: Fps(0), "fps must .* got 0"),
        (lambda: Fps(1, max_frames=0), "max_frames must .* got 0"),
        (lambda: Fps(1).sample(10, 0.0), "a known frame rate; got 0.0"),
    ],
)
def test_invalid_samplers(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_neither_a_path_nor_bytes() -> None:
    with pytest.raises(TypeError, match="a path or bytes; got int"):
        read_frames(7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 bytes is not a video"):
        read_frames(b"")


def test_cover_art_is_not_a_video_stream(tmp_path: Path) -> None:
    class Stream:
        def __init__(self, *disposition: str) -> None:
            from av.stream import Disposition

            self.disposition = Disposition(0)
            for name in disposition:
                self.disposition |= Disposition[name]

    def container(*streams: Stream) -> Any:
        return types.SimpleNamespace(streams=types.SimpleNamespace(video=streams))

    cover, clip = Stream("attached_pic"), Stream("default")
    assert pyav_reader._video_stream(container(cover, clip)) is clip
    with pytest.raises(pyav_reader.NoFramesError, match="no video stream"):
        pyav_reader._video_stream(container(cover))


def test_a_file_cut_before_its_first_frame(tmp_path: Path) -> None:
    file = write_video(tmp_path / "clip.mp4", 24, format={"movflags": "faststart"})
    data = file.read_bytes()
    file.write_bytes(data[: data.index(b"mdat") + 6])
    with pytest.raises(ValueError, match=r"not a video that can be read|without frames|the file is cut") as failed:
        read_frames(file)
    assert str(file) in str(failed.value) and "\n" not in str(failed.value)


def test_memory_errors_are_raised_unchanged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(source: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(frames_module, "PyavReader", full)
    with pytest.raises(MemoryError):
        read_frames(write_video(tmp_path / "clip.mp4", 3))
