"""DecoderPool: the same frames and errors as in this process, and isolation from faults of decoders."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import video_files
from video_files import (
    FAULTY_READER,
    decoder_command_running,
    grey_frame_numbers,
    write_audio_only,
    write_empty_video,
    write_video,
)

from mmspec.vision.video import decoder_pool, worker_process
from mmspec.vision.video.frames import (
    DecoderCrashedError,
    DecoderHungError,
    DecoderPool,
    Fps,
    Uniform,
    read_frames,
)

CLIP = 12


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_video(tmp_path_factory.mktemp("clips") / "clip.mp4", CLIP)


@pytest.fixture
def faulty_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers in which the name of a file selects a fault (see `FAULTY_READER`)."""
    monkeypatch.setattr(decoder_pool, "worker_command", decoder_command_running(FAULTY_READER))


def has_ended(pid: int, seconds: float = 20.0) -> bool:
    """Whether a process has ended, or ends within `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def named(clip: Path, fault: str) -> Path:
    """A copy of the clip whose name selects a fault."""
    file = clip.with_name(f"{fault}.mp4")
    file.write_bytes(clip.read_bytes())
    return file


# --- equal to in-process decoding -------------------------------------------------------------------------------------


class UnpicklableSampler:
    """A sampler that cannot be sent to another process: it holds a lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def sample(self, total: int, fps: float) -> list[int]:
        with self.lock:
            return list(range(0, total, 2))[1:3]


def test_same_frames(clip: Path) -> None:
    with DecoderPool() as pool:
        for source in (clip, str(clip), clip.read_bytes()):
            for sampler in (None, Uniform(3), Fps(4), UnpicklableSampler()):
                local = read_frames(source, sampler)
                remote = read_frames(source, sampler, isolated=pool)
                assert (local.array() == remote.array()).all()
                assert (local.timestamps, local.metadata) == (remote.timestamps, remote.metadata)
    alone = read_frames(clip, num_frames=4, max_pixels=900, isolated=True)
    assert grey_frame_numbers(alone.images) == [0, 3, 6, 9] and alone.images[0].size == (30, 30)


def test_same_errors(clip: Path, tmp_path: Path) -> None:
    (tmp_path / "text.mp4").write_text("no video")
    write_empty_video(tmp_path / "none.mp4")
    write_audio_only(tmp_path / "song.mp4")

    class Broken(Uniform):
        def sample(self, total: int, fps: float) -> list[int]:
            raise KeyError("raised by the sampler")

    cut = write_video(tmp_path / "cut.mp4", 30, format={"movflags": "faststart"}, options={"g": "1"})
    cut.write_bytes(cut.read_bytes()[: int(cut.stat().st_size * 0.7)])
    for name, content in (("a", b""), ("b", b"no video at all" * 50), ("c", b"\0" * 3000)):
        (tmp_path / f"{name}.mp4").write_bytes(content)
    no_video = "is not a video that can be read"
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        *((tmp_path / f"{name}.mp4", {}, ValueError, no_video) for name in ("a", "b", "c", "text")),
        (cut, {}, ValueError, r"the file is cut: \d+ of at least \d+ bytes"),
        (tmp_path / "none.mp4", {}, ValueError, "a video without frames"),
        (tmp_path / "song.mp4", {}, ValueError, "it has no video stream"),
        (tmp_path / "not there.mp4", {}, FileNotFoundError, "no such video"),
        (b"no video" * 9, {}, ValueError, f"a video of 72 bytes {no_video}"),
        (clip, {"sampler": Broken()}, KeyError, "raised by the sampler"),
        (clip, {"num_frames": 0}, ValueError, "num_frames must"),
    ]
    with DecoderPool() as pool:
        for source, options, kind, message in cases:
            errors = []
            for isolated in (False, pool):
                with pytest.raises(kind, match=message) as failed:
                    read_frames(source, **options, isolated=isolated)
                text = str(failed.value)
                assert (
                    "\n" not in text
                    and ".cc:" not in text
                    and (options or isinstance(source, bytes) or str(source) in text)
                )
                errors.append(text)
            assert errors[0] == errors[1]
        assert grey_frame_numbers(read_frames(clip, Uniform(2), isolated=pool).images) == [3, 9]


def test_a_reader_that_is_not_installed(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_pool, "worker_command", decoder_command_running("sys.modules['av'] = None"))
    with pytest.raises(ImportError, match=r"reading videos needs PyAV \(.*pip install"):
        read_frames(clip, isolated=True)


# --- faults of decoders ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("segv", "signal 11, SIGSEGV"),
        ("abort", "signal 6, SIGABRT"),
        ("later", "signal 6, SIGABRT"),
        ("exit", "exit code 3"),
    ],
)
def test_a_crash_affects_one_file(name: str, cause: str, faulty_workers: None, clip: Path) -> None:
    bad = named(clip, name)
    with DecoderPool() as pool:
        for _ in range(2):
            with pytest.raises(DecoderCrashedError) as failed:
                read_frames(bad, isolated=pool)
            assert str(failed.value) == f"the decoder crashed on {bad} ({cause})"
            assert grey_frame_numbers(read_frames(clip, Uniform(2), isolated=pool).images) == [3, 9]
        with pytest.raises(DecoderCrashedError, match=rf"\({cause}"):
            read_frames(bad, isolated=pool)
    with pytest.raises(ValueError, match="the decoder crashed on"):
        read_frames(bad, isolated=True)


def test_timeout(faulty_workers: None, clip: Path) -> None:
    bad = named(clip, "hang")
    with DecoderPool(timeout_s=1.5) as pool:
        with pytest.raises(DecoderHungError) as failed:
            read_frames(bad, isolated=pool)
        assert str(failed.value) == f"the decoder took too long on {bad} (more than 1.5 seconds)"
        pool.timeout_s = 60
        assert grey_frame_numbers(read_frames(clip, Uniform(2), isolated=pool).images) == [3, 9]


