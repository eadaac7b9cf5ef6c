"""Patched models beside other code: copies, wrappers, threads, compiled parts, train mode, quantised layers."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_models as tiny
import torch
from torch import Tensor, nn

import mmspec
from mmspec.targets.activation_quantisers import quantises_activations
from mmspec.targets.module_scan import scan_modules


@pytest.fixture
def model() -> Iterator[Any]:
    """A model that a test may change."""
    model = tiny.build_model(tiny.ModelSpec("llava", seed=29))
    yield model
    mmspec.unpatch(model)


def answer(model: Any, generate: Any = None, **options: Any) -> Tensor:
    """The output on one prompt."""
    found: Tensor = (generate or model.generate)(**tiny.build_inputs(model, 27, 1), max_new_tokens=8, **options)
    return found


@pytest.mark.parametrize("sample", [False, True])
def test_another_thread_never_gets_a_number_twice(model: Any, sample: bool) -> None:
    stop, theirs = threading.Event(), list[tuple[float, ...]]()

    def draw() -> None:
        while not stop.wait(0.0002):
            theirs.append(tuple(torch.rand(4).tolist()))

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        mmspec.patch(model, drafter="lookup")
        for _ in range(6):
            answer(model, do_sample=sample)
    finally:
        stop.set()
        thread.join()
    assert len(set(theirs)) == len(theirs) > 10
    assert mmspec.stats(model).fallback_calls == 0


def test_a_wrapper_of_others_outlives_unpatch(model: Any) -> None:
    mmspec.patch(model, drafter="lookup")
    inner, calls = model.generate, []

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return inner(*args, **kwargs)

    model.generate = wrapper
    mmspec.unpatch(model)
    assert model.generate is wrapper and not mmspec.is_patched(model)
    answer(model)
    assert calls == [1]


def test_a_model_that_drafts_with_all_outputs_can_be_pickled() -> None:
    model = tiny.build_model(tiny.ModelSpec("llama", seed=29))
    mmspec.patch(model, drafter="arbitrated")
    answer(model)
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(answer(twin), answer(model)) and not mmspec.is_patched(twin)
    mmspec.unpatch(model)
    assert not any(part._forward_hooks for part in model.modules())


def test_removed_options_change_nothing_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny.build_model(tiny.ModelSpec("llama", seed=29))
    want = answer(model)
    mmspec.patch(model, drafter="lookup", learn=True)
    assert torch.equal(answer(model), want) and "the option learn is gone" in caplog.text
    caplog.clear()
    inputs = tiny.build_inputs(model, 0, 1)
    model.generate(**inputs, max_new_tokens=3, mmspec={"learn": False})
    assert "the option learn is gone" in caplog.text
    with pytest.raises(TypeError, match="unexpected keyword argument 'lern'"):
        mmspec.patch(model, lern=True)
    mmspec.unpatch(model)
    mmspec.patch(model, drafter="instant")
    assert torch.equal(answer(model), want) and "the drafter 'instant' is gone; 'arbitrated' drafts" in caplog.text


def test_only_a_compiled_decoder_matters(model: Any) -> None:
    model.model.vision_tower.compile(backend="eager")
    assert not scan_modules(model).compiled
    plain = model.generate(**tiny.build_inputs(model, 27, 1, images=[1]), max_new_tokens=8)
    mmspec.patch(model, drafter="lookup")
    assert torch.equal(plain, model.generate(**tiny.build_inputs(model, 27, 1, images=[1]), max_new_tokens=8))
    assert mmspec.stats(model).fallback_calls == 0
    model.get_decoder().compile(backend="eager")
    assert scan_modules(model).compiled


def test_train_mode_counts_where_the_code_asks_for_it(model: Any) -> None:
    layers = model.get_decoder().layers
    layers.training = layers[0].mlp.training = True  # a container, and a part without dropout
    nn.utils.parametrizations.weight_norm(layers[0].mlp.up_proj)
    assert scan_modules(model).training is None
    layers[1].self_attn.training = True
    assert "self_attn" in (scan_modules(model).training or "")


def test_four_bit_layers_that_round_their_input() -> None:
    kind = type("Linear4bit", (nn.Linear,), {"__module__": "bitsandbytes.nn.modules", "__qualname__": "Linear4bit"})
    assert quantises_activations(kind(2, 2)) and not quantises_activations(kind(2, 2).to("meta"))
    assert quantises_activations(kind(2, 2), torch.float16) and not quantises_activations(kind(2, 2), torch.bfloat16)
    layer = kind(2, 2)
    layer.support_avx512bf16_for_cpu = False
    for device in ("cpu", "meta"):
        for compute, dtype, rounds in (
            (None, torch.float32, False),
            (torch.float32, torch.float32, False),
            (torch.bfloat16, torch.float32, True),
            (torch.bfloat16, torch.bfloat16, False),
            (torch.float16, torch.float32, True),
        ):
            layer.compute_dtype = compute
            assert quantises_activations(layer.to(device), dtype) == rounds, (device, compute, dtype)
    assert not quantises_activations(nn.Linear(2, 2))
