"""Video files for tests, good and bad ones, and readers that crash, hang or lie in the process that decodes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmspec.vision.video import decoder_pool as isolated

av = pytest.importorskip("av")


def grey_frame(number: int, side: int = 64) -> np.ndarray:
    """8 n + 8 all over."""
    return np.full((side, side, 3), 8 * number + 8, dtype=np.uint8)


def write_video(
    path: Path, frames: int | Sequence[np.ndarray], codec: str = "h264", fps: int = 10, **more: Any
) -> Path:
    """A clip, of greys if only a number is given. `pts`: milliseconds; `options` of the codec, `format` of the file."""
    pictures = [grey_frame(number) for number in range(frames)] if isinstance(frames, int) else frames
    with av.open(str(path), "w", options=more.get("format", {})) as container:
        stream = container.add_stream(codec, rate=fps, options=more.get("options", {}))
        stream.height, stream.width = pictures[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        if "pts" in more:
            stream.codec_context.time_base = Fraction(1, 1000)
        for number, picture in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            if "pts" in more:
                frame.pts, frame.time_base = more["pts"][number], Fraction(1, 1000)
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


def write_audio_only(path: Path) -> Path:
    """A file with sound alone."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16000)
        for start in range(0, 16000, 1024):
            sound = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            sound.sample_rate, sound.pts = 16000, start
            for packet in stream.encode(sound):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


def write_empty_video(path: Path) -> Path:
    """A video of no frames, of no length."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("h264", rate=2)
        stream.width = stream.height = 64
        container.start_encoding()
    return path


def grey_frame_numbers(images: list[Image.Image]) -> list[int]:
    """Which frame of a clip of greys each picture is."""
    return [round((float(np.asarray(image).mean()) - 8) / 8) for image in images]


_CHILD = """
import json, os, signal, sys, time
given = json.loads(sys.argv[1])
sys.path[:] = given.pop("path")
from mmspec.vision.video import decode_worker as child
from mmspec.vision.video import backends as readers
{plant}
child.main(**given)
"""
FAULTY_BACKENDS = """
def wild(name):
    honest = readers.READERS[name]

    class Later:
        def __init__(self, source):
            self.inner = honest(source)
            self.about = self.inner.about
        def read(self, chosen, size):
            os.abort()
        def close(self):
            pass

    def make(source):
        word = os.path.basename(source).split(".")[0] if isinstance(source, str) else ""
        if word == "segv" or word == "first" and name == next(iter(readers.READERS)):
            os.kill(os.getpid(), signal.SIGSEGV)
        if word == "abort":
            os.abort()
        if word == "exit":
            os._exit(3)
        if word == "hang":
            time.sleep(600)
        if word == "greedy":
            bytearray(2 * given["memory"])
        if word == "loud":
            os.write(1, b"a library says this")
        return Later(source) if word == "later" else honest(source)

    readers.READERS[name] = make

for name in list(readers.READERS):
    wild(name)
"""
"""What a file is called is what happens when it is opened: segv, abort, exit, hang, greedy, loud; later: when read;
first: a crash of the first reader alone."""


def decoder_command_running(code: str) -> Callable[[float, int], list[str]]:
    """Stands in for `mmspec.vision.video.decoder_pool.command`: the process runs `code` before it answers anything."""
    usual = isolated.command

    def command(limit_s: float, memory: int) -> list[str]:
        return [sys.executable, "-P", "-c", _CHILD.format(plant=code), usual(limit_s, memory)[-1]]

    return command
