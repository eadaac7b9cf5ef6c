"""Decodes videos and images in worker processes: a hostile file may crash a decoder or make it hang.

`DecoderPool` opens videos like `mmspec.vision.video.backends`, with the same exceptions and two more: the worker
crashed, or it timed out. Samplers run in this process, so any sampler works. What a worker may do is limited by
`mmspec.vision.video.sandbox`. The choice of the backend is elsewhere.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from types import TracebackType
from typing import Any, TypeVar

from PIL import Image

from mmspec.vision.images import ImageError
from mmspec.vision.video.decode_worker import read_exactly, read_message, write_message
from mmspec.vision.video.reader import (
    FrameSize,
    NoFramesError,
    RecountedError,
    VideoInfo,
    VideoReader,
    VideoSource,
)

T = TypeVar("T")
DEFAULT_TIMEOUT_S = 300.0
"""Seconds that one backend may spend on one file."""
IMAGE_TIMEOUT_S = 30.0
"""Seconds that one image may take."""
DEFAULT_MEMORY_BYTES = 8 << 30
"""Memory of one worker: several frames of the largest allowed size, and the decoder's buffers."""
EXIT_TIMEOUT_S = 5.0
"""Seconds to wait for the exit of a worker that closed its end of the pipe."""
INFO_FIELDS = tuple(field.name for field in fields(VideoInfo))
_WORKER_CODE = (
    "import json, sys; options = json.loads(sys.argv[1]); sys.path[:] = options.pop('path'); "
    "from mmspec.vision.video.decode_worker import run_worker; run_worker(**options)"
)


class DecoderCrashedError(ValueError):
    """The worker process crashed while it decoded a file.

    Attributes:
        was_killed: By SIGKILL, which no decoder does to itself: the system ran out of memory, or somebody ended it.
            The file is then worth another attempt.
    """

    was_killed = False


class DecoderHungError(ValueError):
    """The worker process exceeded its time limit and was killed."""


