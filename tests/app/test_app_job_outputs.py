"""Where a caption job writes: links, suffixes, addresses, text files of several jobs, `--overwrite` that is stopped."""

from __future__ import annotations

import argparse
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from input_table import line
from PIL import Image
from test_app_jobs import Fake

from mmspec.app.caption.command import build_output
from mmspec.app.caption.config import CaptionConfig, ProcessInfo
from mmspec.app.caption.executor import LocalExecutor
from mmspec.app.caption.job import CaptionJob
from mmspec.app.caption.options import choose_format
from mmspec.app.cli.arguments import non_negative_int, output_path, parse_seed, positive_int
from mmspec.app.cli.main import build_parser, main
from mmspec.app.errors import UsageError
from mmspec.app.io.images import load_image
from mmspec.app.io.sidecars import on_one_line

NAMES = {"jsonl": "c.jsonl", "parquet": "o", "webdataset": "o", "txt": "-"}
"""Outputs by format."""


class Killed(BaseException):
    """As SIGKILL: nothing after it runs in the job."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_folder(tmp_path, monkeypatch)


def make_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight pictures, 10 to 17 wide, decoded in this process, in the working folder."""
    monkeypatch.setattr("mmspec.app.caption.executor.decode_item", lambda item, *rest: load_image(item.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p").mkdir()
    for number in range(8):
        Image.new("RGB", (10 + number, 8)).save(tmp_path / "p" / f"{number}.png")
    return tmp_path


def job(
    form: str = "jsonl", fake: Fake | None = None, process: ProcessInfo | None = None, **options: Any
) -> CaptionJob:
    process = process or ProcessInfo()
    base = {"paths": ("p",), "model": "m", "batch_size": 2, "prompt": "x", "format": form, "out": NAMES.get(form)}
    config = CaptionConfig(**(base | options))
    return CaptionJob(config, build_output(config, process), LocalExecutor(config, lambda: fake or Fake(), process))


def captions(form: str) -> dict[str, str]:
    """The captions that are written, by the number of their picture."""
    if form == "txt":
        return {path.stem: path.read_text() for path in sorted(Path("p").glob("*.txt"))}
    if form == "jsonl":
        rows = [json.loads(text) for text in Path("c.jsonl").read_text().splitlines()]
    elif form == "parquet":
        pq = pytest.importorskip("pyarrow.parquet")
        rows = [row for shard in Path("o").glob("part-*.parquet") for row in pq.read_table(shard).to_pylist()]
    else:
        rows = []
        for shard in Path("o").glob("part-*.tar"):
            with tarfile.open(shard) as archive:
                members = {member.name: archive.extractfile(member) for member in archive}
                rows += [json.load(file) for name, file in members.items() if name.endswith(".json") and file]
    assert len({row["id"] for row in rows}) == len(rows)
    return {Path(row["id"]).stem: row["caption"] for row in rows}


def expected(prompt: str) -> dict[str, str]:
    return {str(number): f"{10 + number} {prompt}" for number in range(8)}


def kill_after(batches: int) -> Fake:
    def before(widths: list[int]) -> None:
        if len(fake.calls) > batches:
            raise Killed

    fake = Fake(before=before)
    return fake


@line("an `--out` that is a link")
@pytest.mark.parametrize("target", ["full", "empty", "missing", "chain"])
def test_a_link_stays_and_its_target_holds_the_rows(target: str, folder: Path) -> None:
    (folder / "big").mkdir()
    (folder / "home").mkdir()
    link = folder / "home" / "c.jsonl"
    link.symlink_to("../big/rows.jsonl")
    if target == "empty":
        (folder / "big" / "rows.jsonl").touch()
    if target == "chain":
        (folder / "c.jsonl").symlink_to(link)
    out = "c.jsonl" if target == "chain" else "home/c.jsonl"
    (folder / "p" / "3.png").write_bytes(b"no")
    assert job(out=out).run() == 1 and link.is_symlink()
    if target == "full":
        with pytest.raises(Killed):  # a kill leaves a torn file, which is rewritten
            job(out=out, fake=kill_after(2), overwrite=True).run()
    Image.new("RGB", (13, 8)).save(folder / "p" / "3.png")
    assert job(out=out, retry_errors=True).run() == 0
    rows = [json.loads(text) for text in (folder / "big" / "rows.jsonl").read_text().splitlines()]
    assert [row["caption"] for row in rows] == [f"{10 + number} x" for number in range(8)]
    assert link.is_symlink() and os.listdir("home") == ["c.jsonl"]
    assert sorted(os.listdir("big")) == ["rows.job.toml", "rows.jsonl", "rows.meta.json"]
    assert job(out="big/rows.jsonl", fake=kill_after(0)).run() == 0  # by its own name there is nothing to do


@pytest.mark.parametrize("form", ["parquet", "webdataset", "txt"])
def test_a_folder_may_be_a_link_too(form: str, folder: Path) -> None:
    pytest.importorskip("pyarrow") if form == "parquet" else None
    (folder / "o").symlink_to("big")  # which does not exist yet
    assert job(form, out="o").run() == 0 and (folder / "o").is_symlink() and (folder / "big").is_dir()
    (folder / "q").symlink_to("missing/big")
    with pytest.raises(UsageError, match=r"missing: create it first"):
        job(form, out="q").run()


@line("an `--out` that is an address, or in a missing folder")
@pytest.mark.parametrize("form", list(NAMES))
def test_a_folder_that_is_missing(form: str, folder: Path) -> None:
    pytest.importorskip("pyarrow") if form == "parquet" else None
    for out in ("missing/x", "p/0.png/x", "missing/x/y"):
        with pytest.raises(UsageError, match=r"no folder .*: create it first"):
            job(form, out=out).run()
    assert os.listdir() == ["p"]


@line("`--out` with a suffix, without `--format`")
def test_the_suffix_of_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = {"a": "jsonl", "a.jsonl": "jsonl", "a.ndjson": "jsonl", "a.json": "jsonl", "a.v2": "jsonl", "-": "jsonl"}
    kinds |= {
        "a.parquet": "parquet",
        "a.PARQUET": "parquet",
        "x/a.tar": "webdataset",
        "b.csv/a": "jsonl",
        "a.CSV": "csv",
    }
    assert {name: choose_format(None, name) for name in kinds} == kinds
    for name in ("a.db", "a.TSV", "a.txt", "a.xlsx", "a.arrow", "a.jsonl.gz", "a.json.zst", "a.tar.gz", "a.zip"):
        with pytest.raises(UsageError) as error:
            choose_format(None, name)
        assert name in str(error.value) and ".jsonl" in str(error.value)
    assert choose_format("jsonl", "a.tsv") == "jsonl" and choose_format("parquet", "a.zip") == "parquet"  # said so
    with pytest.raises(UsageError, match="not compressed"):
        choose_format("jsonl", "a.jsonl.gz")
    assert main(["caption", "p", "--model", "tiny", "--out", "x.tsv"]) == 2 and "--format" in capsys.readouterr().err
    parse = build_parser().parse_args
    assert parse(["caption", "p", "--out", "a.parquet", "--rows-per-shard", "4"]).rows_per_shard == 4


@line("an `--out` that is an address, or in a missing folder")
@pytest.mark.parametrize("name", ["s3://b/c.jsonl", "gs://b/x", "hf://datasets/o/n", "https://a/b", "file:///a/b"])
def test_outputs_are_files_of_this_machine(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    commands = [["caption", "p", "--out"], ["caption", "p", "--report"], ["train", "--out"]]
    for command in [*commands, ["export", "h", "--out"]]:
        with pytest.raises(SystemExit) as ended:
            build_parser().parse_args([*command, name])
        err = capsys.readouterr().err
        assert ended.value.code == 2 and "a path of this machine" in err and name in err and len(err) < 320
    assert output_path("a:b/c") == Path("a:b/c")


@line("a number of more than 64 bits")
def test_numbers_fit_the_columns() -> None:
    assert [parse_seed(text) for text in ("0", "-5", "+7", str(2**63 - 1))] == [0, -5, 7, 2**63 - 1]
    for parse in (parse_seed, positive_int, non_negative_int):
        for text in (str(2**63), str(2**64), "9" * 5000):
            with pytest.raises(argparse.ArgumentTypeError, match="64 bits") as error:
                parse(text)
            assert len(str(error.value)) < 300
    for text in ("x", "", "-", "1.5", "--1"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_seed(text)


@line("a caption of several lines in a text file")
def test_text_files_have_one_line(folder: Path) -> None:
    for text in ("\n", "\r\n", "\r", "\n\n", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"):
        assert on_one_line(f"A cat.{text}- b {text}") == "A cat. - b"
    assert on_one_line("") == "" and on_one_line("two  spaces ") == "two  spaces "
    assert job("txt", prompt="a\n\nb").run() == 0
    assert captions("txt") == expected("a b")


@line("a photo and a clip of one name (Live Photo), `--format txt`")
@pytest.mark.parametrize("suffix", [".mov", ".MP4", ".webm"])
@pytest.mark.parametrize("out", ["-", "texts"])
def test_live_photos(suffix: str, out: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (2, 5):
        (folder / "p" / f"{number}{suffix}").write_bytes(b"no clip, and never read")
    for paths in (("p",), tuple(sorted(f"p/{name}" for name in os.listdir("p")))):
        assert job("txt", paths=paths, out=out, overwrite=True).run() == 0
        err = capsys.readouterr().err
        assert f"skipped 2 clips beside a picture of the same name (Live Photos), as 2{suffix}" in err
        assert "8 captioned, 0 failed" in err
    texts = sorted(Path("p" if out == "-" else out).glob("*.txt"))
    assert {path.stem: path.read_text() for path in texts} == expected("x")
    Image.new("RGB", (9, 9)).save(folder / "p" / "2.jpg")
    with pytest.raises(UsageError, match="would both have the text file"):  # two pictures: nobody knows which
        job("txt").run()


@line("rows with and without errors")
@pytest.mark.parametrize("bad", [0, 1, 7])
def test_types_are_known_from_the_first_row(bad: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="optional: mmspec[data]")
    (folder / "p" / f"{bad}.png").write_bytes(b"no")
    assert job().run() == 1
    rows = [json.loads(text) for text in Path("c.jsonl").read_text().splitlines()]
    assert [bool(row["error"]) for row in rows] == [number == bad for number in range(8)]
    many = [row | {"id": f"{n} {row['id']}"} for row in rows[:bad] or rows[1:] for n in range(200)]
    for order in ([*many, rows[bad]], [rows[bad], *many]):
        Path("big.jsonl").write_text("".join(json.dumps(row) + "\n" for row in order))
        found = datasets.load_dataset(
            "json", data_files="big.jsonl", split="train", cache_dir=f"cache{order is many}", chunksize=50_000
        )
        assert len(found) == len(order)
        assert found[order.index(rows[bad])]["error"] == rows[bad]["error"], "as it was written"


@line("a job with `--overwrite` that is killed")
@pytest.mark.parametrize("form", list(NAMES))
def test_an_overwriting_job_is_continued(form: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow") if form == "parquet" else None
    (folder / "p" / "3.png").write_bytes(b"no")
    assert job(form, prompt="old").run() == 1  # an old error row must not stay either
    Image.new("RGB", (13, 8)).save(folder / "p" / "3.png")
    for kills in (1, 2):  # the second kill is one of a job that continues
        with pytest.raises(Killed):
            job(form, fake=kill_after(1), prompt="new", overwrite=True).run()
        assert sum(text.endswith("new") for text in captions(form).values()) == 2 * kills
    rest = Fake()
    assert job(form, fake=rest, prompt="new", overwrite=True).run() == 0
    assert captions(form) == expected("new") and "4 captioned, 0 failed, 4 skipped" in capsys.readouterr().err
    assert not [name for name in os.listdir("p") if name.startswith(".")]
    again = Fake()
    assert job(form, fake=again, prompt="new", overwrite=True).run() == 0 and len(again.calls) == 4  # it had ended
    with pytest.raises(Killed):
        job(form, fake=kill_after(1), prompt="new", overwrite=True).run()
    assert job(form, prompt="newer", overwrite=True).run() == 0 and captions(form) == expected("newer")


@pytest.mark.parametrize("form", ["jsonl", "parquet", "webdataset"])
def test_one_that_was_stopped_is_also_continued_without_the_option(form: str, folder: Path) -> None:
    pytest.importorskip("pyarrow") if form == "parquet" else None
    with pytest.raises(Killed):
        job(form, fake=kill_after(1), overwrite=True).run()
    rest = Fake()
    assert job(form, fake=rest).run() == 0 and len(rest.calls) == 3 and captions(form) == expected("x")
    again = Fake()
    assert job(form, fake=again, overwrite=True).run() == 0 and len(again.calls) == 4


@line("two jobs that write the same text files")
@pytest.mark.parametrize("out", ["-", "texts"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_two_equal_jobs_with_text_files(
    out: str, overwrite: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmspec.app.io.jsonl.time.sleep", lambda seconds: None)

    def other(widths: list[int]) -> None:
        for options in ({}, {"overwrite": True, "shard": (0, 4)}):
            with pytest.raises(UsageError, match="another job is writing"):
                job("txt", out=out, **options).run()

    assert job("txt", fake=Fake(before=other), out=out, overwrite=overwrite).run() == 0
    assert not list(folder.rglob("*.job"))


def test_shards_of_a_job_with_text_files_run_side_by_side(folder: Path) -> None:
    unfinished = folder / "p" / ".0.txt.0123abcd.part"  # as the first job has it while it writes

    def other(widths: list[int]) -> None:
        unfinished.touch()
        assert job("txt", shard=(1, 2)).run() == 0 and unfinished.exists()

    assert job("txt", fake=Fake(before=other), shard=(0, 2)).run() == 0 and captions("txt") == expected("x")
    assert job("txt").run() == 0 and not unfinished.exists()


@line("a text file that is written while the job runs")
def test_what_others_write_meanwhile_is_left_alone(folder: Path) -> None:
    def write(widths: list[int]) -> None:
        (folder / "p" / "7.txt").write_text("by hand")

    assert job("txt", fake=Fake(before=write)).run() == 0
    assert captions("txt") == expected("x") | {"7": "by hand"}


def test_a_text_file_that_is_a_link_is_replaced_not_followed(folder: Path) -> None:
    (folder / "secret").write_text("s")
    (folder / "p" / "1.txt").symlink_to("../secret")
    assert job("txt", overwrite=True).run() == 0
    assert (folder / "secret").read_text() == "s" and captions("txt") == expected("x")


@line("a folder or link where a text file goes")
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("out", ["-", "texts"])
def test_a_folder_or_pipe_in_the_place_of_a_text_file(out: str, overwrite: bool, folder: Path) -> None:
    where = folder / ("p" if out == "-" else "texts") / "3.txt"
    for make in (os.mkdir, os.mkfifo):
        where.parent.mkdir(exist_ok=True)
        make(where)
        with pytest.raises(UsageError, match=r"3\.txt cannot be written"):
            job("txt", fake=kill_after(0), out=out, overwrite=overwrite).run()
        where.rmdir() if where.is_dir() else where.unlink()


@line("two outputs of one name with different suffixes")
@pytest.mark.parametrize("other", ["c.ndjson", "c.json", "c.JSONL", "c", "c.csv", "c.v2.jsonl"])
def test_outputs_of_one_name_share_nothing(other: str, folder: Path) -> None:
    """Not the settings either: a job would go on with those of the other."""
    form = "csv" if other.endswith("csv") else "jsonl"
    names = ("c.jsonl", other)
    for out, prompt in zip(names, "xy", strict=True):
        with pytest.raises(Killed):
            job(form if out == other else "jsonl", fake=kill_after(1), out=out, prompt=prompt).run()
    for out, prompt in zip(names, "yx", strict=True):
        with pytest.raises(UsageError, match="was written with prompt"):
            job(form if out == other else "jsonl", fake=kill_after(0), out=out, prompt=prompt).run()
    for out, prompt in zip(names, "xy", strict=True):
        assert job(form if out == other else "jsonl", out=out, prompt=prompt).run() == 0
    assert captions("jsonl") == expected("x") and "17 y" in Path(other).read_text()
