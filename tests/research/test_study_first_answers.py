"""The study of first answers: rows of processes of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from research.studies import first_answers

pytestmark = pytest.mark.research


def test_answers_of_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert first_answers.main(["lookup", "--in-process", "--prompts", "1", "--answers", "2"]) == 0
    taus, times = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(taus) == len(times) == 2 and min(taus) >= 1 and min(times) > 0


def test_the_second_process_finds_the_costs_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = []

    def run_process(drafter: str, folder: str, *_: int) -> tuple[list[float], list[float]]:
        folders.append(folder)
        return [4.0, 5.0], [2.0, 1.0]

    monkeypatch.setattr(first_answers, "run_process", run_process)
    out = tmp_path / "rows.json"
    assert first_answers.main(["flash", "--json", str(out)]) == 0
    assert folders[0] == folders[1]
    assert [row["costs"] for row in json.loads(out.read_text())] == ["empty", "filled"]
    assert "of answer 1 4.00, of answer 2 5.00 (0.80)" in capsys.readouterr().out


@pytest.mark.slow
def test_costs_outlive_a_process(tmp_path: Path) -> None:
    for _ in range(2):
        taus, times = first_answers.run_process("flash", str(tmp_path), 1, 2)
        assert min(taus) > 1 and min(times) > 0
    assert len(list(tmp_path.glob("costs/*.json"))) == 1
