"""The study of draft heads: rows, intervals and tables of a tiny run; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from research.studies import draft_heads as study

pytestmark = pytest.mark.research


def test_a_study(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "MAX_ANSWER_TOKENS", 5)
    args = ["hybrid", "--model", "tiny", "--temperatures", "0,1", "--batch-sizes", "2,1", "--count", "2"]
    args += ["--task", "short", "--nodes", "4,auto"]
    files = ["--json", str(tmp_path / "heads.json"), "--markdown", str(tmp_path / "heads.md")]
    assert study.main([*args, *files]) == 0
    rows = json.loads((tmp_path / "heads.json").read_text())
    series = [(row["batch"], row["temperature"], row["nodes"]) for row in rows if row["drafter"] == "hybrid"]
    assert series == [(2, 0.0, 4), (2, 1.0, 4), (1, 0.0, None), (1, 1.0, None)]
    for row in rows:
        assert row["identical"] is True and row["count"] == 2 and row["task"] == "short"
        for name in ("tau_ci", "ms_per_token"):
            value, low, high = row[name]
            assert low <= value <= high
        assert row["run"]["command"].startswith("python -m research.studies.draft_heads hybrid")
    text = (tmp_path / "heads.md").read_text()
    assert text == capsys.readouterr().out and "**batch 2, temperature 1**" in text and "| hybrid | 1." in text
