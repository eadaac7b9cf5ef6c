"""The study of prefill costs: heads of any shape, without a target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from research.studies import prefill as study_prefill

pytestmark = pytest.mark.research

SMALL = ["--hidden=32", "--heads=4", "--kv-heads=2", "--ffn=48", "--grid=4", "--text=8", "--repeats=2"]


def test_prefill_cost_of_a_head_of_any_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_rng_state()
    out = tmp_path / "prefill.json"
    assert study_prefill.main([*SMALL, "--frames", "1,4", "--compressors", "pool:4,drop", "--json", str(out)]) == 0
    assert torch.equal(torch.get_rng_state(), before) and len(capsys.readouterr().out.splitlines()) == 6
    rows = {(row["frames"], row["compressor"]): row for row in json.loads(out.read_text())}
    assert {row["num_visual_tokens"] for row in rows.values()} == {16, 64}
    for frames, num_visual in ((1, 16), (4, 64)):
        whole, few, none = (rows[frames, name] for name in ("-", "pool:4", "drop"))
        assert whole["prefill_over"][0] == whole["kv_over"] == whole["flops_over"] == 1
        assert few["kv_over"] == (8 + 4) / (8 + num_visual) and none["kv_over"] == 8 / (8 + num_visual)
        assert 0 < none["flops_over"] < few["flops_over"] < 1 and few["run"]["command"].endswith(str(out))
        # Keys and values of two heads of eight numbers, four bytes each.
        assert whole["kv_mib"] * 2**20 == (8 + num_visual) * 2 * 2 * 8 * 4
