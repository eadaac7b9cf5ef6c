"""Hidden states of models that add visual features between layers: what a layer receives, as engines read it."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models as tiny
import torch
from parity import get_model
from torch import Tensor, nn

from mmspec.targets.forward import run_forward
from mmspec.targets.registry import find_adapter


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "llava"])
@torch.no_grad()
def test_states_are_what_layers_receive(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = get_model(family, layers=4)
    adapter, inputs = find_adapter(model), tiny.build_inputs(model, 3, images=[1])
    indices, sums = (1, 2, 3, 4), list[Tensor]()
    text: Any = adapter.text_model
    if has_sums := hasattr(text, "_deepstack_process"):
        add = text._deepstack_process
        monkeypatch.setattr(text, "_deepstack_process", lambda *args: sums.append(add(*args)) or sums[-1])
    _, *states = run_forward(model, adapter, inputs, indices)
    plain = model(**inputs, output_hidden_states=True).hidden_states
    assert adapter.adds_between_layers is has_sums and len(sums) == (4 if has_sums else 0)
    expected = [*sums[:2], *plain[3:]] if has_sums else list(plain[1:])
    assert all(torch.equal(found, other) for found, other in zip(states, expected, strict=True))
    assert not has_sums or not torch.equal(states[1], plain[2])
    layers: nn.ModuleList = text.layers
    assert not any(layer._forward_pre_hooks for layer in layers)


@torch.no_grad()
def test_text_alone_has_no_sums() -> None:
    model = get_model("qwen3_vl", layers=4)
    inputs = {"input_ids": torch.arange(10, 22)[None], "attention_mask": torch.ones(1, 12, dtype=torch.long)}
    _, *states = run_forward(model, find_adapter(model), inputs, (1, 2))
    plain = model(**inputs, output_hidden_states=True).hidden_states
    assert torch.equal(states[0], plain[1]) and torch.equal(states[1], plain[2])
