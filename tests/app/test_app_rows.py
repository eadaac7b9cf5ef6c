"""The rows of a caption job: what they say of their origin, and the choice of their columns."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from input_table import line
from test_app_inputs import write_tar

from mmspec.app.cli.main import main
from mmspec.app.errors import UsageError
from mmspec.app.io.columns import GENERATION, ROW_COLUMNS
from mmspec.app.io.job_metadata import check_settings, is_overwriting
from mmspec.app.modeling.load import model_revision
from mmspec.app.modeling.random_models import random_model
from mmspec.files import snapshot_id
from research.synthetic_images import write_images

STATE = {"id", "file_name", "caption", "prompt_sha1", "error", "index", "file_stamp"}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    write_images(folder, 5)
    return folder


def caption(*args: object) -> int:
    return main(["caption", *map(str, args), "--no-progress", "--max-new-tokens", "6", "--model", "tiny"])


def rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    import datasets

    files = sorted(map(str, path.glob("*.parquet")))
    return list(datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(path / ".cache")))


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_row_stands_alone(pictures: Path, tmp_path: Path, form: str) -> None:
    out = tmp_path / ("o.jsonl" if form == "jsonl" else "o")
    options = ["--temperature", "0.7", "--seed", "5", "--top-p", "0.9"]
    options += ["--prompt", "what is it ?", "--system-prompt", "be brief"]
    assert caption(pictures, "--out", out, "--format", form, *options) == 0
    for row in rows(out):
        assert list(row) == list(ROW_COLUMNS) and list(row["gen"]) == list(GENERATION)
        assert (
            row["prompt"] == "what is it ?" and row["prompt_sha1"] == hashlib.sha1(row["prompt"].encode()).hexdigest()
        )
        assert row["drafter"] in ("arbitrated", "hybrid") and row["model"] == "tiny" and row["model_revision"] is None
        settings = {"temperature": 0.7, "seed": 5, "top_p": 0.9, "top_k": 50, "system_prompt": "be brief", "stop": []}
        assert {name: row["gen"][name] for name in settings} == settings


@pytest.mark.parametrize("form", ["jsonl", "parquet", "webdataset"])
def test_columns_are_chosen_and_a_job_of_few_is_resumed(pictures: Path, tmp_path: Path, form: str, capsys: Any) -> None:
    out = tmp_path / ("o.jsonl" if form == "jsonl" else "o")
    args = ("--out", out, "--format", form, "--fields", "prompt,tau")
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    assert caption(pictures, broken, *args) == 1
    assert "5 captioned, 1 failed" in capsys.readouterr().err
    if form != "webdataset":
        assert all(set(row) == {*STATE, "prompt", "tau"} for row in rows(out)) and len(rows(out)) == 6
    assert caption(pictures, broken, *args) == 1
    assert "0 captioned, 0 failed, 6 skipped" in capsys.readouterr().err
    broken.write_bytes(sorted(pictures.iterdir())[0].read_bytes())
    assert caption(pictures, broken, *args, "--retry-errors") == 0
    assert "1 captioned, 0 failed, 5 skipped" in capsys.readouterr().err
    assert caption(pictures, broken, "--out", out, "--format", form) == 2
    assert "fields" in capsys.readouterr().err


def test_columns_that_a_comparison_needs_are_there(pictures: Path, tmp_path: Path, capsys: Any) -> None:
    assert caption(pictures, "--out", tmp_path / "o.jsonl", "--fields", "prompt", "--compare") == 0
    assert all(set(row) == {*STATE, "prompt", "identical", "gen"} for row in rows(tmp_path / "o.jsonl"))
    assert caption(pictures, "--out", tmp_path / "p.jsonl", "--fields", "promt") == 2
    err = capsys.readouterr().err
    assert "no column 'promt'" in err and "did you mean 'prompt'?" in err and not (tmp_path / "p.jsonl").exists()


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("/c/hub/models--yuhuili--EAGLE3-LLaVA/snapshots/0123abc", "yuhuili/EAGLE3-LLaVA"),
        ("/c/hub/models--a--b-c--d/snapshots/0123abc/", "a/b-c--d"),
        ("heads/msd/", None),
        ("/x/snapshots/0123abc", None),
    ],
)
def test_a_drafter_of_the_hub_is_named_by_its_id(folder: str, name: str | None) -> None:
    assert snapshot_id(folder) == name


def test_the_revision_of_a_model_of_the_hub(tmp_path: Path) -> None:
    model, _ = random_model("tiny")
    assert model_revision(model) is None
    model.config._name_or_path = "/c/models--a--b/snapshots/0123abc"
    assert model_revision(model) == "0123abc"
    model.config._commit_hash = "fedcba"
    assert model_revision(model) == "fedcba"


def ids(file: Path) -> list[str]:
    return [row["id"] for row in rows(file)]


@line("one file by several paths: relative, absolute, through a link")
def test_an_id_is_the_path_from_the_output(pictures: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    for folder in ("work", "out"):
        (tmp_path / folder).mkdir()
    (tmp_path / "photos").symlink_to(pictures)
    (tmp_path / "link").symlink_to(tmp_path / "out")
    names = sorted(path.name for path in pictures.iterdir())[:2]
    expected = [os.path.relpath(pictures / name, tmp_path / "out") for name in names]
    given = {
        tmp_path: "photos/{}",
        tmp_path / "work": "../photos/{}",
        pictures.parent: pictures.name + "/{}",
        pictures: "{}",
        tmp_path / "out": str(pictures) + "/{}",
    }
    for number, (folder, form) in enumerate(given.items()):
        monkeypatch.chdir(folder)
        out = tmp_path / ("link" if number == 1 else "out") / "a.jsonl"
        assert caption(*map(form.format, names), "--out", os.path.relpath(out)) == 0
        assert ids(out) == expected and f"{2 * bool(number)} skipped" in capsys.readouterr().err


@line("two folders with equal names, two lists with equal ids, and one `--out`")
@pytest.mark.parametrize("form", ["jsonl", "parquet", "webdataset"])
def test_an_id_says_as_much_as_what_is_captioned(
    pictures: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, form: str
) -> None:
    first, second = sorted(pictures.iterdir())[:2]
    out = tmp_path / "home" / ("o.jsonl" if form == "jsonl" else "o")
    out.parent.mkdir()
    for year, file in (("2023", first), ("2024", second)):
        (tmp_path / year).mkdir()
        monkeypatch.chdir(tmp_path / year)
        Path("a.png").write_bytes(file.read_bytes())
        text = base64.b64encode(file.read_bytes()).decode()
        Path("l.csv").write_text(f"image,prompt\n{text},what ?\n")
        Path("own.csv").write_text("image,id\na.png,7\n")
        write_tar(Path("t.tar"), {"0.png": file.read_bytes()})
        assert caption(".", "l.csv", "t.tar", "--out", out, "--format", form) == 0
        assert "3 captioned, 0 failed, 0 skipped" in capsys.readouterr().err
    assert caption("own.csv", "--out", out, "--format", form) == 0
    assert caption("own.csv", "--out", out, "--format", form) == 0, "the same file"
    monkeypatch.chdir(tmp_path / "2023")
    capsys.readouterr()
    assert caption("own.csv", "--out", out, "--format", form) == 2
    assert "the row '7' in " in (said := capsys.readouterr().err) and "is about another file than" in said
    assert caption(str(tmp_path / "2024" / "own.csv"), "--out", out, "--format", form) == 0


def test_two_tables_with_equal_ids(pictures: Path, tmp_path: Path, capsys: Any) -> None:
    pa, pq = pytest.importorskip("pyarrow", reason="optional: mmspec[data]"), pytest.importorskip("pyarrow.parquet")
    files = [file.read_bytes() for file in sorted(pictures.iterdir())[:2]]
    for year in ("2023", "2024"):
        (tmp_path / year).mkdir()
        pq.write_table(pa.table({"image": files, "n": [7, 8]}), tmp_path / year / "t.parquet")
    args = ("--id-column", "n", "--out", tmp_path / "o.jsonl")
    for _ in range(2):
        assert caption(tmp_path / "2023" / "t.parquet", *args) == 0
    assert "2 skipped" in capsys.readouterr().err
    assert caption(tmp_path / "2024" / "t.parquet", *args) == 2
    assert "the row '7' in " in (said := capsys.readouterr().err) and "another file than '2024/t.parquet#0'" in said


@line("two questions about a picture, `--format txt`")
def test_two_rows_never_have_one_text_file(pictures: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.png").write_bytes(next(pictures.iterdir()).read_bytes())
    asked = [{"id": f"q{number}", "image": "a.png", "prompt": f"what {number} ?"} for number in range(2)]
    Path("l.jsonl").write_text("\n".join(map(json.dumps, asked)))
    for more in ((), ("--out", "texts")):
        assert caption("l.jsonl", "--format", "txt", *more) == 2
        assert "the rows 'q0' and 'q1' about a.png would both have the text file" in capsys.readouterr().err
    assert not list(tmp_path.rglob("a.txt"))


@line("rows that were edited, or are not of a caption job")
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_edited_rows_are_refused(pictures: Path, tmp_path: Path, capsys: Any, form: str) -> None:
    out = tmp_path / ("o.jsonl" if form == "jsonl" else "o")
    assert caption(pictures, "--out", out, "--format", form) == 0
    if form == "parquet":
        pq = pytest.importorskip("pyarrow.parquet", reason="optional: mmspec[data]")
        (file,) = out.glob("*.parquet")
        pq.write_table(pq.read_table(file).drop_columns(["prompt_sha1", "error"]), file)
        assert caption(pictures, "--out", out, "--format", form) == 2
        assert "part-00000-00000.parquet has no prompt_sha1 and no error" in capsys.readouterr().err
        return
    kept = [json.dumps({key: row[key] for key in ("id", "file_name", "caption")}) for row in rows(out)]
    numbered = [json.dumps(row | {"id": number}) for number, row in enumerate(rows(out))]
    own = [json.dumps({"id": "0", "image": "a.png", "conversations": []})]
    index = [json.dumps(row | {"index": "0"}) for row in rows(out)]
    for lines, message in (
        (kept, "line 1 has no prompt_sha1 and no error"),
        (own, "line 1 has no caption and no prompt_sha1 and no error"),
        (numbered, "line 1 is not a row of a caption job"),
        (numbered[:1], "line 1 is not a row of a caption job"),
        (index, "line 1 has no valid index"),
    ):
        for end in ("", "\n"):
            out.write_text("\n".join(lines) + end)
            before = out.read_bytes()
            assert caption(pictures, "--out", out) == 2 and out.read_bytes() == before
            assert f"o.jsonl {message}" in capsys.readouterr().err
    for text in ('{"settings": null}', '{"settings":' + "[" * 100_000):
        (tmp_path / "m.json").write_text(text)
        assert not is_overwriting(tmp_path / "m.json", {})
        with pytest.raises(UsageError, match="is damaged"):
            check_settings(tmp_path / "m.json", {}, out)


def test_two_files_of_one_relative_name_are_two_rows(pictures: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    for folder, source in (("", 0), ("out", 1)):
        (tmp_path / folder / "a.png").write_bytes(sorted(pictures.iterdir())[source].read_bytes())
    for _ in range(2):
        assert caption("out/a.png", "a.png", "a.png", "--out", "out/o.jsonl") == 0
        assert ids(tmp_path / "out" / "o.jsonl") == ["a.png", "../a.png"]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_ids_are_the_same_in_a_file_and_in_a_folder(pictures: Path, tmp_path: Path, form: str) -> None:
    out = pictures.parent / ("o.jsonl" if form == "jsonl" else "o")
    names = sorted(path.name for path in pictures.iterdir())[:2]
    assert caption(*(pictures / name for name in names), "--out", out, "--format", form) == 0
    assert [row["id"] for row in rows(out)] == [f"{pictures.name}/{name}" for name in names]
