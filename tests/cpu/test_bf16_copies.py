"""Bfloat16 copies of float32 weights: the same bits, used from the second forward on, never stale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_decoder import SHAPES, Model, make_inputs, make_model
from torch import Tensor

from mmspec.cpu import bf16_copies as copies_module
from mmspec.cpu.bf16_copies import CheckedWeights, WeightCopies
from mmspec.cpu.c_kernel import CKernel, load_kernel
from mmspec.cpu.decoder import CDecoder

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
pytestmark = pytest.mark.skipif(load_kernel() is None, reason="no compiler or another processor")


@pytest.fixture
def kernel() -> CKernel:
    found = load_kernel()
    assert found is not None
    return found


def rounded_model() -> Model:
    """Weights in float32 whose numbers are bfloat16."""
    model = make_model(SHAPES["odd sizes"], extras=True)
    layers = [
        replace(one, **{name: getattr(one, name).bfloat16().float() for name in MATRICES}) for one in model.layers
    ]
    return replace(model, layers=layers, ends=replace(model.ends, lm_head=model.ends.lm_head.bfloat16().float()))


def decoder_of(model: Model, kernel: CKernel, copies: WeightCopies | None) -> CDecoder:
    plain = model.decoder(kernel)
    return CDecoder(kernel, model.shape, model.layers, model.ends, plain._rotaries, copies)


def logits(decoder: CDecoder, model: Model, seed: int = 1) -> Tensor:
    scored = decoder.forward(make_inputs(model, [9, 4], 5, seed=seed))
    assert scored is not None
    return scored[0]


def checked(decoder: CDecoder) -> CheckedWeights:
    assert decoder._checked is not None
    return decoder._checked


def test_copies_give_the_same_bits_from_the_second_forward_on(kernel: CKernel) -> None:
    model, copies = rounded_model(), WeightCopies()
    plain = decoder_of(model, kernel, None)
    for _ in range(2):  # calls
        decoder = decoder_of(model, kernel, copies)
        for number in range(3):
            assert checked(decoder).uses_copies == (number > 0)
            assert torch.equal(logits(decoder, model, number), logits(plain, model, number))
    weights = [getattr(layer, name) for layer in model.layers for name in MATRICES] + [model.ends.lm_head]
    assert copies.nbytes == sum(weight.nbytes for weight in weights) // 2
    part, plain_part = decoder.restrict([1]), plain.restrict([1])
    for number in range(2):
        inputs = [
            replace(one, caches=one.caches[1:]) for one in (make_inputs(model, [9], 3), make_inputs(model, [9], 3))
        ]
        got, want = part.forward(inputs[0]), plain_part.forward(inputs[1])
        assert got is not None and want is not None and torch.equal(got[0], want[0]), number
    assert checked(part).uses_copies
    del decoder, plain, part, plain_part, weights, model, inputs
    assert copies.nbytes == 0, "a copy lives as long as its weight"


EDITS: dict[str, Callable[[Tensor], Any]] = {
    "a factor": lambda weight: weight.data.mul_(2),
    "one number": lambda weight: weight.data[-1, -1].neg_(),
    "the lowest bit": lambda weight: weight.data.view(torch.int32)[3, 5].bitwise_xor_(1),
    "two rows that change places": lambda weight: weight.data.copy_(weight.data[[1, 0, *range(2, len(weight))]]),
    "two columns that change places": lambda weight: weight.data.copy_(
        weight.data[:, [*range(8), 16, *range(9, 16), 8, *range(17, weight.shape[1])]]
    ),
    "a new version": lambda weight: weight.mul_(2),
}


@pytest.mark.parametrize("name", [*MATRICES, "lm_head"])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_between_calls_is_seen(edit: str, name: str, kernel: CKernel) -> None:
    model, copies = rounded_model(), WeightCopies()
    before = decoder_of(model, kernel, copies)
    for _ in range(2):
        logits(before, model)
    assert checked(before).uses_copies
    weight = getattr(model.ends if name == "lm_head" else model.layers[1], name)
    EDITS[edit](weight)
    plain = decoder_of(model, kernel, None)
    decoder = decoder_of(model, kernel, copies)
    for number in range(3):
        assert torch.equal(logits(decoder, model, number), logits(plain, model, number)), number
    assert checked(decoder).uses_copies == (edit == "a new version")
    again = decoder_of(model, kernel, copies)
    for number in range(2):
        assert torch.equal(logits(again, model, number), logits(plain, model, number)), number
    assert checked(again).uses_copies, "the weights are copied anew"


def test_an_edit_within_a_call_is_seen_by_its_version(kernel: CKernel) -> None:
    model, copies = rounded_model(), WeightCopies()
    decoder = decoder_of(model, kernel, copies)
    logits(decoder, model)
    model.layers[0].down.mul_(2)
    assert torch.equal(logits(decoder, model), logits(decoder_of(model, kernel, None), model))
    assert not checked(decoder).uses_copies


def test_weights_without_copies(kernel: CKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other numbers than of bfloat16, of a type that has none, and where memory is short."""
    copies = WeightCopies()
    assert decoder_of(make_model(SHAPES["odd sizes"]), kernel, copies)._checked is None and copies.nbytes == 0
    with torch.inference_mode():
        model = rounded_model()
    assert decoder_of(model, kernel, copies)._checked is None
    monkeypatch.setattr(copies_module, "free_bytes", lambda: 1000)
    assert decoder_of(rounded_model(), kernel, copies)._checked is None and copies.nbytes == 0
    monkeypatch.undo()
    assert 1 << 20 < copies_module.free_bytes() < 1 << 50
    special = torch.tensor([[0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40]]).bfloat16().float()
    copy, _ = kernel.copy(special)
    assert copy is not None and torch.equal(copy.view(torch.int16), special.bfloat16().view(torch.int16))


def test_weights_are_read_where_they_lay(kernel: CKernel) -> None:
    """A thread that gives a weight other memory meanwhile changes nothing, and nothing is read that was freed."""
    model = make_model(SHAPES["odd sizes"], extras=True)  # numbers that are no bfloat16
    decoder, other = decoder_of(model, kernel, WeightCopies()), decoder_of(model, kernel, None)
    expected = logits(decoder, model)
    norm, matrix = model.layers[0].input_norm, model.layers[0].o
    assert isinstance(norm, Tensor) and isinstance(matrix, Tensor)
    for weight in (norm, matrix):
        weight.data = torch.zeros_like(weight)
    junk = [torch.ones_like(matrix) for _ in range(8)]  # where the old memory was, if it was freed
    assert torch.equal(logits(decoder, model), expected) and torch.equal(logits(other, model), expected)
    assert junk