def test_worker_that_does_not_read(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is larger than the buffer of a pipe."""
    monkeypatch.setattr(
        decoder_pool, "worker_command", lambda *_: [sys.executable, "-c", "import time; time.sleep(600)"]
    )
    with DecoderPool(timeout_s=1) as pool, pytest.raises(DecoderHungError, match="more than 1 seconds"):
        read_frames(clip.read_bytes() * 500, isolated=pool)


@pytest.mark.parametrize("output", ["hello\\n", "[1]\\n", "{}\\n", '{"num_frames": 1}\\n', ""])
def test_malformed_answers(output: str, clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "EXIT_TIMEOUT_S", 0.2)
    code = f"import os, sys, time; sys.stdout.write('{output}'); sys.stdout.flush(); os.close(1); time.sleep(600)"
    monkeypatch.setattr(decoder_pool, "worker_command", lambda *_: [sys.executable, "-c", code])
    with DecoderPool(timeout_s=20) as pool, pytest.raises(DecoderCrashedError, match="malformed answer"):
        read_frames(clip, isolated=pool)


@pytest.mark.skipif(sys.platform != "linux", reason="memory limits")
def test_memory_limit(faulty_workers: None, clip: Path) -> None:
    bad = named(clip, "greedy")
    with DecoderPool(memory=1 << 30) as pool:
        with pytest.raises(MemoryError):
            read_frames(bad, isolated=pool)
        assert grey_frame_numbers(read_frames(clip, Uniform(2), isolated=pool).images) == [3, 9]


def test_output_of_libraries_is_ignored(faulty_workers: None, clip: Path) -> None:
    file = named(clip, "loud")
    assert grey_frame_numbers(read_frames(file, Uniform(2), isolated=True).images) == [3, 9]


def test_modules_in_the_current_folder_are_not_imported(
    clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current folder may contain modules."""
    monkeypatch.chdir(tmp_path)
    for name in ("json", "PIL", "mmspec", "av"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(9)")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", ".")])
    assert grey_frame_numbers(read_frames(clip, Uniform(2), isolated=True).images) == [3, 9]


# --- processes --------------------------------------------------------------------------------------------------------


def test_workers_are_reused_and_terminated(faulty_workers: None, clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[subprocess.Popen[bytes]]()

    class Spy(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Spy)
    bad = named(clip, "segv")
    with DecoderPool() as pool:
        assert started == [], "no worker before it is needed"
        for _ in range(3):
            read_frames(clip, isolated=pool)
        assert len(started) == 1, "reused for the next file"
        results = dict[int, list[int]]()

        def work(number: int) -> None:
            results[number] = grey_frame_numbers(read_frames(clip, Uniform(2), isolated=pool).images)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert list(results.values()) == [[3, 9]] * 3 and len(started) <= 3
        with pytest.raises(DecoderCrashedError):
            read_frames(bad, isolated=pool)
        read_frames(clip, isolated=pool)
    assert all(one.returncode is not None for one in started)
    assert all(one.stdin is not None and one.stdin.closed for one in started)
    pool.close()
    with pytest.raises(ValueError, match="the DecoderPool is closed"):
        read_frames(clip, isolated=pool)


def test_close_terminates_busy_workers(faulty_workers: None, clip: Path) -> None:
    bad, errors = named(clip, "hang"), list[str]()
    pool = DecoderPool()

    def work() -> None:
        with pytest.raises(ValueError, match="hang") as failed:
            read_frames(bad, isolated=pool)
        errors.append(str(failed.value))

    thread = threading.Thread(target=work)
    thread.start()
    while not pool._all:
        time.sleep(0.01)
    time.sleep(0.2)
    pool.close()
    thread.join(20)
    assert not thread.is_alive() and errors and not pool._all


SCRIPT = """
import sys
from mmspec.vision.video.frames import read_frames
print("once", len(read_frames(sys.argv[1], isolated=True).images))
"""


@pytest.mark.every(2)
@pytest.mark.parametrize("isolated", ["-c", "file"])
def test_script_without_main_guard(isolated: str, clip: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    script = ["-c", SCRIPT] if isolated == "-c" else [str(tmp_path / "script.py")]
    done = subprocess.run(
        [sys.executable, *script, str(clip)], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout == "once 8\n"


ORPHAN = """
import os, sys, threading
sys.path.insert(0, sys.argv[2])
from video_files import FAULTY_READER, decoder_command_running
from mmspec.vision.video import decoder_pool, worker_process
decoder_pool.worker_command = decoder_command_running(FAULTY_READER + "decode_worker.GRACE_S = 0")
pool = decoder_pool.DecoderPool(timeout_s=3)
threading.Thread(target=lambda: pool.open_video(sys.argv[1]), daemon=True).start()
while not pool._all:
    pass
print(next(iter(pool._all))._process.pid, flush=True)
threading.Event().wait()
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs signal.setitimer")
@pytest.mark.parametrize("name", ["clip", "hang"])
def test_worker_ends_after_its_parent(name: str, clip: Path) -> None:
    """The worker ends with its pipe, or, if it hangs, by its alarm."""
    file = named(clip, name)
    command = [sys.executable, "-c", ORPHAN, str(file), str(Path(video_files.__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as run:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        run.kill()
    assert has_ended(pid)


@pytest.mark.parametrize("options", [{"timeout_s": 0}, {"timeout_s": -1}, {"timeout_s": float("inf")}, {"memory": 0}])
def test_invalid_limits(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="timeout_s and memory must be positive and finite"):
        DecoderPool(**options)
