"""`mmspec caption --format txt`: a text file for each picture, whatever stops the job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import test_app_jobs as jobs
from input_table import line
from PIL import Image

from mmspec.app.caption.command import build_output
from mmspec.app.caption.config import CaptionConfig, ProcessInfo
from mmspec.app.caption.executor import LocalExecutor
from mmspec.app.caption.job import CaptionJob
from mmspec.app.cli.main import main
from mmspec.app.errors import OutputError, UsageError

pytestmark = pytest.mark.usefixtures("shared_decoders")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten pictures, 10 to 19 wide, two of them in a sub-folder."""
    (tmp_path / "p" / "sub").mkdir(parents=True)
    for number in range(10):
        where = tmp_path / "p" / ("sub" if number > 7 else "")
        Image.new("RGB", (10 + number, 8)).save(where / f"{number}.v2.png")
    return tmp_path


def job(folder: Path, fake: jobs.Fake | None = None, **options: Any) -> CaptionJob:
    paths = options.pop("paths", (str(folder / "p"),))
    config = CaptionConfig(
        **({"paths": paths, "model": "m", "batch_size": 4, "format": "txt", "prompt": "x"} | options)
    )

    def load() -> jobs.Fake:
        if fake is None:
            raise AssertionError("the model was loaded although there was nothing to do")
        return fake

    return CaptionJob(config, build_output(config, ProcessInfo()), LocalExecutor(config, load))


