"""Functions of transformers that user code replaces between calls, also those that another function calls."""

from __future__ import annotations

import importlib
import types
from typing import Any

import pytest
import tiny_models as tiny
import torch
from parity import Kwargs, get_model, speculate
from transformers.models.gemma3 import modeling_gemma3

import mmspec

OPTIONS: Kwargs = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}


@pytest.mark.every(2)
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize(
    "where", ["rotate_half", "apply_rotary_pos_emb", "LlamaAttention.forward", "another library's"]
)
def test_a_function_replaced_between_calls(where: str, reuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = get_model("llama")
    module = importlib.import_module(type(model).__module__)
    given = tiny.build_inputs(model, 3, 1, num_text_tokens=(30, 30))
    owner, name = (module.LlamaAttention, "forward") if "." in where else (module, where)
    if "another" in where:
        name = "apply_rotary_pos_emb"
    original = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        return tuple(-one for one in found[:1]) + found[1:] if isinstance(found, tuple) else -found

    swapped: Any = lambda q, k, cos, sin, *rest: apply_rotary_pos_emb(q, k, sin, cos)  # type: ignore[name-defined]  # noqa: E731, F821
    from_library = types.FunctionType(swapped.__code__, vars(modeling_gemma3))
    with speculate(model, "hybrid", tree_size=8, reuse_prefix=reuse):
        for number in range(8):
            if number == 3:
                monkeypatch.setattr(owner, name, from_library if "another" in where else changed)
            if number == 6:
                monkeypatch.undo()
            found = model.generate(**given, **OPTIONS)
            with mmspec.disabled(model):
                assert torch.equal(found, model.generate(**given, **OPTIONS)), number
