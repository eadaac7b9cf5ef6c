"""What is the machine's trouble and no file's: decoder processes that cannot be started, time in which nothing ran."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from video_files import decoder_command_running, write_video

from mmspec.vision.images import ImageError
from mmspec.vision.video import deadline, decoder_pool, worker_process
from mmspec.vision.video.deadline import Deadline
from mmspec.vision.video.decoder_pool import DecoderPool
from mmspec.vision.video.frames import Uniform, read_frames
from mmspec.vision.video.worker_process import DecoderCrashedError, DecoderStartError


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (7, 5)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_pool, "START_WAITS_S", (0.01,) * 4)
    monkeypatch.setattr(worker_process, "THREAD_WAITS_S", (0.0,) * 4)


def fail_at_first(monkeypatch: pytest.MonkeyPatch, what: Any, name: str, error: BaseException, times: int) -> list[int]:
    """Let the first calls of a method fail; returns the number of calls, in a list."""
    real, calls = getattr(what, name), [0]

    def call(self: Any, *args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] <= times:
            raise error
        return real(self, *args, **options)

    monkeypatch.setattr(what, name, call)
    return calls


ERRORS = [OSError(number, os.strerror(number)) for number in (errno.EAGAIN, errno.EMFILE)]


@pytest.mark.parametrize("error", [*ERRORS, MemoryError()], ids=lambda error: getattr(error, "strerror", "MemoryError"))
def test_a_process_that_cannot_be_started_is_tried_again(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fail_at_first(monkeypatch, subprocess.Popen, "__init__", error, 3)
    monkeypatch.setattr(subprocess.Popen, "__del__", lambda self: None, raising=False)
    with DecoderPool() as pool:
        assert pool.decode_image(picture(), 100).size == (7, 5) and calls == [4]


DIES = [
    "raise MemoryError",
    "os.kill(os.getpid(), 9)",
    "os._exit(127)",
]


@pytest.mark.parametrize("code", DIES)
def test_a_process_that_ends_before_it_serves_is_started_again(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    good, starts = decoder_pool.worker_command, [0]

    def command(*limits: Any) -> list[str]:
        starts[0] += 1
        return [sys.executable, "-c", f"import os, sys; {code}"] if starts[0] < 3 else good(*limits)

    monkeypatch.setattr(decoder_pool, "worker_command", command)
    with DecoderPool() as pool:
        assert pool.decode_image(picture(), 100).size == (7, 5) and starts == [3]


def test_clips_as_well_and_never_a_fault_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = write_video(tmp_path / "clip.mp4", 4)
    calls = fail_at_first(monkeypatch, subprocess.Popen, "__init__", ERRORS[0], 99)
    monkeypatch.setattr(subprocess.Popen, "__del__", lambda self: None, raising=False)
    with DecoderPool() as pool:
        for attempt in (lambda: read_frames(clip, isolated=pool), lambda: pool.decode_image(picture(), 100)):
            with pytest.raises(
                DecoderStartError, match=r"no process that decodes files can be started \(.*ulimit"
            ) as one:
                attempt()
            assert not isinstance(one.value, ValueError | OSError | RuntimeError | ImageError)
        calls[0] = 100
        assert len(read_frames(clip, Uniform(2), isolated=pool).images) == 2


def test_while_others_decode_one_of_their_processes_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, int]] = []
    with DecoderPool() as pool:
        busy = pool.acquire()
        fail_at_first(monkeypatch, worker_process.WorkerProcess, "__init__", DecoderStartError("EAGAIN"), 10**9)
        thread = threading.Thread(target=lambda: sizes.append(pool.decode_image(picture(), 100).size))
        thread.start()
        time.sleep(0.15)  # more than all the waits
        assert thread.is_alive()
        pool.release(busy)
        thread.join(20)
        assert sizes == [(7, 5)]


def test_a_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    with DecoderPool() as pool:
        pool.decode_image(picture(), 100)
        with monkeypatch.context() as patch:
            calls = fail_at_first(patch, threading.Thread, "start", RuntimeError("can't start new thread"), 3)
            assert pool.decode_image(picture(), 100).size == (7, 5) and calls == [4]
            calls[0] = -99
            with pytest.raises(DecoderStartError, match="can't start new thread"):
                pool.decode_image(picture(), 100)


@pytest.mark.parametrize(("code", "is_retried"), [("9", True), ("signal.SIGALRM", True), ("11", False)])
def test_a_process_that_was_ended_while_it_decodes(
    code: str, is_retried: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = tmp_path / "once"
    fault = (
        "import os, signal\nfrom mmspec.vision.video import decode_worker as w\n"
        "real = w._RequestHandler._decode_image\n"
        f"def decode(*a):\n    if not os.path.exists({str(once)!r}):\n        os.mkdir({str(once)!r})\n"
        f"        os.kill(os.getpid(), {code})\n    return real(*a)\nw._RequestHandler._decode_image = decode"
    )
    monkeypatch.setattr(decoder_pool, "worker_command", decoder_command_running(fault))
    with DecoderPool() as pool:
        if is_retried:
            assert pool.decode_image(picture(), 100).size == (7, 5)
        else:
            with pytest.raises(DecoderCrashedError, match="signal 11"):
                pool.decode_image(picture(), 100)


class Clock:
    """A clock that each wait moves on: by the seconds waited, and once by many more."""

    def __init__(self, jumps: Iterator[float]) -> None:
        self.now, self._jumps = 100.0, jumps

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds + next(self._jumps, 0.0)
        return False


@pytest.mark.parametrize(("jumps", "least", "most"), [([], 30, 30), ([0, 3600.0], 3628, 3631), ([0.1] * 99, 29, 31)])
def test_suspended_time_is_not_counted(
    jumps: list[float], least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(iter(jumps))
    monkeypatch.setattr(deadline, "time", clock)
    limit = Deadline(30.0)
    done = SimpleNamespace(wait=clock.wait, is_set=lambda: False)
    assert not limit.wait(done)  # type: ignore[arg-type]
    assert least <= clock.now - 100 <= most and limit.left_s <= 0


def test_a_suspension_in_the_middle_of_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock jumps by an hour while the worker decodes, as after SIGSTOP and SIGCONT."""
    real, start = time.monotonic, time.monotonic()
    clock: Callable[[], float] = lambda: real() + (3600.0 if real() - start > 0.3 else 0.0)  # noqa: E731
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=clock))
    slow = "import time\nfrom mmspec.vision import images as i\nreal = i.decode_image\n"
    slow += "def decode(*a):\n    time.sleep(0.6)\n    return real(*a)\ni.decode_image = decode"
    monkeypatch.setattr(decoder_pool, "worker_command", decoder_command_running(slow))
    with DecoderPool(timeout_s=5) as pool:
        start = real()
        assert pool.decode_image(picture(), 100).size == (7, 5)


def test_an_hour_between_two_requests_of_a_clip(tmp_path: Path) -> None:
    clip = write_video(tmp_path / "clip.mp4", 4)
    with DecoderPool(timeout_s=5) as pool:
        reader = pool.open_video(str(clip))
        left = reader._deadline.left_s  # type: ignore[attr-defined]
        time.sleep(0.2)
        assert reader._deadline.left_s == left  # type: ignore[attr-defined]
        reader.close()
