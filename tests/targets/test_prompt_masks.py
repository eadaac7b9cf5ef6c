"""The layers of a prompt get what they get without us: masks (bidirectional images, windows, padding) and positions."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import tiny_models as tiny
import torch
import zoo
from parity import generate_plain, get_model, speculate
from torch import Tensor, nn

MASKED = [name for name, row in zoo.ROWS.items() if "bidirectional" in row.traits or "per layer" in row.traits]


def _given_to_layers(model: Any, given: tiny.Inputs) -> list[tuple[int, Tensor | None]]:
    """(number of positions, mask as bool) of each layer in the prompt's forward."""
    found: list[tuple[int, Tensor | None]] = []

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        mask = kwargs.get("attention_mask")
        found.append((hidden.shape[-2], mask if mask is None or mask.dtype == torch.bool else mask >= 0))

    layers = model.get_decoder().layers
    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    try:
        generate_plain(model, given, max_new_tokens=1, do_sample=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found[: len(layers)]


@pytest.mark.parametrize("family", [*MASKED, "llava", "qwen3_vl"])
def test_what_the_layers_of_a_prompt_get(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that read the keys of others compute the last position alone, as without us."""
    window = 6 if zoo.FAMILIES[family].has_window else 0
    model = get_model(family, seed=3, layers=3, window=window)
    prompts = [
        tiny.build_inputs(model, 4, 2, images=[1, 2]),
        tiny.build_inputs(model, 4, 1, images=[0], padding="none"),
    ]
    plain = [_given_to_layers(model, given) for given in prompts]
    monkeypatch.setattr("mmspec.fallback._model_reason", lambda *_: None)  # our hooks look like a user's
    with speculate(model, "lookup"):
        ours = [_given_to_layers(model, given) for given in prompts]
    for mine, theirs in zip(itertools.chain(*ours), itertools.chain(*plain), strict=True):
        assert mine[0] == theirs[0] and (mine[1] is None) == (theirs[1] is None)
        assert mine[1] is None or theirs[1] is None or torch.equal(mine[1], theirs[1])
