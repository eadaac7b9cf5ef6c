"""Rows about a picture or clip that was replaced under its name since they were written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from caption_jobs import Killed, captions, expected, job, kill_after, make_folder
from input_table import line
from PIL import Image

from mmspec.app.caption.config import ProcessInfo
from mmspec.app.errors import UsageError

SIZE = 300
"""Of the pictures that are replaced, in bytes."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_folder(tmp_path, monkeypatch)
    for path in (tmp_path / "p").iterdir():
        path.write_bytes(path.read_bytes().ljust(SIZE, b"\0"))
    return tmp_path


def replace(number: int, width: int, how: str = "written") -> None:
    """Put another picture in the place of one."""
    path = Path(f"p/{number}.png")
    before = path.stat()
    if how == "moved":
        Image.new("RGB", (width, 8)).save("other.png")
        os.replace("other.png", path)
    else:
        Image.new("RGB", (width, 8)).save(path)
    if how == "same size":  # as of a BMP
        path.write_bytes(path.read_bytes().ljust(SIZE, b"\0"))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    if how == "old time":  # `cp -p`, `rsync -t`
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns - 10**12))


@line("a picture or clip that was replaced since it was captioned")
@pytest.mark.parametrize("how", ["written", "moved", "old time", "same size"])
@pytest.mark.parametrize("stopped", [False, True])
def test_a_replaced_picture(how: str, stopped: bool, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if stopped:
        with pytest.raises(Killed):
            job(fake=kill_after(2)).run()
        before = captions("jsonl")
    else:
        assert job().run() == 0
        before = expected("x")
    first, *_ = before
    replace(int(first), 40, how)
    capsys.readouterr()
    assert job().run() == 0
    assert captions("jsonl") == expected("x") | {first: "40 x"}
    assert f"anew 1 row whose file was replaced since, as 'p/{first}.png'" in capsys.readouterr().err
    assert job(fake=kill_after(0)).run() == 0 and "0 captioned" in capsys.readouterr().err


def test_what_is_the_same_is_not_done_again(folder: Path) -> None:
    assert job().run() == 0
    shutil.copytree("p", "q")  # copied without its times, and back
    shutil.rmtree("p")
    shutil.copytree("q", "p", copy_function=shutil.copyfile)
    os.chmod("p/1.png", 0o600)
    assert job(fake=kill_after(0)).run() == 0 and captions("jsonl") == expected("x")


def test_a_broken_picture_that_was_mended_and_one_that_broke(folder: Path) -> None:
    picture = Path("p/3.png").read_bytes()
    Path("p/3.png").write_bytes(b"no")
    assert job().run() == 1 and captions("jsonl")["3"] is None
    Path("p/3.png").write_bytes(picture)
    assert job().run() == 0 and captions("jsonl") == expected("x")
    Path("p/3.png").write_bytes(b"no")
    assert job().run() == 1 and captions("jsonl")["3"] is None  # not the caption of what was there


def test_one_that_is_replaced_while_the_job_runs(folder: Path) -> None:
    with pytest.raises(Killed):
        job(fake=kill_after(2)).run()
    replace(0, 50)
    with pytest.raises(Killed):
        job(fake=kill_after(1)).run()
    replace(0, 60)
    replace(7, 70)
    assert job().run() == 0 and captions("jsonl") == expected("x") | {"0": "60 x", "7": "70 x"}


def test_several_processes(folder: Path) -> None:
    assert job().run() == 0
    replace(0, 50)
    replace(5, 60)
    for rank in (0, 1):
        assert job(process=ProcessInfo(rank, 2)).run() == 0
    assert captions("jsonl") == expected("x") | {"0": "50 x", "5": "60 x"}


@pytest.mark.parametrize("form", ["parquet", "webdataset", "txt"])
def test_outputs_that_do_not_change(form: str, folder: Path) -> None:
    pytest.importorskip("pyarrow") if form == "parquet" else None
    assert job(form).run() == 0
    replace(4, 40)
    if form == "txt":
        assert job(form, fake=kill_after(0)).run() == 0
    else:
        with pytest.raises(UsageError, match=r"'p/4\.png' was replaced since .* --overwrite") as error:
            job(form).run()
        assert len(str(error.value)) <= 300
    assert captions(form) == expected("x")
    assert job(form, overwrite=True).run() == 0 and captions(form) == expected("x") | {"4": "40 x"}