def worker_command(timeout_s: float, memory: int) -> list[str]:
    """The command line of a worker. It uses this process's module path; the user's main script is not run again."""
    options = {"path": sys.path, "timeout_s": timeout_s, "memory": memory}
    return [sys.executable, "-P", "-c", _WORKER_CODE, json.dumps(options)]


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
        timeout_s: Seconds that one backend may spend on one file.
        memory: Bytes that one worker may use, where the system can limit that.

    Raises:
        ValueError: A limit is not positive and finite.
    """

    def __init__(self, timeout_s: float = DEFAULT_TIMEOUT_S, memory: int = DEFAULT_MEMORY_BYTES) -> None:
        if not 0 < timeout_s < float("inf") or memory < 1:
            raise ValueError(f"timeout_s and memory must be positive and finite; got {timeout_s} and {memory}.")
        self.timeout_s = timeout_s
        self.memory = memory
        self._idle = list[_WorkerProcess]()
        self._all = set[_WorkerProcess]()
        self._lock = threading.Lock()
        self._closed = False

    def open_video(self, backend: str, source: VideoSource) -> VideoReader:
        """Open a video in a worker with the backend of that name.

        Raises:
            DecoderCrashedError: The worker crashed; also raised while reading.
            DecoderHungError: The worker timed out; also raised while reading.
            ImportError: The backend is not installed.
            NoFramesError: As the reader.
            MemoryError: As the reader.
            RuntimeError: Any other error of the reader, or the pool is closed.
        """
        return _RemoteReader(self, self._acquire(), backend, source)

    def decode_image(self, source: VideoSource, max_pixels: int) -> Image.Image:
        """Decode an image in a worker, as `mmspec.vision.images.decode_image`; once more if the worker was killed.

        Raises:
            ImageError: It is not a usable image.
            DecoderCrashedError: The worker crashed.
            DecoderHungError: The worker timed out.
        """
        return retry_if_killed(lambda: self._decode_image(source, max_pixels))

    def _decode_image(self, source: VideoSource, max_pixels: int) -> Image.Image:
        worker = self._acquire()
        try:
            header, body = _request_with_source({"op": "image", "max_pixels": max_pixels}, source)
            size = (0, 0)

            def answer_size(answer: dict[str, Any]) -> tuple[int, int]:
                nonlocal size
                size = int(answer["width"]), int(answer["height"])
                if min(size) < 1 or size[0] * size[1] > max_pixels:
                    raise ValueError(f"an answer has at most {max_pixels} pixels; got {size[0]} x {size[1]}.")
                return 1, 3 * size[0] * size[1]

            timeout_s = min(self.timeout_s, IMAGE_TIMEOUT_S)
            deadline = time.monotonic() + timeout_s
            _, data = worker.request(
                header, deadline, ("width", "height"), body, answer_size=answer_size, timeout_s=timeout_s
            )
            return Image.frombytes("RGB", size, data[0])
        finally:
            self.release(worker)

    def _acquire(self) -> _WorkerProcess:
        """An idle worker; starts one if there is none."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the DecoderPool is closed; create a new one.")
            while self._idle:
                worker = self._idle.pop()
                if worker.is_alive:
                    return worker
                self._drop(worker)
            worker = _WorkerProcess(worker_command(self.timeout_s, self.memory), self.timeout_s)
            self._all.add(worker)
            return worker

    def release(self, worker: _WorkerProcess) -> None:
        """Return a worker, idle or dead, to the pool."""
        with self._lock:
            if worker.is_alive and not self._closed:
                self._idle.append(worker)
            else:
                self._drop(worker)

    def _drop(self, worker: _WorkerProcess) -> None:
        worker.terminate()
        self._all.discard(worker)

    def close(self) -> None:
        """Kill all workers, busy ones included."""
        with self._lock:
            self._closed = True
            self._idle.clear()
            for worker in list(self._all):
                self._drop(worker)

    def __enter__(self) -> DecoderPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _WorkerProcess:
    """One worker and its pipes. One thread at a time sends requests; any thread may terminate it."""

    def __init__(self, command: Sequence[str], timeout_s: float) -> None:
        single_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # workers do no numerical work
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | single_thread,
            start_new_session=True,  # Ctrl-C goes to the parent only
        )
        self._timeout_s = timeout_s
        self._timed_out = False

    @property
    def is_alive(self) -> bool:
        """Whether it accepts requests."""
        return not self._timed_out and self._process.poll() is None

    def request(
        self,
        header: dict[str, Any],
        deadline: float,
        expected_keys: Sequence[str],
        body: bytes = b"",
        *,
        answer_size: Callable[[dict[str, Any]], tuple[int, int]] = lambda answer: (0, 0),
        timeout_s: float | None = None,
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Send a request and wait for the answer.

        Args:
            header: Header of the request.
            deadline: By `time.monotonic`; the worker is killed then.
            expected_keys: Keys that the answer must have.
            body: Bytes after the header.
            answer_size: Maps the answer's header to (number of parts, bytes of each).
            timeout_s: Time limit that the error message names; that of the worker if None.

        Returns:
            The expected keys of the answer's header, and the parts after it.

        Raises:
            DecoderCrashedError: The worker crashed, or its answer is malformed.
            DecoderHungError: The deadline passed.
            Exception: What `_raise_failure` makes of a failure that the worker reports.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), self._expire)
        timer.daemon = True
        timer.start()
        try:
            write_message(self._process.stdin, header, [body])
            answer = read_message(self._process.stdout)
            if answer is None:
                raise EOFError
            if "failed" not in answer and set(expected_keys) - set(answer):
                raise ValueError(f"an answer needs the keys {', '.join(expected_keys)}; got {', '.join(answer)}.")
            count, size = (0, 0) if "failed" in answer else answer_size(answer)
            parts = [read_exactly(self._process.stdout, size) for _ in range(count)]
        except (OSError, EOFError, ValueError) as error:
            raise self._termination_error(timeout_s or self._timeout_s) from error
        finally:
            timer.cancel()
            timer.join()  # it may be running: the next user of this worker must find `is_alive` up to date
        if "failed" in answer:
            _raise_failure(answer)
        return {name: answer[name] for name in expected_keys}, parts

    def _expire(self) -> None:
        self._timed_out = True
        self._process.kill()

    def _termination_error(self, timeout_s: float) -> Exception:
        """Terminate the worker and return the exception that says why it failed."""
        try:
            code: int | None = self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
        self.terminate()
        if self._timed_out:
            return DecoderHungError(f"more than {timeout_s:g} seconds")
        crashed = DecoderCrashedError(_describe_exit(code))
        crashed.was_killed = code == -getattr(signal, "SIGKILL", 9)
        return crashed

    def terminate(self) -> None:
        """Kill the process and close its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # data that was not written yet
                pipe.close()


class _RemoteReader:
    """A `VideoReader` of a video that is open in a worker."""

    def __init__(self, pool: DecoderPool, worker: _WorkerProcess, backend: str, source: VideoSource) -> None:
        self._pool = pool
        self._worker = worker
        self._deadline = time.monotonic() + pool.timeout_s
        header, body = _request_with_source({"op": "open", "backend": backend}, source)
        try:
            self.info = VideoInfo(**worker.request(header, self._deadline, INFO_FIELDS, body)[0])
        except BaseException:
            pool.release(worker)
            raise

    def read(self, indices: Sequence[int], size: FrameSize) -> tuple[list[Image.Image], list[float]]:
        width, height = size
        header = {"op": "read", "indices": [int(index) for index in indices], "width": width, "height": height}
        expected = len(indices), 3 * width * height
        answer, parts = self._worker.request(header, self._deadline, ("timestamps",), answer_size=lambda _: expected)
        images = [Image.frombytes("RGB", size, part) for part in parts]
        return images, [float(timestamp) for timestamp in answer["timestamps"]]

    def close(self) -> None:
        """See `VideoReader`. The worker returns to the pool."""
        if self._worker.is_alive:
            with suppress(DecoderCrashedError, DecoderHungError, RuntimeError):  # all frames have been read
                self._worker.request({"op": "close"}, self._deadline, ())
        self._pool.release(self._worker)


def _request_with_source(header: dict[str, Any], source: VideoSource) -> tuple[dict[str, Any], bytes]:
    """Header and body of a request: bytes are sent, a path is named."""
    if isinstance(source, bytes):
        return header | {"bytes": len(source)}, source
    return header | {"path": os.path.abspath(source)}, b""


def _raise_failure(answer: dict[str, Any]) -> None:
    """Raise the exception that a worker reports."""
    message = str(answer.get("message", ""))
    exceptions: dict[str, Callable[[], Exception]] = {
        "no_frames": lambda: NoFramesError(message),
        "recounted": lambda: RecountedError(int(answer.get("num_frames", 0))),
        "not_installed": lambda: ImportError(message),
        "memory": MemoryError,
        "image": lambda: ImageError(str(answer.get("kind", "BrokenImage")), message),
    }
    raise exceptions.get(str(answer["failed"]), lambda: RuntimeError(message))()


def _describe_exit(code: int | None) -> str:
    """Why a process ended, from its exit code; None if it still ran."""
    if code is None:
        return "malformed answer"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code}, {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
