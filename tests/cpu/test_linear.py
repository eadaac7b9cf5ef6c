"""Replaced linear layers: same products by every kernel, never a stale weight, no effect outside the context."""

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
from mmspec.cpu.c_kernel import load_kernel
from mmspec.cpu.decoder import CDecoder
from mmspec.cpu.kernel_timing import TIMED_CALLS, TRIAL_CALLS, TRIAL_EVERY, KernelTiming
from mmspec.cpu.linear import MAX_ROWS, LinearAutotuner, find_linear_layers, is_replaced, use_fast_linears

DECIDED = len(KernelTiming().kernels) * TIMED_CALLS * TRIAL_EVERY
"""Calls after which every shape is decided."""

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


def layer(out: int = 24, bias: bool = True, seed: int = 0) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return nn.Linear(16, out, bias=bias)


def rows(count: int, seed: int = 1) -> Tensor:
    return torch.randn(1, count, 16, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of rows of every product that was not computed by the plain kernel."""
    num_rows: list[int] = []
    original = LinearAutotuner._run_kernel

    def spy(self: LinearAutotuner, kernel: str, layer: nn.Linear, rows: Tensor) -> Tensor:
        if kernel != "plain":
            num_rows.append(rows.shape[-2])
        return original(self, kernel, layer, rows)

    monkeypatch.setattr(LinearAutotuner, "_run_kernel", spy)
    return num_rows


@pytest.fixture
def c_forwards(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each forward was computed by the C decoder, of those for which it was asked."""
    done: list[bool] = []
    original = CDecoder.forward

    def spy(self: CDecoder, *args: Any) -> Any:
        scored = original(self, *args)
        done.append(scored is not None)
        return scored

    monkeypatch.setattr(CDecoder, "forward", spy)
    return done


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("count", [1, 2, 8, 33, MAX_ROWS])
@pytest.mark.parametrize("kernel", [*KernelTiming().kernels, "onednn"])
def test_every_kernel_computes_the_product(
    kernel: str, bias: bool, count: int, monkeypatch: pytest.MonkeyPatch, spied: list[int]
) -> None:
    batch = 1 if count == 1 else 2  # several rows are not contiguous
    linear = layer(bias=bias)
    inputs = rows(batch * count).view(batch, count, 16).transpose(0, 1)
    monkeypatch.setattr(KernelTiming, "next_kernel", lambda self: kernel)
    monkeypatch.setattr(cpu, "MAX_ROWS", 2 * MAX_ROWS)
    with torch.no_grad(), use_fast_linears(LinearAutotuner(), [linear]):
        got = linear(inputs)
    want = functional.linear(inputs, linear.weight, linear.bias)
    assert torch.allclose(got, want, atol=1e-5) and got.stride() == want.stride()
    assert len(spied) == (kernel != "plain")


def test_products_that_stay_plain(spied: list[int]) -> None:
    one, autotuner = layer(), LinearAutotuner()
    autotuner.allow_c = False
    with use_fast_linears(autotuner, [one], deterministic=True):
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


def test_prompts_are_computed_by_onednn_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    one, autotuner = layer(), LinearAutotuner()
    times = iter(range(1000))
    monkeypatch.setattr(cpu.time, "perf_counter", lambda: next(times))
    original, ticks = LinearAutotuner._run_kernel, {"plain": 10, "onednn": 0}

    def run(self: LinearAutotuner, kernel: str, layer: nn.Linear, rows: Tensor) -> Tensor:
        for _ in range(ticks[kernel]):
            next(times)
        return original(self, kernel, layer, rows)

    monkeypatch.setattr(LinearAutotuner, "_run_kernel", run)
    with torch.no_grad(), use_fast_linears(autotuner, [one]):
        for count in range(200, 200 + DECIDED):  # lengths that differ share their measurements
            inputs = rows(count)
            assert torch.allclose(one(inputs), functional.linear(inputs, one.weight, one.bias), atol=1e-5)
    assert {shape: timing.best for shape, timing in autotuner.timings.items()} == {
        (24, 16, 256): "onednn",
        (24, 16, 512): "onednn",
        **({(24, 16, 1024): "onednn"} if DECIDED > 312 else {}),
    }


def test_a_torch_without_onednn_computes_prompts_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Tensor:
        raise NotImplementedError

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", refuse)
    one, autotuner, inputs = layer(), LinearAutotuner(), rows(200)
    with torch.no_grad(), use_fast_linears(autotuner, [one]):
        results = [one(inputs) for _ in range(3)]
    assert all(torch.equal(result, functional.linear(inputs, one.weight, one.bias)) for result in results)
    assert not autotuner.has_onednn


def test_forwards_are_restored_and_other_threads_are_not_affected(spied: list[int]) -> None:
    one, results = layer(), list[Any]()
    with torch.no_grad(), use_fast_linears(LinearAutotuner(), [one], deterministic=True):
        assert is_replaced(one)

        def other() -> None:
            with torch.no_grad():
                results.append(one(rows(4)))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert spied == [] and len(results) == 1
        with use_fast_linears(LinearAutotuner(), [one], deterministic=True):
            pass
        assert is_replaced(one), "an inner context must not restore the layer for the outer one"
        twin = copy.deepcopy(one)
        twin.weight.zero_()
        assert torch.allclose(twin(rows(4)), twin.bias.expand(1, 4, -1)), "a copy computes with its own weight"
        with pytest.raises(ValueError, match="on purpose"), use_fast_linears(LinearAutotuner(), [one]):
            raise ValueError("on purpose")
    assert not is_replaced(one) and "forward" not in one.__dict__


def test_eligible_layers() -> None:
    class Own(nn.Linear):
        pass

    hooked, double = layer(), layer().double()
    hooked.__dict__["forward"] = lambda rows: rows
    model = nn.Sequential(layer(), Own(16, 4), double, hooked, nn.Sequential(layer(seed=2)))
    assert find_linear_layers([model]) == [model[0], model[4][0]]
    assert find_linear_layers([model, model]) == find_linear_layers([model])
    shared = nn.ModuleList([model[0]])
    shared.append(model[0])
    assert find_linear_layers([shared]) == [model[0]]
    narrow = [layer().bfloat16(), layer().half()]
    assert find_linear_layers([nn.Sequential(*narrow)]) == narrow


@pytest.mark.parametrize("fast", KernelTiming().kernels)
def test_shapes_are_decided_by_timed_calls(fast: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now, used, original = [0.0], list[str](), LinearAutotuner._run_kernel

    def timed(self: LinearAutotuner, kernel: str, layer: nn.Linear, inputs: Tensor) -> Tensor:
        now[0] += 1.0 if kernel == fast else 9.0
        used.append(kernel)
        return original(self, kernel, layer, inputs)

    monkeypatch.setattr(LinearAutotuner, "_run_kernel", timed)
    monkeypatch.setattr(cpu.time, "perf_counter", lambda: now[0])
    one, autotuner = layer(), LinearAutotuner()
    with torch.no_grad(), use_fast_linears(autotuner, [one]):
        for _ in range(DECIDED):
            one(rows(4))
        timing = autotuner.timings[24, 16, 4]
        assert timing.best == fast and used[-1] == fast
        assert one(rows(1)).shape == (1, 1, 24) and (24, 16, 1) in autotuner.timings
    slow = [kernel for kernel in timing.kernels if kernel not in (fast, "c")]
    assert {len(timing.seconds[kernel]) for kernel in slow} == {TRIAL_CALLS}, "clearly slower, soon dropped"
    assert len(timing.seconds[fast]) >= TIMED_CALLS and set(used[DECIDED // 2 : -1]) == {fast}


def test_the_kernel_with_the_lowest_median_is_chosen() -> None:
    timing = KernelTiming()
    for number in range(TIMED_CALLS):
        timing.add("plain", 2.0)
        timing.add("transposed", 2.5 if number == 0 else 1.5)  # an outlier
        timing.add("c", 2.1)
    assert timing.best == "transposed"


def test_trials_are_spread_over_many_calls() -> None:
    """So that the first rounds of a tree size are not slow."""
    timing, seconds, used = KernelTiming(), {"plain": 1.2, "transposed": 1.1, "c": 1.0}, list[str]()
    while timing.best is None:
        used.append(timing.next_kernel())
        timing.add(used[-1], seconds[used[-1]])
    assert timing.best == "c" and len(used) <= DECIDED
    others = [number for number, kernel in enumerate(used) if kernel != "c"]
    assert others[0] == TRIAL_EVERY and all(number % TRIAL_EVERY == 0 for number in others)
    assert sorted(used[number] for number in others) == sorted(TIMED_CALLS * ["plain", "transposed"])


@pytest.mark.parametrize("backend", ["auto", "c", "torch"])
def test_generate_is_the_same_with_every_setting(backend: str, spied: list[int], c_forwards: list[bool]) -> None:
    model, processor = random_model("tiny")
    maker = Captioner(model, processor)
    inputs = maker.build_inputs([render_scene(generate_scene(i)) for i in range(2)], ["a", "what is it"])
    for options in ({"do_sample": False}, {"do_sample": True}):
        torch.manual_seed(0)
        plain = model.generate(**inputs, max_new_tokens=20, **options)
        mmspec.patch(model, "hybrid", tree_size=8, backend=backend)
        torch.manual_seed(0)
        assert torch.equal(model.generate(**inputs, max_new_tokens=20, **options), plain)
        mmspec.unpatch(model)
    is_c = backend != "torch" and load_kernel() is not None
    prompt = [count for count in spied if count > 8]
    num_heads = 2  # of a prompt only the last position is in the output layer, once per call
    assert bool(prompt) == (backend != "torch")
    assert (len(spied) - len(prompt) > num_heads) == (backend != "torch" and not is_c)
    assert all(c_forwards) and bool(c_forwards) == is_c
    assert not any("forward" in module.__dict__ for module in model.modules())
    spied.clear()
    model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert spied == []
