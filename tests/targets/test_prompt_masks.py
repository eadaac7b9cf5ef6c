"""The layers of a prompt get the masks that they get without us: bidirectional images, windows, padding."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models as tiny
import torch
import zoo
from parity import generate_plain, get_model, speculate
from torch import Tensor, nn

MASKED = [name for name, row in zoo.ROWS.items() if "bidirectional" in row.traits or "per layer" in row.traits]


def _masks(model: Any, given: tiny.Inputs) -> list[Tensor | None]:
    """What the layers get in the first forward of the prompt, as bool."""
    found: list[Tensor | None] = []

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        mask = kwargs.get("attention_mask")
        found.append(mask if mask is None or mask.dtype == torch.bool else mask >= 0)

    layers = model.get_decoder().layers
    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    try:
        generate_plain(model, given, max_new_tokens=1, do_sample=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found[: len(layers)]


@pytest.mark.parametrize("family", [*MASKED, "llava", "qwen3_vl"])
def test_masks_of_a_prompt(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = get_model(family, seed=3, window=6 if family in zoo.ROWS and zoo.ROWS[family].has_window else 0)
    given = tiny.build_inputs(model, 4, 2, images=[1, 2], padding="left")
    plain = _masks(model, given)
    monkeypatch.setattr("mmspec.fallback._model_reason", lambda *_: None)  # our hooks look like a user's
    with speculate(model, "lookup"):
        ours = _masks(model, given)
    assert len(ours) == len(plain) > 0
    for mine, theirs in zip(ours, plain, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or theirs is None or torch.equal(mine, theirs)
