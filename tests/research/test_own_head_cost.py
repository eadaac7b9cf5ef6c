"""The study of what a draft of a checkpoint's head costs: its table, at sizes of a test."""

from __future__ import annotations

from typing import Any

import assistants
import pytest
import tiny_models as tiny
import zoo

from mmspec.drafters.mtp.assistant import AssistantDrafter
from mmspec.targets.assistant import assistant_parts
from mmspec.targets.registry import find_adapter
from research.studies import own_head_cost as study

pytestmark = [
    pytest.mark.research,
    pytest.mark.skipif(not {"qwen3_5", "gemma4"} <= set(zoo.ROWS), reason="an older transformers"),
]
VOCAB = 100_352


def small_qwen(num_layers: int) -> Any:
    config = study.qwen_config(num_layers)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_attention_heads": 4, "vocab_size": VOCAB}
    config.update({**sizes, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8})
    config.linear_num_key_heads = 2
    return config


def test_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each kind of LM head: times, their ratio, and what bytes predict at both depths."""
    monkeypatch.setitem(study.SHAPES, "qwen3.5-0.8b", (8, small_qwen, study.qwen_drafter))
    options = ["--models", "qwen3.5-0.8b", "--layers", "4", "--reduced", "500", "--rounds", "3", "--repeats", "1"]
    assert study.main(options) == 0
    head, _, *rows = capsys.readouterr().out.strip().splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[:3] for row in cells] == [["qwen3.5-0.8b", "4 of 8", kind] for kind in ("full", "500 ids")]
    assert all(len(row) == len(head.strip("|").split("|")) for row in cells)
    full, reduced = ([float(cell) for cell in row[6:]] for row in cells)
    assert full[1] > reduced[1] > 0 and full[2] > reduced[2] > 0 and full[1] > full[2]


def test_the_bytes_of_an_assistant() -> None:
    """With its centroids a draft reads those and the rows of the best, once for each token."""
    model = tiny.build_model(tiny.ModelSpec("gemma4", seed=3, layers=3))
    assistant = assistants.build_assistant(model, centroids=True)
    drafter = AssistantDrafter(assistant_parts(assistant, find_adapter(model)))
    head = drafter.head
    body = sum(value.nbytes for name, value in head.named_parameters() if "lm_head" not in name and "centr" not in name)
    size = 4 * head.lm_head.weight.shape[1]
    vocab, centroids, best = len(head.lm_head.weight), len(head.centroids.weight), head.top_centroids
    assert study.read_bytes(drafter, "full", 3, model) == 3 * (body + size * vocab)
    assert study.read_bytes(drafter, "centroids", 3, model) == 3 * (
        body + size * (centroids + best * vocab // centroids)
    )
