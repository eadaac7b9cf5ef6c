"""The study of predicted speeds: what the parts of rounds predict, and a row for each drafter."""

from __future__ import annotations

import pytest
import tiny_models as tiny

from mmspec.economy.store import SWITCH
from research.studies import predicted_speed
from research.studies.predicted_speed import Round, predict

PLAIN: Round = (("no draft", 1, 0.0), ("score", 1, 2.0), ("rest", 1, 1.0))


def test_parts_of_other_rounds_predict() -> None:
    drafted: Round = (("head", 3, 0.5), ("score", 8, 4.0), ("rest", 8, 1.0))
    slow: Round = (("head", 3, 1.5), ("score", 8, 6.0), ("rest", 8, 3.0))
    assert predict([PLAIN, drafted], [drafted, slow, PLAIN]) == 3.0 + (1.0 + 5.0 + 2.0)
    # Four nodes are nearest to one; nothing is known of `copy`, so what it took is taken.
    unknown: Round = (("copy", 2, 7.0), ("score", 4, 100.0), ("rest", 4, 100.0))
    assert predict([unknown], [drafted, PLAIN]) == 7.0 + 2.0 + 1.0


def test_a_row_for_each_drafter(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.build_model(tiny.ModelSpec(seed=3))
    prepared = [tiny.build_inputs(model, seed, 1, images=[1]) for seed in range(2)]
    monkeypatch.setattr(predicted_speed, "requests", lambda name, per_task: (model, iter(prepared)))
    monkeypatch.setattr(predicted_speed, "DRAFTERS", ("none", "lookup"))
    monkeypatch.setenv(SWITCH, "0")
    options = ["--dtype", "float32", "--tokens", "12", "--warm", "1"]
    assert predicted_speed.main(["--models", "tiny", *options]) == 0
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split(" | ")[:2] for row in rows] == [["| tiny, float32", f"`{name}`"] for name in ("none", "lookup")]
    assert all(row.count("|") == header.count("|") for row in rows)
    assert rows[0].split(" | ")[2] == "1.00" and rows[0].endswith("| 1.00 | 1.00 | 1.00 |")
