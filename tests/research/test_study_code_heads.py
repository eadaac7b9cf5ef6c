"""The study of draft heads on code tasks runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmspec.app.modeling.random_models import random_model
from research.bench.peers.export import save_text_model
from research.studies import code_heads

pytestmark = pytest.mark.research


def test_held_out_functions_are_in_no_other_task() -> None:
    prompts = code_heads.code_prompts()
    names = [prompt.split("`")[1] for prompt in prompts]
    held_out = set(names[-code_heads.HELD_OUT :])
    assert prompts == code_heads.code_prompts() and len(held_out) == code_heads.HELD_OUT
    assert held_out.isdisjoint(names[: -code_heads.HELD_OUT])


def test_every_drafter_has_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, processor = random_model("tiny")
    processor.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    folder = save_text_model(model, processor.tokenizer, tmp_path / "text")
    prompts, rows = tmp_path / "prompts.jsonl", tmp_path / "rows.json"
    assert code_heads.main(["--write", str(prompts)]) == 0
    arguments = ["--model", str(folder), "--dtype", "float32", "--prompts", str(prompts), "--json", str(rows)]
    assert code_heads.main([*arguments, "--drafters", "lookup", "--count", "2", "--new-tokens", "4"]) == 0
    assert [row["drafter"] for row in json.loads(rows.read_text())] == ["generate", "none", "lookup"]
    assert capsys.readouterr().out.count("2/2") == 3
