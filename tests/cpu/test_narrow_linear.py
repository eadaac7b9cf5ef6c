"""Linear layers in half precision: one kernel for all numbers of few rows, and what it is used for."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from spies import spy_on
from torch import Tensor, nn
from torch.nn import functional

import mmspec
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.random_models import random_model
from mmspec.app.scenes.render import render_scene
from mmspec.app.scenes.world import generate_scene
from mmspec.cpu import linear
from mmspec.cpu.c_kernel import MAX_C_ROWS, CKernel, load_kernel
from mmspec.cpu.linear import LinearAutotuner, use_fast_linears
from mmspec.economy.kernels import KernelChoices
from mmspec.targets.hf import HFTarget

pytestmark = pytest.mark.skipif(load_kernel() is None, reason="no compiler or another processor")


def make_layer(dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(100, 37).to(dtype)


def make_rows(count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(1, count, 100, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, int]]:
    """Type and number of rows of each product of the C kernel."""
    return spy_on(
        monkeypatch, CKernel, "linear", lambda *args: (args[-1].dtype, args[-1].numel() // args[-1].shape[-1])
    )


def choose(monkeypatch: pytest.MonkeyPatch, native: bool) -> list[str]:
    """Let every shape have this answer; the list gets an entry for each that is timed."""
    timed: list[str] = []

    def choose(self: KernelChoices, key: Any, *_: Any) -> str:
        timed.append("shape")
        self._used[key] = "c" if native else "plain"
        return self._used[key]

    monkeypatch.setattr(KernelChoices, "choose", choose)
    monkeypatch.setattr(linear, "KERNEL_CHOICES", KernelChoices())
    return timed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_does_not_depend_on_the_number_of_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    timed, layer, rows = choose(monkeypatch, True), make_layer(dtype), make_rows(MAX_C_ROWS, dtype)
    prompt = make_rows(300, dtype)
    prompt[:, 200 : 200 + MAX_C_ROWS] = rows
    with torch.inference_mode(), use_fast_linears(LinearAutotuner(), [layer]):
        alone = torch.cat([layer(rows[:, i : i + 1]) for i in range(MAX_C_ROWS)], 1)
        for count in range(1, MAX_C_ROWS + 1):
            assert torch.equal(layer(rows[:, :count]), alone[:, :count]), count
        apart = torch.stack([rows, rows], 2)[:, :, 0]  # not contiguous
        assert torch.equal(layer(apart), alone) and alone.dtype is dtype
        assert torch.equal(layer(prompt)[:, 200 : 200 + MAX_C_ROWS], alone)
    wide = functional.linear(rows.double(), layer.weight.double(), layer.bias.double())
    assert (alone == wide.to(dtype)).float().mean() > 0.99, "sums in float32, rounded once"
    assert len(timed) == 2, "few rows and many"


def test_torch_computes_what_the_kernel_does_not(
    monkeypatch: pytest.MonkeyPatch, products: list[tuple[torch.dtype, int]]
) -> None:
    choose(monkeypatch, True)
    layer, autotuner = make_layer(torch.bfloat16), LinearAutotuner()
    rows, many = make_rows(4, torch.bfloat16), make_rows(MAX_C_ROWS + 1, torch.bfloat16)
    autotuner.choices._used[linear.choice_key(layer.weight, linear.MANY_ROWS)] = "plain"
    with use_fast_linears(autotuner, [layer]):
        with torch.no_grad():
            assert torch.equal(layer(many), functional.linear(many, layer.weight, layer.bias)) and not products
            with torch.autocast("cpu", torch.float16):
                assert layer(rows).dtype == torch.float16
            with pytest.raises(RuntimeError):
                layer(rows.float())  # as without the context
        layer(rows).sum().backward()
        assert layer.weight.grad is not None and not products
        with torch.no_grad():
            layer.weight.data.mul_(2)  # in place, without a new version
            assert torch.allclose(
                layer(rows).float(), functional.linear(rows, layer.weight, layer.bias).float(), rtol=0.02
            )
            layer.float()
            assert layer(rows.float()).dtype == torch.float32
    assert products[0] == (torch.bfloat16, 4) and (torch.bfloat16, 4) not in products[1:]
    products.clear()
    monkeypatch.setattr("mmspec.cpu.linear.load_kernel", lambda: None)
    layer.bfloat16()
    with torch.no_grad(), use_fast_linears(autotuner, [layer]):
        assert torch.equal(layer(rows), functional.linear(rows, layer.weight, layer.bias)) and not products


def test_torch_gets_rows_that_lie_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tokens of several prompts do not: torch would compute them 90 times slower."""
    choose(monkeypatch, False)
    seen = list[bool]()
    monkeypatch.setattr(
        linear,
        "functional",
        SimpleNamespace(linear=lambda rows, *of: seen.append(rows.is_contiguous()) or functional.linear(rows, *of)),
    )
    layer, prompts = make_layer(torch.bfloat16), make_rows(12, torch.bfloat16).view(3, 4, -1)
    with torch.inference_mode(), use_fast_linears(LinearAutotuner(), [layer]):
        assert torch.equal(
            layer(prompts[:, -1:]), functional.linear(prompts[:, -1:].contiguous(), layer.weight, layer.bias)
        )
    assert seen and all(seen)


