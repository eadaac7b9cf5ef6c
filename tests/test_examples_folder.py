"""The scripts of `examples/` run, some with shorter answers, on the bundled model, without a network."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from mmspec.app.scenes.examples import list_example_files

EXAMPLES = Path(__file__).parents[1] / "examples"
PICTURES = [str(file) for file in list_example_files() if file.suffix == ".png"]
RUNS: dict[str, tuple[list[str], str]] = {
    "script": ([], "identical to plain generate: True"),
    "chat": ([], "> How many things are there?\n Upper left"),
    "batch_job": (["rows.jsonl"], "sits at the top"),
    "own_drafter": ([], "outputs identical"),
    "train_head": (["run", "1", "scenes", *PICTURES[:2]], "outputs identical"),
    "serve_head": (["run", "1", "scenes", *PICTURES[:2]], '"model": "run/served"'),
    "json_answers": ([], "identical to plain generate: True"),
    "ray_pipeline": (["captions"], "sits at the top"),
    "lmms_eval_scores": ([], "auto ["),
}
"""{script: (its arguments, a part of what it prints)}."""
SHORTENED = ("own_drafter", "train_head", "serve_head")
"""Those whose answers have 12 tokens in the fast test."""
NEEDS = {"json_answers": "xgrammar", "ray_pipeline": "ray", "lmms_eval_scores": "lmms_eval"}
pytestmark = pytest.mark.usefixtures("warm_decoders", "scenes_once")


def run_example(
    name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, num_tokens: int | None = None
) -> None:
    """Run a script as `python examples/NAME.py ARGUMENTS` would, with answers of so many tokens if that is given."""
    script = EXAMPLES / f"{name}.py"
    text = script.read_text(encoding="utf-8")
    if num_tokens is not None:
        text = re.sub(r"(max.new.tokens\W+)\d+", rf"\g<1>{num_tokens}", text)
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    code: object = 0
    try:
        exec(compile(text, script, "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        code = end.code
    assert not code


def test_every_script_is_run_and_short() -> None:
    scripts = {file.stem: file.read_text(encoding="utf-8").splitlines() for file in EXAMPLES.glob("*.py")}
    assert scripts.keys() == RUNS.keys()
    assert all(len(lines) <= 40 and lines[0].startswith('"""') for lines in scripts.values())
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert [name for name in scripts if f"{name}.py" not in page] == []


@pytest.mark.parametrize("name", RUNS)
def test_the_script_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    package = NEEDS.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"optional: {package} is not installed")
    monkeypatch.chdir(tmp_path)
    arguments, expected = RUNS[name]
    run_example(name, arguments, monkeypatch, 12 if name in SHORTENED else None)
    assert expected in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train_head", "serve_head"])
def test_training_on_the_bundled_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_example(name, [], monkeypatch)
    assert RUNS[name][1] in capsys.readouterr().out


def test_a_batch_job_that_runs_again_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        run_example("batch_job", ["rows.jsonl", "tiny"], monkeypatch)
    assert "6 skipped (already done)" in capsys.readouterr().err
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len({row["file_name"] for row in rows}) == len(rows) == 6
