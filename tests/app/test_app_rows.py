"""The rows of a caption job: what they say of their origin, and the choice of their columns."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from mmspec.app.cli.main import main
from mmspec.app.io.columns import GENERATION, ROW_COLUMNS
from mmspec.app.modeling.load import model_revision
from mmspec.app.modeling.random_models import random_model
from mmspec.app.modeling.synthetic_images import write_images
from mmspec.files import snapshot_id

pytestmark = pytest.mark.usefixtures("shared_decoders")

STATE = {"id", "caption", "prompt_sha1", "error", "index"}


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
    options = [
        "--prompt",
        "what is it ?",
        "--temperature",
        0.7,
        "--seed",
        5,
        "--top-p",
        0.9,
        "--system-prompt",
        "be brief",
    ]
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


def test_ids_are_relative_where_the_input_was(pictures: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "photos").symlink_to(pictures)
    names = sorted(path.name for path in pictures.iterdir())[:2]
    monkeypatch.chdir(tmp_path)
    chosen = [f"photos/{name}" for name in names]
    assert caption(*chosen, "--out", "out/a.jsonl") == 0
    assert ids(tmp_path / "out" / "a.jsonl") == chosen
    monkeypatch.chdir(tmp_path / "work")
    assert caption(*(f"../{name}" for name in chosen), "--out", "../out/b.jsonl") == 0
    assert ids(tmp_path / "out" / "b.jsonl") == [f"../{name}" for name in chosen]
    absolute = [str(pictures / name) for name in names]
    assert caption(*absolute, "--out", "../out/c.jsonl") == 0
    assert ids(tmp_path / "out" / "c.jsonl") == absolute
    monkeypatch.chdir(pictures.parent)  # a job with absolute ids is not begun anew under relative ones
    relative = [f"{pictures.name}/{name}" for name in names]
    capsys.readouterr()
    assert caption(*relative, "--out", tmp_path / "out" / "c.jsonl") == 2
    assert "absolute path" in capsys.readouterr().err and len(ids(tmp_path / "out" / "c.jsonl")) == 2
    assert caption(*absolute, "--out", tmp_path / "out" / "c.jsonl") == 0
    assert len(ids(tmp_path / "out" / "c.jsonl")) == 2


def test_two_files_of_one_relative_name_are_two_rows(pictures: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    for folder, source in (("", 0), ("out", 1)):
        (tmp_path / folder / "a.png").write_bytes(sorted(pictures.iterdir())[source].read_bytes())
    for _ in range(2):
        assert caption("out/a.png", "a.png", "a.png", "--out", "out/o.jsonl") == 0
        assert ids(tmp_path / "out" / "o.jsonl") == ["a.png", str(tmp_path / "a.png")]
