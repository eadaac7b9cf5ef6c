"""Replaced linear layers: same products by every kernel, never a stale weight, no effect outside the context."""

from __future__ import annotations

import copy
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
from mmspec.backend import use_prompt_kernels
from mmspec.cpu import linear as cpu
from mmspec.cpu.c_kernel import load_kernel
from mmspec.cpu.decoder import CDecoder
from mmspec.cpu.linear import MAX_ROWS, LinearAutotuner, find_linear_layers, is_replaced, use_fast_linears
from mmspec.economy.kernels import IN_C, PLAIN, TRANSPOSED, KernelChoices

KERNELS = (PLAIN, TRANSPOSED, IN_C)

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

    def spy(self: LinearAutotuner, kernel: str, weight: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
        if kernel != "plain":
            num_rows.append(rows.shape[-2])
        return original(self, kernel, weight, bias, rows)

    monkeypatch.setattr(LinearAutotuner, "_run_kernel", spy)
    return num_rows


@pytest.fixture
def c_forwards(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each forward was computed by the C decoder, of those for which it was asked."""
    return spy_on(monkeypatch, CDecoder, "forward", lambda scored, *_: scored is not None)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("count", [1, 2, 8, 33, MAX_ROWS])
@pytest.mark.parametrize("kernel", [*KERNELS, "onednn"])
def test_every_kernel_computes_the_product(
    kernel: str, bias: bool, count: int, monkeypatch: pytest.MonkeyPatch, spied: list[int]
) -> None:
    batch = 1 if count == 1 else 2  # several rows are not contiguous
    linear = layer(bias=bias)
    inputs = rows(batch * count).view(batch, count, 16).transpose(0, 1)
    monkeypatch.setattr(KernelChoices, "choose", lambda *_: kernel)
    monkeypatch.setattr(LinearAutotuner, "_candidates", lambda *_: (kernel,))
    monkeypatch.setattr(cpu, "MAX_ROWS", 2 * MAX_ROWS)
    with torch.no_grad(), use_fast_linears(LinearAutotuner(KernelChoices()), [linear]):
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
    now, used = slow_kernels(monkeypatch, fast="onednn")
    one, autotuner = layer(), LinearAutotuner(KernelChoices(lambda: now[0]))
    with torch.no_grad(), use_fast_linears(autotuner, [one]):
        for count in (200, 400, 1000):  # all lengths share their choice
            inputs = rows(count)
            assert torch.allclose(one(inputs), functional.linear(inputs, one.weight, one.bias), atol=1e-5)
            assert used[-1] == "onednn"
    assert list(autotuner.choices.known.values()) == ["onednn"]


def test_a_torch_without_onednn_computes_prompts_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Tensor:
        raise NotImplementedError

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", refuse)
    one, autotuner, inputs = layer(), LinearAutotuner(KernelChoices()), rows(200)
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


@pytest.mark.parametrize("fast", KERNELS)
def test_products_are_timed_before_the_first(fast: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now, used = slow_kernels(monkeypatch, fast)
    one, autotuner = layer(), LinearAutotuner(KernelChoices(lambda: now[0]))
    with torch.no_grad(), use_fast_linears(autotuner, [one]):
        one(rows(4))
        num_timed = len(used)
        for count in (4, 2, 8):
            one(rows(count))
    assert used[num_timed - 1 :] == [fast] * 4, "other products of so many rows are not timed"
    assert list(autotuner.choices.known.values()) == [fast]
    again, autotuner.choices = autotuner.choices.snapshot(), KernelChoices(lambda: now[0])
    autotuner.choices.restore(again)
    used.clear()
    with torch.no_grad(), use_fast_linears(autotuner, [one]):
        one(rows(4))
    assert used == [fast], "another process does not time them again"


def slow_kernels(monkeypatch: pytest.MonkeyPatch, fast: str) -> tuple[list[float], list[str]]:
    """The clock, and the kernels that have run: each takes 9 us, the fast one 1."""
    now, used, original = [0.0], list[str](), LinearAutotuner._run_kernel

    def run(self: LinearAutotuner, kernel: str, weight: Tensor, bias: Tensor | None, inputs: Tensor) -> Tensor:
        now[0] += 1e-6 if kernel == fast else 9e-6
        used.append(kernel)
        return original(self, kernel, weight, bias, inputs)

    monkeypatch.setattr(LinearAutotuner, "_run_kernel", run)
    return now, used


@pytest.mark.parametrize("deterministic", [False, True])
def test_small_layers_keep_their_forward(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """But where one kernel is to compute all products."""
    monkeypatch.setattr("mmspec.backend.SMALLEST_REPLACED", 16 * 4)
    model, replaced = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 15)), list[nn.Linear]()
    monkeypatch.setattr("mmspec.backend.use_fast_linears", lambda _, layers, *rest: replaced.extend(layers))
    plan = SimpleNamespace(
        adapter=SimpleNamespace(model=SimpleNamespace(device=torch.device("cpu"))),
        config=SimpleNamespace(backend="auto", deterministic=deterministic, may_use_c=True),
        modules=SimpleNamespace(prompt_linear_layers=list(model), kinds=[nn.Linear]),
        unknown_code=None,
        autotuner=LinearAutotuner(),
    )
    use_prompt_kernels(plan)  # type: ignore[arg-type]
    assert replaced == list(model)[: 2 if deterministic else 1]


@pytest.mark.parametrize("backend", ["auto", "c", "torch"])
def test_generate_is_the_same_with_every_setting(
    backend: str, spied: list[int], c_forwards: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmspec.economy.kernels.fastest", lambda names, *_: names[-1])
    monkeypatch.setattr(cpu, "KERNEL_CHOICES", KernelChoices())
    monkeypatch.setattr("mmspec.backend.SMALLEST_REPLACED", 1)
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
