"""The study of what the choice of `auto` costs: a line for each call, and what drafted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_models as tiny

from mmspec.economy.store import SWITCH
from research.studies import regret


def test_lines_and_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.build_model(tiny.ModelSpec(seed=3))
    prepared = [tiny.build_inputs(model, seed, 1, images=[1]) for seed in range(2)]
    monkeypatch.setattr(regret, "requests", lambda name, per_task: (model, iter(prepared)))
    monkeypatch.setattr(regret, "DRAFTERS", ("none", "lookup"))
    monkeypatch.setenv(SWITCH, "0")
    file = tmp_path / "regret.jsonl"
    options = ["--dtypes", "float32", "--rows", "2", "--tokens", "12", "--calls", "2", "--out", str(file)]
    assert regret.main(["--models", "tiny", *options]) == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["drafter"] for line in lines] == [
        "generate",
        "none",
        "lookup",
        "auto",
        "none",
        "lookup",
        "auto",
        "generate",
    ]
    auto = [line for line in lines if line["drafter"] == "auto"]
    assert all(sum(line["rounds"].values()) > 0 and "a copy in few bits" in line["waits_for"] for line in auto)
    cell, *windows = capsys.readouterr().out.splitlines()
    assert cell == "tiny, float32, 2, 12: 2 calls" and len(windows) == 3
    assert all(" of none; " in line and "outputs" in line for line in windows)
