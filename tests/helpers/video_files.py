"""Video files for tests, valid and broken, and backends that crash or hang in the decoder process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmspec.vision.video import decoder_pool

av = pytest.importorskip("av")


def grey_frame(index: int, side: int = 64) -> np.ndarray:
    """[side, side, 3] uint8, every value 8 * index + 8."""
    return np.full((side, side, 3), 8 * index + 8, dtype=np.uint8)


def numbered_frame(number: int, side: int = 160) -> np.ndarray:
    """[side, side, 3] uint8 that shows `number` as ten black or white blocks, which coding does not change."""
    bits = np.array([255 * (number >> bit & 1) for bit in range(10)], dtype=np.uint8).reshape(2, 5)
    picture = np.full((side, side, 3), 128, dtype=np.uint8)
    picture[: 2 * (side // 5)] = np.kron(bits, np.ones((side // 5, side // 5), np.uint8))[:, :, None]
    return picture


def read_number(image: Image.Image) -> int:
    """The number that a numbered frame shows."""
    grey = np.asarray(image.convert("L").resize((160, 160)))
    blocks = grey[:64].reshape(2, 32, 5, 32).mean(axis=(1, 3)).ravel()
    return sum(1 << bit for bit in range(10) if blocks[bit] > 128)


def write_video(
    path: Path, frames: int | Sequence[np.ndarray], codec: str = "h264", fps: int = 10, **options: Any
) -> Path:
    """Encode a video.

    Args:
        path: Output file.
        frames: [height, width, 3 or 4] uint8 frames, or a number of grey frames.
        codec: Name of the encoder.
        fps: Frame rate.
        options: `pts` (timestamps in milliseconds), `options` (of the codec), `format` (of the container), `pix_fmt`,
            `sar` (width and height of a pixel), `context` (attributes of the codec's context).
    """
    pictures = [grey_frame(index) for index in range(frames)] if isinstance(frames, int) else frames
    with av.open(str(path), "w", options=options.get("format", {})) as container:
        stream = container.add_stream(codec, rate=fps, options=options.get("options", {}))
        stream.height, stream.width = pictures[0].shape[:2]
        stream.pix_fmt = options.get("pix_fmt", "yuv420p")
        stream.codec_context.sample_aspect_ratio = Fraction(*options.get("sar", (0, 1)))
        for name, value in options.get("context", {}).items():
            setattr(stream.codec_context, name, value)
        if "pts" in options:
            stream.codec_context.time_base = Fraction(1, 1000)
        for index, picture in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(picture, format="rgba" if picture.shape[2] == 4 else "rgb24")
            if "pts" in options:
                frame.pts, frame.time_base = options["pts"][index], Fraction(1, 1000)
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


def write_audio_only(path: Path) -> Path:
    """A file with an audio stream only."""
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
    """A video without frames, of duration 0."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("h264", rate=2)
        stream.width = stream.height = 64
        container.start_encoding()
    return path


def grey_frame_numbers(images: list[Image.Image]) -> list[int]:
    """Index of each image in a video of grey frames."""
    return [round((float(np.asarray(image).mean()) - 8) / 8) for image in images]


_WORKER = """
import json, os, signal, sys, time
options = json.loads(sys.argv[1])
sys.path[:] = options.pop("path")
from mmspec.vision.video import decode_worker, pyav_reader
{code}
decode_worker.run_worker(**options)
"""
FAULTY_READER = """
original = pyav_reader.PyavReader

class CrashesOnRead:
    def __init__(self, source):
        self.inner = original(source)
        self.info = self.inner.info
    def read(self, numbers, by_time, max_pixels):
        os.abort()
    def close(self):
        pass

def open_video(source):
    fault = os.path.basename(source).split(".")[0] if isinstance(source, str) else ""
    if fault == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "abort":
        os.abort()
    if fault == "exit":
        os._exit(3)
    if fault == "hang":
        time.sleep(600)
    if fault == "greedy":
        bytearray(2 * options["memory"])
    if fault == "loud":
        os.write(1, b"output of a library")
    return CrashesOnRead(source) if fault == "later" else original(source)

decode_worker.PyavReader = open_video
"""
"""The stem of a file's name selects the fault on opening it: segv, abort, exit, hang, greedy (memory), loud (prints);
later: on reading."""


def decoder_command_running(code: str) -> Callable[[float, int], list[str]]:
    """Replacement of `mmspec.vision.video.decoder_pool.worker_command`: the worker runs `code` before it serves."""
    original = decoder_pool.worker_command

    def command(timeout_s: float, memory: int) -> list[str]:
        return [sys.executable, "-P", "-c", _WORKER.format(code=code), original(timeout_s, memory)[-1]]

    return command