@pytest.mark.parametrize("slow", ["torch", "kernel", "torch emulates"])
def test_layers_are_decided_by_timed_runs(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first product, for all numbers of few rows; `deterministic` needs no timing."""
    ticks = {"torch": (2, 1), "kernel": (1, 2), "torch emulates": (20, 1)}[slow]
    now, products = [0.0], list[tuple[str, int]]()
    monkeypatch.setattr(linear, "functional", FakeFunctional(now, products, 1e-6 * ticks[0]))
    monkeypatch.setattr(CKernel, "linear", lambda self, weight, bias, rows: run("c", rows, weight))

    def run(name: str, rows: Tensor, weight: Tensor) -> Tensor:
        now[0] += 1e-6 * ticks[1]
        products.append((name, rows.numel() // rows.shape[-1]))
        return functional.linear(rows, weight)

    layer, autotuner = make_layer(torch.bfloat16), LinearAutotuner(KernelChoices(lambda: now[0]))
    rows, prompt = make_rows(4, torch.bfloat16), make_rows(40, torch.bfloat16)
    with torch.no_grad(), use_fast_linears(autotuner, [layer], deterministic=True):
        layer(rows)
    assert not autotuner.choices.known and products == [("c", 4)]
    with torch.no_grad(), use_fast_linears(autotuner, [layer]):
        layer(rows)
        layer(prompt)
        products.clear()
        for inputs in (rows, rows[:, :1], prompt):
            layer(inputs)
    winner = "plain" if slow == "kernel" else "c"
    assert products == [(winner, 4), (winner, 1), (winner, 40)]
    assert list(autotuner.choices.known.values()) == [winner] * 2


class FakeFunctional:
    """`torch.nn.functional` whose linear takes a time of its own."""

    def __init__(self, now: list[float], products: list[tuple[str, int]], seconds: float) -> None:
        self.now, self.products, self.seconds = now, products, seconds

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        self.now[0] += self.seconds
        self.products.append(("plain", rows.numel() // rows.shape[-1]))
        return functional.linear(rows, weight, bias)


def test_threads_find_the_same_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, started = iter(["c", "plain", "plain", "plain"]), threading.Barrier(3)
    monkeypatch.setattr("mmspec.economy.kernels.fastest", lambda *_: next(answers))
    layer, autotuner, results = make_layer(torch.bfloat16), LinearAutotuner(KernelChoices()), list[Tensor]()
    autotuner.kernel = load_kernel()

    def call() -> None:
        started.wait()
        with torch.no_grad():
            rows = make_rows(3, torch.bfloat16)
            results.append(autotuner.linear(layer, rows))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[0], other) for other in results)
    assert list(autotuner.choices.known.values()) == ["c"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_generate_in_half_precision_uses_the_kernel(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, products: list[tuple[torch.dtype, int]]
) -> None:
    choose(monkeypatch, True)
    monkeypatch.setattr(HFTarget, "use_c", lambda *args: None)  # the model's own forward
    monkeypatch.setattr("mmspec.backend.SMALLEST_REPLACED", 1)
    model, processor = random_model("tiny")
    model.to(dtype)
    maker = Captioner(model, processor)
    inputs = maker.build_inputs([render_scene(generate_scene(1))], ["a " * 40])
    outputs = []
    for drafter in ("none", "hybrid"):
        mmspec.patch(model, drafter, tree_size=8)
        products.clear()
        outputs.append(model.generate(**inputs, max_new_tokens=12, do_sample=False))
        mmspec.unpatch(model)
        assert len([count for kind, count in products if kind is dtype and count <= 8]) > 12
        assert any(count > MAX_C_ROWS for kind, count in products if kind is dtype), "the prompt, and the vision tower"
    assert outputs[0].shape[1] == inputs["input_ids"].shape[1] + 12
    assert not any("forward" in module.__dict__ for module in model.modules())