def texts(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.txt"))}


def expected(numbers: range = range(10)) -> dict[str, str]:
    return {f"{'sub/' if number > 7 else ''}{number}.v2.txt": f"{10 + number} x" for number in numbers}


@pytest.mark.parametrize("beside", [True, False])
def test_a_text_file_for_each_picture(folder: Path, beside: bool, capsys: Any) -> None:
    out = "-" if beside else str(folder / "captions")
    assert job(folder, jobs.Fake(), out=out).run() == 0
    assert texts(folder / "p" if beside else folder / "captions") == expected()
    assert not list(folder.rglob("*.part")) and not list(folder.rglob("*.json*"))
    assert job(folder, out=out).run() == 0
    assert "0 captioned, 0 failed, 10 skipped" in capsys.readouterr().err


@line("two folders with equal names, and text files in one `--out`")
def test_a_folder_of_texts_knows_whose_they_are(folder: Path) -> None:
    (folder / "q").mkdir()
    Image.new("RGB", (40, 8)).save(folder / "q" / "0.v2.png")
    options = {"out": str(folder / "captions"), "paths": (str(folder / "q"),)}
    job(folder, jobs.Fake(), out=options["out"]).run()
    with pytest.raises(UsageError, match=r"0\.v2\.txt'.*the caption of '\.\./p/0\.v2\.png', not of '\.\./q/0"):
        job(folder, jobs.Fake(), **options).run()
    assert texts(folder / "captions") == expected()
    for overwrite in (True, False):
        assert job(folder, jobs.Fake(), **options, overwrite=overwrite).run() == 0
        assert texts(folder / "captions") == expected() | {"0.v2.txt": "40 x"}


@line("a name of up to 255 bytes and `--format txt`")
@pytest.mark.parametrize("out", ["-", "captions"])
def test_names_as_long_as_file_systems_permit(folder: Path, out: str) -> None:
    stems = ["x" * 251, "y" * 251, "\u00e9" * 125]
    for stem in stems:
        Image.new("RGB", (40, 8)).save(folder / "p" / f"{stem}.png")
    out = out if out == "-" else str(folder / out)
    assert job(folder, jobs.Fake(), out=out).run() == 0
    found = texts(folder / "p" if out == "-" else Path(out))
    assert found == expected() | {f"{stem}.txt": "40 x" for stem in stems}
    assert not [path for path in folder.rglob(".*") if path.name != ".pictures"]


def test_prefix_and_suffix(folder: Path) -> None:
    fake = jobs.Fake()
    assert job(folder, fake, prefix="sks dog, ", suffix=", photo").run() == 0
    assert set(texts(folder / "p").values()) == {f"sks dog, {10 + number} x, photo" for number in range(10)}
    assert jobs.job(folder, fake, prefix="a ", suffix=" b").run() == 0  # of rows as well
    assert jobs.rows(folder)[0]["caption"].startswith("a 10") and jobs.rows(folder)[0]["caption"].endswith(" b")


def test_what_is_there_is_left_alone_unless_it_is_to_be_replaced(folder: Path) -> None:
    own = folder / "p" / "3.v2.txt"
    own.write_text("by hand")
    assert job(folder, jobs.Fake()).run() == 0
    assert texts(folder / "p") == expected() | {"3.v2.txt": "by hand"}
    assert job(folder, jobs.Fake(), prompt="y").run() == 0  # all are there: nothing is captioned again
    assert job(folder, jobs.Fake(), prompt="y", overwrite=True).run() == 0
    assert set(texts(folder / "p").values()) == {f"{10 + number} y" for number in range(10)}


@pytest.mark.parametrize("shell_expands", [False, True])
def test_text_files_are_no_lists_of_pictures(folder: Path, shell_expands: bool, capsys: Any) -> None:
    pattern = str(folder / "p" / "*")
    for _ in range(2):
        paths = tuple(map(str, sorted((folder / "p").iterdir()))) if shell_expands else (pattern,)
        fake = jobs.Fake()
        assert job(folder, fake, paths=tuple(path for path in paths if not os.path.isdir(path))).run() == 0
    assert fake.calls == [] and set(expected(range(8))) <= set(texts(folder / "p"))
    assert "failed: " not in capsys.readouterr().err


class Killed(BaseException):
    """As SIGKILL: nothing after it runs in the job."""


@pytest.mark.parametrize("batches", [0, 1, 2])
def test_a_killed_job_is_resumed(folder: Path, batches: int) -> None:
    def kill(widths: list[int]) -> None:
        if len(first.calls) > batches:
            raise Killed

    first = jobs.Fake(before=kill)
    with pytest.raises(Killed):
        job(folder, first).run()
    done = texts(folder / "p")
    assert len(done) == 4 * batches and done.items() <= expected().items()
    second = jobs.Fake()
    assert job(folder, second).run() == 0
    assert texts(folder / "p") == expected()
    captioned = [width for call in (*first.calls[:batches], *second.calls) for width in call]
    assert sorted(captioned) == list(range(10, 20)), "nothing twice"


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_file_is_whole_or_not_there(folder: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replace, unlink = os.replace, Path.unlink

    def die(source: Any, target: Any) -> None:
        if moment == "after":
            replace(source, target)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", die)
        patch.setattr(Path, "unlink", lambda self, missing_ok=False: None)  # a killed process removes nothing
        with pytest.raises(Killed):
            job(folder, jobs.Fake()).run()
    assert len(list(folder.rglob("*.part"))) == (moment == "before") and Path.unlink is unlink
    assert len(texts(folder / "p")) == (moment == "after")
    assert job(folder, jobs.Fake()).run() == 0
    assert texts(folder / "p") == expected() and not list(folder.rglob("*.part"))


def test_errors_have_no_file_and_are_repeated(folder: Path, capsys: Any) -> None:
    picture = folder / "p" / "2.v2.png"
    data = picture.read_bytes()
    picture.write_bytes(b"broken")
    assert job(folder, jobs.Fake()).run() == 1
    err = capsys.readouterr().err
    assert "9 captioned, 1 failed" in err and "1 of 10 have no caption; the next run tries again" in err
    assert "2.v2.txt" not in texts(folder / "p")
    picture.write_bytes(data)
    fake = jobs.Fake()
    assert job(folder, fake).run() == 0 and texts(folder / "p") == expected()


def test_what_cannot_be_written_is_said_before_the_model(folder: Path, tmp_path: Path) -> None:
    Image.new("RGB", (9, 9)).save(folder / "p" / "3.v2.jpg")
    with pytest.raises(UsageError, match=r"3\.v2\.jpg and .*3\.v2\.png would both have the text file"):
        job(folder).run()
    (folder / "p" / "3.v2.jpg").unlink()
    with pytest.raises(UsageError, match="no folder"):
        job(folder, out=str(tmp_path / "none" / "captions")).run()
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        job(folder, out=str(tmp_path / "file")).run()
    config = CaptionConfig(paths=("p",), model="m", format="txt")
    with pytest.raises(UsageError, match="--shard"):
        build_output(config, ProcessInfo(0, 2))
    with pytest.raises(UsageError, match="--fields"):
        job(folder, fields=("tau",)).run()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_read_only_is_found_before_the_model(folder: Path) -> None:
    (folder / "p" / "sub").chmod(0o500)
    with pytest.raises(OutputError, match="read-only"):
        job(folder).run()


def test_rows_of_tables_are_refused(tmp_path: Path) -> None:
    import tarfile

    Image.new("RGB", (9, 9)).save(tmp_path / "a.png")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(tmp_path / "a.png", "a.png")
    with pytest.raises(UsageError, match="row of a table or archive"):
        job(tmp_path, paths=(str(tmp_path / "a.tar"),)).run()


def test_a_manifest_names_pictures_and_prompts(folder: Path) -> None:
    (folder / "list.jsonl").write_text('{"file_name": "p/1.v2.png", "id": "one", "prompt": "what"}\n')
    for _ in range(2):
        assert job(folder, jobs.Fake(), paths=(str(folder / "list.jsonl"),)).run() == 0
    assert texts(folder / "p") == {"1.v2.txt": "11 what"}


def test_from_the_command_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    args = ["caption", "p/sub", "--model", "tiny", "--format", "txt", "--prefix", "sks, ", "--max-new-tokens", "4"]
    assert main([*args, "--no-progress"]) == 0
    found = texts(folder / "p")
    assert set(found) == {"sub/8.v2.txt", "sub/9.v2.txt"} and all(text.startswith("sks, ") for text in found.values())
