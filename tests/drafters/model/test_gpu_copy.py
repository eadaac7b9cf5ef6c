"""The copy that a GPU would have: torch's products of few bits, here on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models as tiny
import torch

import mmspec
from mmspec.drafters.model.self_drafter import QuantizedDrafter
from mmspec.targets import quantised_copy
from mmspec.targets.products import GPU_COPIES, TorchProducts, products_for

CPU = torch.device("cpu")
PRODUCTS = TorchProducts(CPU)


@pytest.mark.parametrize(("bits", "bound"), [(4, 0.12), (8, 0.012)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_those_of_rounded_weights(bits: int, bound: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 256, generator=generator).to(dtype)
    rows, bias = torch.randn(5, 256, generator=generator).to(dtype), torch.randn(48, generator=generator).to(dtype)
    packed = PRODUCTS.quantise(weight, bits, None)
    found = PRODUCTS.linear(packed, bias, rows)
    expected = torch.nn.functional.linear(rows.float(), weight.float(), bias.float())
    assert found is not None and found.dtype == dtype and packed.shape == (48, 256)
    assert (found.float() - expected).std() / expected.std() < bound
    assert packed.nbytes < weight.numel() * (bits + 2) / 8


def test_errors_of_large_inputs_count_for_more() -> None:
    generator = torch.Generator().manual_seed(1)
    weight, rows = torch.randn(64, 128, generator=generator), torch.randn(200, 128, generator=generator)
    rows *= torch.rand(128, generator=generator) ** 4 * 10
    expected = rows @ weight.t()
    errors = []
    for costs in (None, rows.square().mean(0)):
        found = PRODUCTS.linear(PRODUCTS.quantise(weight, 4, costs), None, rows)
        assert found is not None
        errors.append(float((found - expected).square().mean()))
    assert errors[1] < errors[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{"do_sample": False}, {"do_sample": True, "temperature": 0.7}], ids=["greedy", "sampled"]
)
def test_it_drafts_and_changes_nothing(
    dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised_copy, "products_for", lambda device: PRODUCTS)
    spec = tiny.ModelSpec("llava", layers=4, calm=True, hidden=128)
    model = tiny.build_model(spec).to(dtype)
    inputs = tiny.build_inputs(model, 4, 2)
    inputs = {name: one.to(dtype) if one.is_floating_point() else one for name, one in inputs.items()}
    results = []
    for drafter in ("none", QuantizedDrafter(bits=4)):
        mmspec.patch(model, drafter, backend="torch", tree_size=4)
        torch.manual_seed(0)
        results.append(model.generate(**inputs, max_new_tokens=20, **options))
        stats = mmspec.stats(model)
        mmspec.unpatch(model)
    assert stats.num_accepted_tokens > 0
    if dtype == torch.float32:  # in half precision attention in the model's own forward depends on the tree
        assert torch.equal(*results)


def test_it_is_off_on_a_gpu() -> None:
    assert not GPU_COPIES
    with pytest.raises(ValueError, match="runs on a CPU"):
        products_for(torch.device("cuda", 0))
