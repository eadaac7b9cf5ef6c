"""The study of answers in half precision: shares of a tiny model."""

from __future__ import annotations

import pytest
import tiny_models as tiny

from research.studies import half_precision


def test_shares_are_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.build_model(tiny.ModelSpec(seed=3))
    prepared = [tiny.build_inputs(model, seed, 1, images=[1]) for seed in range(3)]
    monkeypatch.setattr(half_precision, "requests", lambda name, per_task: (model, iter(prepared)))
    half_precision.main(["--models", "tiny", "--types", "float32,bfloat16", "--tokens", "6", "--drafter", "lookup"])
    *_, single, half = capsys.readouterr().out.splitlines()
    assert single == "| tiny | float32 | 3 | 100% | 100% | 100% |"
    assert half.startswith("| tiny | bfloat16 | 3 | ")
