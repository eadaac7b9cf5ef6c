"""Linear layers in other ways: the same products, never a stale weight, nothing left behind, nobody else affected."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import mmspec
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.random_models import random_model
from mmspec.app.scenes.render import render_scene
from mmspec.app.scenes.world import generate_scene
from mmspec.cpu import linear as cpu
from mmspec.cpu.linear import (
    MAX_ROWS,
    TIMED_CALLS,
    KernelTiming,
    LinearAutotuner,
    find_linear_layers,
    is_replaced,
    use_fast_linears,
)

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


def layer(out: int = 24, bias: bool = True, seed: int = 0) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return nn.Linear(16, out, bias=bias)


def rows(count: int, seed: int = 1) -> Tensor:
    return torch.randn(1, count, 16, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every product that was not computed in the plain way."""
    seen: list[int] = []
    original = LinearAutotuner._in_way

    def spy(self: LinearAutotuner, way: str, layer: nn.Linear, rows: Tensor) -> Tensor:
        if way != "plain":
            seen.append(rows.shape[-2])
        return original(self, way, layer, rows)

    monkeypatch.setattr(LinearAutotuner, "_in_way", spy)
    return seen


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever may be copied is computed from the copy."""
    monkeypatch.setattr(KernelTiming, "next", lambda self: self.ways[-1])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("count", [1, 2, 8, 33, MAX_ROWS])
@pytest.mark.parametrize("way", KernelTiming().kernels)
def test_all_ways_lead_to_the_product(
    way: str, bias: bool, count: int, monkeypatch: pytest.MonkeyPatch, spied: list[int]
) -> None:
    many = 1 if count == 1 else 2  # one row, or several that are no plain block of memory
    one, given = layer(bias=bias), rows(many * count).view(many, count, 16).transpose(0, 1)
    monkeypatch.setattr(KernelTiming, "next", lambda self: way)
    monkeypatch.setattr(cpu, "MAX_ROWS", 2 * MAX_ROWS)
    with torch.no_grad(), use_fast_linears(LinearAutotuner(), [one], copies=True):
        got = one(given)
    want = functional.linear(given, one.weight, one.bias)
    assert torch.allclose(got, want, atol=1e-5) and got.stride() == want.stride()
    assert len(spied) == (way != "plain")


@pytest.mark.parametrize("copies", [True, False])
def test_copies_are_made_only_if_they_may_be(copies: bool) -> None:
    one, packs = layer(), LinearAutotuner()
    with torch.no_grad(), use_fast_linears(packs, [one], copies=copies):
        for _ in range(3 * TIMED_CALLS):
            one(rows(4))
    assert bool(packs.packed_weights) is copies and packs.timings[24, 16, 4].best is not None
    assert ("packed" in packs.timings[24, 16, 4].kernels) is copies


def test_which_products_stay_plain(spied: list[int]) -> None:
    one = layer()
    with use_fast_linears(LinearAutotuner(), [one], fixed=True):
        with torch.no_grad():
            one(rows(1))
            one(rows(MAX_ROWS + 1))
            one.double()(rows(4).double())
            one.float()
            with torch.autocast("cpu", torch.bfloat16):
                assert one(rows(4)).dtype == torch.bfloat16
        one(rows(4)).sum().backward()
        assert one.weight.grad is not None
    assert spied == []


def test_an_edit_in_place_is_noticed(spied: list[int], copied: None) -> None:
    one, packs = layer(), LinearAutotuner()
    with torch.no_grad(), use_fast_linears(packs, [one], copies=True):
        first = one(rows(4))
        copy_ = packs.packed_weights[one].weight
        assert torch.equal(one(rows(4)), first) and packs.packed_weights[one].weight is copy_, "packed once"
        one.weight.mul_(2)  # as a LoRA merge does
        assert torch.allclose(one(rows(4)) - one.bias, 2 * (first - one.bias), atol=1e-5)
        one.weight.data = one.weight.data.clone().zero_()
        assert torch.allclose(one(rows(4)), one.bias.expand(1, 4, -1))
        one.weight = nn.Parameter(torch.ones(24, 16))
        assert torch.allclose(one(rows(4))[0, :, 0] - one.bias[0], rows(4)[0].sum(-1), atol=1e-5)
    assert spied == [4] * 5 and packs.nbytes == 24 * 16 * 4


@pytest.mark.parametrize(
    "edit",
    [
        lambda weight: weight.data.mul_(2),  # as peft merges: neither address nor version changes
        lambda weight: weight.data.copy_(weight.data.flip(0)),
        lambda weight: weight.data.copy_(weight.data.flip(1)),
    ],
)
def test_an_edit_that_torch_does_not_count_is_noticed_by_the_next_call(edit: Any, copied: None) -> None:
    one, packs = layer(), LinearAutotuner()
    for _ in range(2):
        with torch.no_grad(), use_fast_linears(packs, [one], copies=True):
            got = one(rows(4))
        assert packs.packed_weights and torch.allclose(got, functional.linear(rows(4), one.weight, one.bias), atol=1e-5)
        version = one.weight._version
        edit(one.weight)
        assert one.weight._version == version


def test_nothing_is_left_behind_and_nobody_else_is_served(spied: list[int]) -> None:
    one, told = layer(), list[Any]()
    with torch.no_grad(), use_fast_linears(LinearAutotuner(), [one], fixed=True):
        assert is_replaced(one)

        def other() -> None:
            with torch.no_grad():
                told.append(one(rows(4)))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert spied == [] and len(told) == 1
        with use_fast_linears(LinearAutotuner(), [one], fixed=True):
            pass
        assert is_replaced(one), "a call inside must not take the layer away from the call around it"
        twin = copy.deepcopy(one)
        twin.weight.zero_()
        assert torch.allclose(twin(rows(4)), twin.bias.expand(1, 4, -1)), "a copy computes with its own weight"
        with pytest.raises(ValueError, match="on purpose"), use_fast_linears(LinearAutotuner(), [one]):
            raise ValueError("on purpose")
    assert not is_replaced(one) and "forward" not in one.__dict__


def test_which_layers_are_taken() -> None:
    class Own(nn.Linear):
        pass

    hooked, half = layer(), layer().bfloat16()
    hooked.__dict__["forward"] = lambda rows: rows
    model = nn.Sequential(layer(), Own(16, 4), half, hooked, nn.Sequential(layer(seed=2)))
    assert find_linear_layers([model]) == [model[0], model[4][0]]
    assert find_linear_layers([model, model]) == find_linear_layers([model])
    shared = nn.ModuleList([model[0]])
    shared.append(model[0])
    assert find_linear_layers([shared]) == [model[0]]


@pytest.mark.parametrize("fast", KernelTiming().kernels)
def test_shapes_are_decided_by_real_calls(fast: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now, gone, original = [0.0], list[str](), LinearAutotuner._in_way

    def timed(self: LinearAutotuner, way: str, layer: nn.Linear, given: Tensor) -> Tensor:
        now[0] += 1.0 if way == fast else 9.0
        gone.append(way)
        return original(self, way, layer, given)

    monkeypatch.setattr(LinearAutotuner, "_in_way", timed)
    monkeypatch.setattr(cpu.time, "perf_counter", lambda: now[0])
    one, packs = layer(), LinearAutotuner()
    with torch.no_grad(), use_fast_linears(packs, [one], copies=True):
        for _ in range(3 * TIMED_CALLS + 5):
            one(rows(4))
        assert one(rows(1)).shape == (1, 1, 24) and (24, 16, 1) in packs.timings
    assert sorted(gone[: 3 * TIMED_CALLS]) == sorted(TIMED_CALLS * KernelTiming().kernels) and gone[
        3 * TIMED_CALLS : -1
    ] == 5 * [fast]


def test_trials_go_by_the_median() -> None:
    trial = KernelTiming()
    for number in range(TIMED_CALLS):
        trial.add("plain", 2.0)
        trial.add("turned", 99.0 if number == 0 else 1.0)  # an outlier
        trial.add("packed", 3.0)
    assert trial.best == "turned"


def test_a_torch_that_cannot_pack_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

    monkeypatch.setattr(torch.ops, "mkldnn", Nothing())
    one, packs = layer(), LinearAutotuner()
    with torch.no_grad(), use_fast_linears(packs, [one], copies=True):
        for _ in range(3 * TIMED_CALLS):
            assert torch.allclose(one(rows(4)), functional.linear(rows(4), one.weight, one.bias), atol=1e-6)
    assert packs.cannot_pack and not packs.packed_weights
    assert packs.timings[24, 16, 4].kernels == ("plain", "turned") and packs.timings[24, 16, 4].best is not None


@pytest.mark.parametrize("choice", [None, True, False])
def test_generate_is_the_same_in_other_ways(choice: bool | None, spied: list[int]) -> None:
    model, processor = random_model("tiny")
    maker = Captioner(model, processor)
    inputs = maker.inputs([render_scene(generate_scene(i)) for i in range(2)], ["a", "what is it"])
    for options in ({"do_sample": False}, {"do_sample": True}):
        torch.manual_seed(0)
        plain = model.generate(**inputs, max_new_tokens=20, **options)
        mmspec.patch(model, "fused", tree_size=8, cpu_pack_weights=choice)
        torch.manual_seed(0)
        assert torch.equal(model.generate(**inputs, max_new_tokens=20, **options), plain)
        mmspec.unpatch(model)
    assert bool(spied) == (choice is not False)
    assert not any("forward" in module.__dict__ for module in model.modules())
    spied.clear()
    model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert spied == []


def test_a_copy_that_was_trained_on_is_not_stale() -> None:
    model, processor = random_model("tiny")
    inputs = Captioner(model, processor).inputs([render_scene(generate_scene(1))], ["a"])
    mmspec.patch(model, "fused", tree_size=8, cpu_pack_weights=True)
    model.generate(**inputs, max_new_tokens=6, do_sample=False)
    with torch.no_grad():
        for weight in model.model.language_model.parameters():
            weight.mul_(1.07)
    changed = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    with mmspec.disabled():
        assert torch.equal(model.generate(**inputs, max_new_tokens=12, do_sample=False), changed)


@pytest.mark.parametrize("faster", [True, False])
def test_bfloat16_is_left_alone_where_a_cpu_is_slower_in_it(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu.bf16_is_faster(torch.device("cuda")) and cpu.bf16_is_faster(torch.device("mps"))
    there = torch.device("cpu")
    assert cpu._seconds(torch.float32) > 0
    monkeypatch.setattr(cpu, "_seconds", lambda dtype: 1.0 if (dtype == torch.bfloat16) == faster else 2.0)
    native = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert cpu.bf16_is_faster(there) == (native and faster)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not cpu.bf16_is_faster(there), "a torch without oneDNN has no products of bfloat16"
