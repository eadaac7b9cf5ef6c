"""Output that cannot be written: one line with the file, what to do and exit code 74; the next run continues."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from input_table import line

from mmspec.app.cli.main import main
from mmspec.app.errors import EXIT_IO_ERROR, OutputError, find_write_error
from research.synthetic_images import write_images

OPTIONS = ("--model", "tiny", "--max-new-tokens", "4", "--batch-size", "2", "--no-progress")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    write_images(tmp_path / "in", 6)
    return tmp_path / "in"


def caption(images: Path, out: Path) -> int:
    return main(["caption", str(images), "--out", str(out), *OPTIONS])


def fail_after(calls: int, number: int) -> Callable[[int], None]:
    """A stand-in for `os.fsync` that fails with errno `number` from the given call on."""
    counter = iter(range(10_000))

    def fsync(handle: int) -> None:
        if next(counter) >= calls:
            raise OSError(number, os.strerror(number))

    return fsync


@pytest.mark.every(2)
@line("a full disk")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("calls", [0, 4, 5])
def test_a_failed_write_is_one_line_and_the_job_continues(
    number: int, calls: int, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", fail_after(calls, number))
        assert caption(images, out) == EXIT_IO_ERROR
    err = capsys.readouterr().err
    assert "Traceback" not in err and err.count("mmspec: error: ") == 1
    last = err.splitlines()[-1]
    assert str(out) in last or "out.meta.json" in last
    assert os.strerror(number) in last and "run the same command again" in last
    assert caption(images, out) == 0
    assert [json.loads(line)["index"] for line in out.read_text().splitlines()] == list(range(6))


def run_in_shell(script: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    folder = Path(__file__).parent
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environ, cwd=folder, timeout=120)


@pytest.mark.slow
def test_a_limit_on_the_size_of_files(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = f"{sys.executable} -m mmspec caption {images} --out {out} {' '.join(OPTIONS)}"
    run = run_in_shell(f"ulimit -f 1; {command}")
    assert run.returncode == EXIT_IO_ERROR and "ulimit -f" in run.stderr and "Traceback" not in run.stderr
    assert str(out) in run.stderr
    assert caption(images, out) == 0
    assert len(out.read_text().splitlines()) == 6


@pytest.mark.parametrize(
    "command", [pytest.param("caption IMAGES " + " ".join(OPTIONS), marks=pytest.mark.slow), "env"]
)
def test_a_full_standard_output(command: str, images: Path) -> None:
    command = command.replace("IMAGES", str(images))
    run = run_in_shell(f"{sys.executable} -m mmspec {command} > /dev/full")
    assert run.returncode == EXIT_IO_ERROR
    assert "mmspec: error: cannot write" in run.stderr and "output: No space left" in run.stderr
    assert "Traceback" not in run.stderr and "Exception ignored" not in run.stderr


def test_write_errors_inside_other_errors() -> None:
    class LibraryError(Exception):
        pass

    wrapper = RuntimeError("saving failed")
    wrapper.__cause__ = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "weights.bin")
    assert "weights.bin" in str(find_write_error(wrapper))
    assert isinstance(find_write_error(LibraryError("I/O error: no space left (os error 28)")), OutputError)
    assert find_write_error(FileNotFoundError(errno.ENOENT, "no such file")) is None
    assert find_write_error(ValueError("x")) is None
