"""Frames out of video files, with either reader: the right ones, and clear words for files that are none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmspec.vision.frames import MOST_FRAMES, Uniform, read_frames

av = pytest.importorskip("av")
pytest.importorskip("av.subtitles.stream")  # loaded late by PyAV itself, when a test may have hidden it
READERS = ["decord", "av"]


def write(path: Path, frames: int, codec: str = "h264", side: int = 64, fps: int = 10) -> Path:
    """A clip whose frame n is a grey of 8 n + 8."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width = stream.height = side
        stream.pix_fmt = "yuv420p"
        for number in range(frames):
            picture = np.full((side, side, 3), 8 * number + 8, dtype=np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


def shades(images: list[Image.Image]) -> list[int]:
    """Which frame each picture is."""
    return [round((float(np.asarray(image).mean()) - 8) / 8) for image in images]


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Only this one is installed."""
    pytest.importorskip(request.param)
    for other in READERS:
        if other != request.param:
            monkeypatch.setitem(sys.modules, other, None)
    return str(request.param)


def test_the_frames_that_were_chosen(reader: str, tmp_path: Path) -> None:
    file = write(tmp_path / "clip.mp4", 24)
    frames = read_frames(file, Uniform(4))
    assert shades(frames.images) == [3, 9, 15, 21] == Uniform(4).sample(24, 10)
    assert frames.times == pytest.approx([0.3, 0.9, 1.5, 2.1])
    assert all(image.mode == "RGB" and image.size == (64, 64) for image in frames.images)
    assert shades(read_frames(str(file)).images) == Uniform(8).sample(24, 10)
    assert len(read_frames(write(tmp_path / "short.mp4", 3)).images) == 3


class Choice:
    """A sampler that says just that."""

    def __init__(self, *chosen: int) -> None:
        self.chosen = list(chosen)

    def sample(self, total: int, fps: float) -> list[int]:
        return self.chosen


@pytest.mark.parametrize(("chosen", "words"), [([], "chose 0"), ([99], "rising numbers below 5"), ([3, 1], "rising")])
def test_samplers_that_choose_badly(reader: str, chosen: list[int], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        read_frames(write(tmp_path / "clip.mp4", 5), Choice(*chosen))


def test_too_many(reader: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"between 1 and {MOST_FRAMES}"):
        read_frames(write(tmp_path / "clip.mp4", 5), Choice(*range(MOST_FRAMES + 1)))


@pytest.mark.parametrize("content", [b"", b"no video at all" * 50])
def test_files_that_are_no_videos(reader: str, content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "clip.mp4"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="not a video that can be read") as failed:
        read_frames(file)
    assert "\n" not in str(failed.value) and str(file) in str(failed.value)


def test_a_video_without_frames(reader: str, tmp_path: Path) -> None:
    with av.open(str(tmp_path / "none.mp4"), "w") as container:
        stream = container.add_stream("h264", rate=2)
        stream.width = stream.height = 64
        container.start_encoding()
    with pytest.raises(ValueError, match="a video without frames"):
        read_frames(tmp_path / "none.mp4")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such video"):
        read_frames(tmp_path / "clip.mp4")


def test_without_a_reader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = write(tmp_path / "clip.mp4", 3)
    for name in READERS:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'mmspec\[video\]'"):
        read_frames(file)


def test_what_one_reader_cannot_read_the_other_may(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    decord = pytest.importorskip("decord")

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Check failed: st_nb >= 0")

    monkeypatch.setattr(decord, "VideoReader", refuse)
    assert shades(read_frames(write(tmp_path / "clip.mp4", 6), Uniform(2)).images) == [1, 4]


@pytest.mark.parametrize("total", [1, 2, 7, 8, 9, 1000])
@pytest.mark.parametrize("count", [1, 4, 8])
def test_evenly(total: int, count: int) -> None:
    chosen = Uniform(count).sample(total, 25.0)
    assert len(chosen) == min(count, total) and chosen == sorted(set(chosen))
    assert chosen[0] >= 0 and chosen[-1] < total
    assert abs((chosen[0] + chosen[-1]) - (total - 1)) <= 2, "not in the middle"
