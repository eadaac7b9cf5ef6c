"""The recipes of docs/jobs.md run as they stand, twice: the second time there is nothing left to do."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from json_words import needs_packages, write_signs

from mmspec.app.cli.main import main
from research.synthetic_images import write_images

PAGE = Path(__file__).resolve().parents[2] / "docs" / "jobs.md"
SECTION = PAGE.read_text(encoding="utf-8").partition("## Recipes")[2].partition("\n## ")[0]
RECIPES = re.findall(r"\| `(mmspec caption [^`]+)` \|", SECTION)
NUM_PICTURES = 3


def arguments(command: str) -> list[str]:
    """The command as a shell reads it, with the tiny model."""
    words = shlex.split(re.sub(r"\$'([^']*)'", lambda quoted: shlex.quote(quoted[1].replace("\\n", "\n")), command))
    tokens = "32" if "--json-schema" in words else "4"  # an answer is whole, or an error
    return [*("tiny" if word == "MODEL" else word for word in words[1:]), "--no-progress", "--max-new-tokens", tokens]


@pytest.mark.parametrize("command", RECIPES, ids=range(len(RECIPES)))
def test_a_recipe(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "photos", NUM_PICTURES)
    names = sorted(path.name for path in (tmp_path / "photos").iterdir())
    if "list.jsonl" in command:
        rows = [{"file_name": name, "prompt": f"what is {name[0]} ?"} for name in names]
        (tmp_path / "photos" / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if "questions.txt" in command:
        (tmp_path / "questions.txt").write_text("what is it ?\nwhere is it ?\nwhy ?\n")
    if "steps.txt" in command:
        (tmp_path / "steps.txt").write_text("what is it ?\nShorten: {answer1}\n{answer1} {answer2} ?\n")
    if "schema.json" in command:
        needs_packages()
        write_signs(monkeypatch, tmp_path)
        schema = {"type": "object", "properties": {"red": {"type": "boolean"}}, "required": ["red"]}
        (tmp_path / "schema.json").write_text(json.dumps(schema))
    if "words.txt" in command:
        (tmp_path / "words.txt").write_text("red\n")
    num_rows = (2 if "--limit 2" in command else NUM_PICTURES) * (
        3 if re.search("questions.txt|steps.txt|--num-captions 3", command) else 1
    )
    assert main(arguments(command)) == 0
    assert f"{num_rows} captioned, 0 failed" in capsys.readouterr().err
    if "--format txt" in command:
        texts = sorted(tmp_path.rglob("*.txt"))
        assert [path.stem for path in texts] == [name.rpartition(".")[0] for name in names]
        assert "--prefix" not in command or all(path.read_text().startswith("sks dog, ") for path in texts)
    elif "--format" not in command and ".parquet" not in command:
        (file,) = [path for path in tmp_path.rglob("*.jsonl") if path.name != "list.jsonl"]
        assert "--start" not in command or all(
            json.loads(row)["caption"].startswith("a photo of") for row in file.read_text().splitlines()
        )
        assert len(file.read_text().splitlines()) == num_rows
    if "--overwrite" not in command:
        assert main(arguments(command)) == 0
        assert f"0 captioned, 0 failed, {num_rows} skipped" in capsys.readouterr().err


def test_there_are_recipes() -> None:
    assert len(RECIPES) == SECTION.count("mmspec caption") >= 10
