"""Decodes videos and images in worker processes: a hostile file may crash a decoder or make it hang.

`DecoderPool` opens videos as `PyavReader` does, with the same exceptions and two more: the worker
crashed, or it timed out. Samplers run in this process, so any sampler works. What a worker may do is limited by
`mmspec.vision.video.sandbox`.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from types import TracebackType
from typing import Any, TypeVar

from PIL import Image

from mmspec.vision.video.containers import FileBelow
from mmspec.vision.video.deadline import Deadline
from mmspec.vision.video.decode_worker import READ_ARGUMENTS
from mmspec.vision.video.reader import MAX_TOTAL_PIXELS, VideoInfo, VideoReader, VideoSource
from mmspec.vision.video.worker_process import (
    DecoderCrashedError,
    DecoderHungError,
    DecoderStartError,
    WorkerProcess,
    worker_command,
)

T = TypeVar("T")
DEFAULT_TIMEOUT_S = 300.0
"""Seconds that one file may take."""
IMAGE_TIMEOUT_S = 30.0
"""Seconds that one image may take."""
DEFAULT_MEMORY_BYTES = 8 << 30
"""Memory of one worker: several frames of the largest allowed size, and the decoder's buffers."""
START_WAITS_S = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""Seconds between attempts to start a worker."""
INFO_FIELDS = tuple(field.name for field in fields(VideoInfo))


def retry_if_killed(attempt: Callable[[], T]) -> T:
    """The result of `attempt`, made a second time if its worker was killed."""
    try:
        return attempt()
    except DecoderCrashedError as error:
        if not error.was_killed:
            raise
    return attempt()


class DecoderPool:
    """Worker processes that decode files. They start on demand, are reused for further files, and replaced if they die.

    A worker serves one video at a time; concurrent threads get one each. Close the pool, or use it with `with`:

        with DecoderPool() as pool:
            for path in paths:
                frames = read_frames(path, isolated=pool)

    Args:
        timeout_s: Seconds that one file may take.
        memory: Bytes that one worker may use, where the system can limit that.

    Raises:
        ValueError: A limit is not positive and finite.
    """

    def __init__(self, timeout_s: float = DEFAULT_TIMEOUT_S, memory: int = DEFAULT_MEMORY_BYTES) -> None:
        if not 0 < timeout_s < float("inf") or memory < 1:
            raise ValueError(f"timeout_s and memory must be positive and finite; got {timeout_s} and {memory}.")
        self.timeout_s = timeout_s
        self.memory = memory
        self._idle = list[WorkerProcess]()
        self._all = set[WorkerProcess]()
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def open_video(self, source: VideoSource) -> VideoReader:
        """Open a video in a worker.

        Raises:
            DecoderStartError: No worker can be started.
            DecoderCrashedError: The worker crashed; also raised while reading.
            DecoderHungError: The worker timed out; also raised while reading.
            ImportError: PyAV is not installed.
            NoFramesError: As the reader.
            MemoryError: As the reader.
            RuntimeError: Any other error of the reader, or the pool is closed.
        """
        return _RemoteReader(self, source)

    def decode_image(self, source: VideoSource, max_pixels: int) -> Image.Image:
        """Decode an image in a worker, as `mmspec.vision.images.decode_image`; once more if the worker was killed.

        Raises:
            ImageError: It is not a usable image.
            DecoderStartError: No worker can be started.
            DecoderCrashedError: The worker crashed.
            DecoderHungError: The worker timed out.
        """
        return retry_if_killed(lambda: self._decode_image(source, max_pixels))

    def _decode_image(self, source: VideoSource, max_pixels: int) -> Image.Image:
        def check(answer: dict[str, Any]) -> tuple[int, int]:
            return 1, 3 * _checked_pixels(answer, max_pixels)

        worker = self.acquire()
        try:
            header, body = _request_with_source({"op": "image", "max_pixels": max_pixels}, source)
            answer, data = worker.request(header, Deadline(min(self.timeout_s, IMAGE_TIMEOUT_S)), check, body)
            return Image.frombytes("RGB", (answer["width"], answer["height"]), data[0])
        finally:
            self.release(worker)

    def acquire(self) -> WorkerProcess:
        """An idle worker, to be given back; starts one if there is none.

        If none can be started, waits for one of others, or for better times.

        Raises:
            DecoderStartError: No worker is left, and for half a minute none could be started.
        """
        waits = iter(START_WAITS_S)
        while True:
            try:
                return self._take_idle() or self._start()
            except DecoderStartError:
                wait_s = next(waits, START_WAITS_S[-1] if self._all else None)
                if wait_s is None:
                    raise
            self._ended.wait(wait_s)

    def _take_idle(self) -> WorkerProcess | None:
        with self._lock:
            self._check_open()
            while self._idle:
                worker = self._idle.pop()
                if worker.is_alive:
                    return worker
                self._drop(worker)
        return None

    def _start(self) -> WorkerProcess:
        worker = WorkerProcess(worker_command(self.timeout_s, self.memory), self.timeout_s)
        try:
            with self._lock:
                self._check_open()
                self._all.add(worker)
            worker.wait_until_ready()
            return worker
        except BaseException:
            with self._lock:
                self._drop(worker)
            raise

    def _check_open(self) -> None:
        if self._ended.is_set():
            raise RuntimeError("the DecoderPool is closed; create a new one.")

    def release(self, worker: WorkerProcess) -> None:
        """Return a worker, idle or dead, to the pool."""
        with self._lock:
            if worker.is_alive and not self._ended.is_set():
                self._idle.append(worker)
            else:
                self._drop(worker)

    def _drop(self, worker: WorkerProcess) -> None:
        worker.terminate()
        self._all.discard(worker)

    def close(self) -> None:
        """Kill all workers, busy ones included."""
        with self._lock:
            self._ended.set()
            self._idle.clear()
            for worker in list(self._all):
                self._drop(worker)

    def __enter__(self) -> DecoderPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class RemoteFile:
    """What is open in a worker of a pool, which it has for itself. Close it.

    Attributes:
        worker: The worker.
    """

    def __init__(self, pool: DecoderPool) -> None:
        self._pool, self.worker = pool, pool.acquire()

    @contextmanager
    def _opening(self) -> Iterator[None]:
        """Within the context an error gives the worker back."""
        try:
            yield
        except BaseException:
            self._pool.release(self.worker)
            raise

    def close(self) -> None:
        """Give the worker back to the pool."""
        if self.worker.is_alive:
            with suppress(DecoderCrashedError, DecoderHungError, RuntimeError):  # all has been read
                self.worker.request({"op": "close"}, Deadline(self._pool.timeout_s))
        self._pool.release(self.worker)


class _RemoteReader(RemoteFile):
    """A `VideoReader` of a video that is open in a worker."""

    def __init__(self, pool: DecoderPool, source: VideoSource) -> None:
        super().__init__(pool)
        self._deadline = Deadline(pool.timeout_s)
        header, body = _request_with_source({"op": "open"}, source)
        with self._opening():
            answer, _ = self.worker.request(header, self._deadline, _check_info, body)
            self.info = VideoInfo(**{name: answer[name] for name in INFO_FIELDS})

    def read(
        self, numbers: Sequence[int], by_time: bool, max_pixels: int
    ) -> tuple[list[int], list[float], list[Image.Image]]:
        def check(answer: dict[str, Any]) -> tuple[int, int]:
            _check_numbers(answer["indices"], 1, len(numbers), int)
            count = len(answer["indices"])
            _check_numbers(answer["timestamps"], count, count, (int, float))
            return count, 3 * _checked_pixels(answer, min(max_pixels, MAX_TOTAL_PIXELS // count))

        values = [int(number) for number in numbers], by_time, max_pixels
        header = {"op": "read"} | dict(zip(READ_ARGUMENTS, values, strict=True))
        answer, parts = self.worker.request(header, self._deadline, check)
        images = [Image.frombytes("RGB", (answer["width"], answer["height"]), part) for part in parts]
        return answer["indices"], list(map(float, answer["timestamps"])), images


def _checked_pixels(answer: dict[str, Any], max_pixels: int) -> int:
    """Pixels of each image of an answer.

    Raises:
        ValueError: It is empty, or has more than `max_pixels`.
    """
    width, height = answer["width"], answer["height"]
    if not type(width) is type(height) is int or min(width, height) < 1 or width * height > max_pixels:
        raise ValueError(f"an answer has at most {max_pixels} pixels; got {width} x {height}.")
    return width * height


def _check_info(answer: dict[str, Any]) -> tuple[int, int]:
    """The size of the parts of an answer that has none.

    Raises:
        ValueError: The properties of a video are not numbers of 0 or more, whole ones of frames and pixels.
    """
    numbers = [answer[name] for name in INFO_FIELDS]
    _check_numbers(numbers, len(INFO_FIELDS), len(INFO_FIELDS), (int, float))
    if not all(isinstance(answer[name], int) for name in ("num_frames", "width", "height")) or min(numbers) < 0:
        raise ValueError(f"a video has whole numbers of frames and pixels; got {numbers}.")
    return 0, 0


def _check_numbers(values: Any, least: int, most: int, kinds: type[int] | tuple[type[int], type[float]]) -> None:
    """
    Raises:
        ValueError: It is not a list of `least` to `most` finite numbers.
    """
    is_list = isinstance(values, list) and least <= len(values) <= most
    if not is_list or not all(isinstance(one, kinds) and math.isfinite(one) for one in values):
        raise ValueError(f"an answer has {least} to {most} numbers; got {str(values)[:100]}.")


def _request_with_source(header: dict[str, Any], source: VideoSource) -> tuple[dict[str, Any], bytes]:
    """Header and body of a request: bytes are sent, a path is named."""
    if isinstance(source, bytes):
        return header | {"bytes": len(source)}, source
    if isinstance(source, FileBelow):
        return header | {"path": source.name, "folder": source.folder}, b""
    return header | {"path": os.path.abspath(source)}, b""
