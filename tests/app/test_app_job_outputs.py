"""Where a caption job writes: links, suffixes, addresses, text files of several jobs, `--overwrite` that is stopped."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest
from caption_jobs import Killed, captions, expected, job, kill_after
from input_table import line
from PIL import Image

from mmspec.app.caption.options import choose_format
from mmspec.app.cli.arguments import non_negative_int, output_path, parse_seed, positive_int
from mmspec.app.cli.main import build_parser, main
from mmspec.app.errors import UsageError
from mmspec.app.io.sidecars import on_one_line

pytestmark = pytest.mark.usefixtures("pictures_in_p")


@line("an `--out` that is a link")
@pytest.mark.parametrize("target", ["full", "empty", "missing", "chain"])
def test_a_link_stays_and_its_target_holds_the_rows(target: str) -> None:
    Path("big").mkdir()
    Path("home").mkdir()
    link = Path("home/c.jsonl")
    link.symlink_to("../big/rows.jsonl")
    if target == "empty":
        Path("big/rows.jsonl").touch()
    if target == "chain":
        Path("c.jsonl").symlink_to(link)
    out = "c.jsonl" if target == "chain" else "home/c.jsonl"
    Path("p/3.png").write_bytes(b"no")
    assert job(out=out).run() == 1 and link.is_symlink()
    if target == "full":
        with pytest.raises(Killed):  # a kill leaves a torn file, which is rewritten
            job(out=out, fake=kill_after(2), overwrite=True).run()
    Image.new("RGB", (13, 8)).save("p/3.png")
    assert job(out=out, retry_errors=True).run() == 0
    rows = [json.loads(text) for text in Path("big/rows.jsonl").read_text().splitlines()]
    assert [row["caption"] for row in rows] == [f"{10 + number} x" for number in range(8)]
    assert link.is_symlink() and os.listdir("home") == ["c.jsonl"]
    assert sorted(os.listdir("big")) == ["rows.job.toml", "rows.jsonl", "rows.meta.json"]
    assert job(out="big/rows.jsonl", fake=kill_after(0)).run() == 0  # by its own name there is nothing to do


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
def test_text_files_have_one_line() -> None:
    for text in ("\n", "\r\n", "\r", "\n\n", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"):
        assert on_one_line(f"A cat.{text}- b {text}") == "A cat. - b"
    assert on_one_line("") == "" and on_one_line("two  spaces ") == "two  spaces "
    assert job("txt", prompt="a\n\nb").run() == 0
    assert captions("txt") == expected("a b")


@line("a photo and a clip of one name (Live Photo), `--format txt`")
@pytest.mark.parametrize("suffix", [".mov", ".MP4", ".webm"])
@pytest.mark.parametrize("out", ["-", "texts"])
def test_live_photos(suffix: str, out: str, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (2, 5):
        (Path("p", f"{number}{suffix}")).write_bytes(b"no clip, and never read")
    for paths in (("p",), tuple(sorted(f"p/{name}" for name in os.listdir("p")))):
        assert job("txt", paths=paths, out=out, overwrite=True).run() == 0
        err = capsys.readouterr().err
        assert f"skipped 2 clips beside a picture of the same name (Live Photos), as 2{suffix}" in err
        assert "8 captioned, 0 failed" in err
    texts = sorted(Path("p" if out == "-" else out).glob("*.txt"))
    assert {path.stem: path.read_text() for path in texts} == expected("x")
    Image.new("RGB", (9, 9)).save("p/2.jpg")
    with pytest.raises(UsageError, match="would both have the text file"):  # two pictures: nobody knows which
        job("txt").run()


@line("rows with and without errors")
@pytest.mark.parametrize("bad", [0, 1, 7])
def test_types_are_known_from_the_first_row(bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="optional: mmspec[data]")
    (Path("p", f"{bad}.png")).write_bytes(b"no")
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


@line("two outputs of one name with different suffixes")
@pytest.mark.parametrize("other", ["c.ndjson", "c.json", "c.JSONL", "c", "c.csv", "c.v2.jsonl"])
def test_outputs_of_one_name_share_nothing(other: str) -> None:
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
