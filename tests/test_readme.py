"""The README is short, its script runs, its commands parse, its figures have a source; the docs stay short."""

from __future__ import annotations

import re
import shlex
import shutil
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers

import mmspec
from mmspec.app.cli.main import build_parser
from mmspec.app.scenes import examples, load_scenes_model
from mmspec.drafters.checkpoints.published_heads import published_heads

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
MAX_WORDS = 15_000


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) <= 90


def test_the_first_screen_has_the_two_commands_a_script_and_real_weights() -> None:
    screen = "\n".join(TEXT.splitlines()[:40])
    assert re.findall(r"^ {4}make (\w+)", screen, re.MULTILINE) == ["demo", "test"]
    assert BLOCKS[0] in screen and len(BLOCKS[0].split("\n\n")[-1].splitlines()) == 4  # and the imports
    assert table_rows() and all(row in screen for row in table_rows())


def test_the_script_runs_with_the_bundled_model_in_place_of_the_named_one(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(examples.list_example_files()[0], tmp_path / "photo.jpg")  # a PNG: the content decides
    monkeypatch.chdir(tmp_path)
    model, processor = load_scenes_model()
    pipeline = partial(transformers.pipeline, processor=processor)
    monkeypatch.setattr("transformers.pipeline", lambda task, model: pipeline(task, model=models[model]))
    models = dict.fromkeys(re.findall(r'model="([^"]+)"', BLOCKS[0]), model)
    exec(compile(BLOCKS[0], "README.md", "exec"), {"__name__": "quickstart"})
    assert "A big lizard sits at the top" in capsys.readouterr().out
    assert mmspec.stats(model).calls == 1 and mmspec.stats(model).fallback_reason is None
    assert len(BLOCKS) == len(models) == 1


def test_its_commands_parse() -> None:
    commands = re.findall(r"^ {4}mmspec (.*)$", TEXT, re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        build_parser().parse_args(shlex.split(command, comments=True))


def table_rows() -> list[str]:
    """The rows of the table of real weights."""
    table = TEXT.partition("| model, number type |")[2].partition("\n\n")[0]
    return table.splitlines()[2:]


def test_figures_are_those_of_the_results() -> None:
    """Every interval and every number of milliseconds stands in research/results, in a row of its drafter."""
    results = (ROOT / "research" / "results" / "README.md").read_text(encoding="utf-8")
    results = results.replace("**", "").splitlines()
    columns = re.findall(r"`(\w+)` \||(llama\.cpp) \|", TEXT.partition("| model, number type |")[2].partition("\n")[0])
    names = [code or name for code, name in columns]
    assert names == ["generate", "none", "hybrid", "quantized", "auto", "llama.cpp"]
    assert 1 <= len(table_rows()) <= 5
    for row in table_rows():
        model, times, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        if "[" in times:
            assert [line for line in results if "`auto`" in line and times in line], row
        for name, cell in zip(names, cells, strict=True):
            rows = [line for line in results if re.match(rf"\|  ?`?{name}\b", line)]
            rows += [line for line in results if line.startswith(f"| {model.partition(',')[0]}")]
            assert not cell or [line for line in rows if cell in re.findall(r"[\d.]+", line)], (name, cell)


def test_published_heads_are_those_of_the_list() -> None:
    """Every method that the table names for a model has a head of it that is read."""
    table = TEXT.partition("| draft heads |")[2].partition("\n\n")[0].splitlines()[2:]
    heads = [head for head in published_heads().values() if head.refused is None]
    targets = [(head.method, target.lower()) for head in heads for target in head.targets]
    assert len(table) == 6
    assert ("no published head has been run yet" in TEXT) is not any(head.weights for head in heads)
    for row in table[:-1]:  # the last one: heads of models' authors, docs/drafters.md
        methods, models = (cell.strip().split(", ") for cell in row.strip("|").split("|"))
        for method in methods:
            read = [target for name, target in targets if name == method.lower().replace("-", "")]
            assert not [model for model in models if not any(model.lower() in target for target in read)], row


def test_versions_are_those_of_the_package() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    torch, ours = re.search(r"torch ([\d.]+) and transformers ([\d.]+), or newer", TEXT).groups()  # type: ignore[union-attr]
    assert {f"torch>={torch}", f"transformers>={ours},<6"} <= {*needed}


def test_the_docs_are_not_too_long() -> None:
    assert (
        sum(len(page.read_text(encoding="utf-8").split()) for page in (ROOT / "docs").glob("*.md")) < MAX_WORDS
    )  # as `wc -w` counts
