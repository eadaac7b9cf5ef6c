"""Prompts of recurrent layers in C: which functions of transformers are replaced, when, and that all others run."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from c_bugs import faulty_kernel
from fuzz import patch_model
from parity import assert_parity, generate_tokens
from recurrent_models import OTHERS, model_of, one_row, ragged, text_batch, text_model
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.bamba import modeling_bamba
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen3_5 import modeling_qwen3_5

from mmspec.cpu import interception, mixers
from mmspec.cpu.c_kernel import CKernel, load_kernel
from mmspec.targets import c_functions, state_log
from mmspec.targets.c_functions import find_computation
from mmspec.targets.model_state import describe_calls

pytestmark = pytest.mark.skipif(load_kernel() is None, reason="no compiler or another processor")
DELTA, CONVOLUTION, SPACE = "torch_chunk_gated_delta_rule", "causal_conv1d_fn", "mamba2_chunk_scan"
OPTIONS: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": None}


@pytest.fixture(name="kernel")
def the_kernel() -> CKernel:
    kernel = load_kernel()
    assert kernel is not None
    return kernel


@pytest.fixture(name="counted")
def counts_of_calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often torch's operators of these functions, and C, were called."""
    counted = dict.fromkeys(("solve_triangular", "conv1d", "einsum", "delta_rule", "convolution", "state_space"), 0)

    def count(place: Any, name: str) -> None:
        original = getattr(place, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            counted[name] += found is not None
            return found

        monkeypatch.setattr(place, name, run)

    for place, name in zip((torch.linalg, functional, torch, *[mixers] * 3), tuple(counted), strict=True):
        count(place, name)
    assert interception.operators_are_intercepted(), "a user's convolution would run"
    monkeypatch.setattr(interception, "_ORIGINALS", interception._FUNCTIONS(functional))
    return counted


def first_token(model: Any, given: Any, **options: Any) -> Tensor:
    """The token of the prompt, decoded with these options of `patch`."""
    return model.generate(**given, max_new_tokens=1, do_sample=False, mmspec=options)


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2_vl", *OTHERS])
def test_a_prompt_calls_no_function_of_torch(family: str, counted: dict[str, int]) -> None:
    """Whatever the class of layers: the function is recognised by what it is."""
    model = text_model(family, **OTHERS[family]) if family in OTHERS else model_of(family)
    given = text_batch() if family in OTHERS else ragged(model)
    with patch_model(model, "lookup"):
        first_token(model, given)
        for backend, in_c in (("auto", True), ("c", True), ("torch", False)):
            counted.update(dict.fromkeys(counted, 0))
            first_token(model, given, backend=backend)
            called = {name for name, times in counted.items() if times}
            pairs = [("convolution", "conv1d")]
            pairs += [("delta_rule", "solve_triangular")] if family in ("qwen3_5", "olmo_hybrid") else []
            pairs += [("state_space", "einsum")] if family in ("bamba", "granitemoehybrid") else []
            assert called == {one if in_c else other for one, other in pairs}


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2_vl", "olmo_hybrid", "bamba"])
def test_the_text_is_the_same(family: str) -> None:
    model = text_model(family, **OTHERS[family]) if family in OTHERS else model_of(family)
    given = text_batch() if family in OTHERS else ragged(model)
    assert not assert_parity(model, given, "bush", patch_options={"tree_size": 8}, **OPTIONS).fallback_reason


@pytest.mark.parametrize("name", [DELTA, CONVOLUTION])
def test_a_function_of_the_user_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it says that it wraps that of transformers; so does one of which `kernels` has made a module."""
    model, calls = model_of("qwen3_5"), list[str]()
    original = getattr(modeling_qwen3_5, name)

    @functools.wraps(original)
    def own(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return original(*args, **kwargs)

    class Func(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return own(*args, **kwargs)

    given = one_row(model)
    plain = generate_tokens(model, given, **OPTIONS)
    for function in (own, Func()):
        with monkeypatch.context() as patched:
            patched.setattr(modeling_qwen3_5, name, function)
            with patch_model(model, "lookup"):
                first_token(model, given)
                calls.clear()
                assert model.generate(**given, **OPTIONS)[0].tolist()[-OPTIONS["max_new_tokens"] :] == plain[0]
                assert len(calls) >= 2  # layers of the prompt


def test_a_function_is_compared_with_c_first(kernel: CKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of transformers that computes something else, raises, or has other parameters; C that is wrong."""

    def function(code: Callable[..., Any]) -> Callable[..., Any]:
        monkeypatch.setitem(code.__globals__, "__name__", "transformers.models.new")
        return code

    original = getattr(modeling_qwen3_5, DELTA)

    def other(query: Any, key: Any, value: Any, g: Any, beta: Any, **kwargs: Any) -> Any:
        return original(query, key, value, g, beta.sqrt(), **kwargs)

    def failing(query: Any, key: Any, value: Any, g: Any, beta: Any, **kwargs: Any) -> Any:
        raise OSError("not on this machine")

    def swapped(key: Any, query: Any, value: Any, g: Any, beta: Any, **kwargs: Any) -> Any:
        return original(query, key, value, g, beta, **kwargs)

    def narrow(query: Any, key: Any, value: Any, g: Any, beta: Any, **kwargs: Any) -> Any:
        return [one.bfloat16() for one in original(query, key, value, g, beta, **kwargs)]

    def same(query: Any, key: Any, value: Any, g: Any, beta: Any, **kwargs: Any) -> Any:
        return original(query, key, value, g, beta, **kwargs)

    assert find_computation(kernel, same) is None  # code of a test
    assert find_computation(kernel, function(same)) is None  # the answer is kept, as is the function
    find_computation.cache_clear()
    assert find_computation(kernel, same) is not None
    assert not any(find_computation(kernel, function(one)) for one in (other, failing, swapped, narrow))
    assert all(find_computation(kernel, getattr(modeling_qwen3_5, name)) for name in (DELTA, CONVOLUTION))
    assert find_computation(kernel, modeling_qwen3_5.torch_recurrent_gated_delta_rule)
    assert find_computation(kernel, modeling_qwen3_5.causal_conv1d_update) is None
    assert find_computation(kernel, modeling_lfm2.causal_conv1d_fn)
    find_computation.cache_clear()


@pytest.mark.slow
def test_wrong_c_is_not_used() -> None:
    faulty = faulty_kernel("const VEC share = SET1(rate[t * H]);", "const VEC share = SET1(1);", optimized=False)
    assert find_computation(faulty, getattr(modeling_qwen3_5, DELTA)) is None
    assert find_computation(faulty, getattr(modeling_qwen3_5, CONVOLUTION))


def test_arguments_that_c_does_not_know(kernel: CKernel) -> None:
    """The function of transformers runs: other activations, packed texts, without norms, with gradients."""
    delta, convolution = getattr(modeling_qwen3_5, DELTA), getattr(modeling_qwen3_5, CONVOLUTION)
    example, inputs = c_functions._delta_example(), c_functions._convolution_example()
    with torch.no_grad():
        assert c_functions.in_c(kernel, delta, example) is not None
        assert c_functions.in_c(kernel, delta, example | {"output_final_state": False})[1] is None
        assert c_functions.in_c(kernel, delta, example | {"cu_seqlens": None}) is not None
        assert c_functions.in_c(kernel, delta, example | {"use_qk_l2norm_in_kernel": False}) is None
        assert c_functions.in_c(kernel, delta, example | {"cu_seqlens": torch.tensor([0, 3, 70])}) is None
        for activation, is_known in ((None, True), ("silu", True), ("swish", True), ("gelu", False)):
            found = c_functions.in_c(kernel, convolution, inputs | {"activation": activation})
            assert (found is not None) == is_known
        assert c_functions.in_c(kernel, convolution, inputs | {"seq_idx": torch.zeros(2, 9).int()}) is None
    with torch.enable_grad():
        assert c_functions.in_c(kernel, delta, example) is None


def test_arguments_of_a_state_space(kernel: CKernel) -> None:
    """What transformers returns without a state before, limits, a bias or softplus, in half precision too."""
    space, example = getattr(modeling_bamba, SPACE), c_functions._state_space_example()
    half = {name: one.bfloat16() for name, one in example.items() if name in ("hidden_states", "dt", "B", "C", "D")}
    changes: list[dict[str, Any]] = [
        *({"initial_states": None}, {"dt_bias": None}, {"dt_softplus": False}, {"dt_limit": (0.0, 0.7)}),
        *({"return_final_states": False}, {"z": None}, half),
    ]
    with torch.no_grad():
        for change in changes:
            found = c_functions.in_c(kernel, space, example | change)
            assert found is not None and c_functions._agree(found, space(**example | change))
        assert c_functions.in_c(kernel, space, {k: v for k, v in example.items() if k != "dt_limit"}) is not None
        assert c_functions.in_c(kernel, space, example | {"D": None}) is None
        assert c_functions.in_c(kernel, space, example | {"z": example["hidden_states"]}) is None


def test_numbers_that_are_not_finite_are_those_of_torch(kernel: CKernel, counted: dict[str, int]) -> None:
    functions = state_log.updating_functions([modeling_qwen3_5.Qwen3_5GatedDeltaNet])
    example = c_functions._delta_example()
    example["value"][0, 3, 0, 0] = torch.nan
    with torch.no_grad(), state_log.computed_in_c(kernel, functions):
        counted.update(dict.fromkeys(counted, 0))
        found = getattr(modeling_qwen3_5, DELTA)(**example)
    assert counted["solve_triangular"] and not counted["delta_rule"]
    want = getattr(modeling_qwen3_5, DELTA)(**example)
    assert all(torch.equal(*map(torch.nan_to_num, pair)) for pair in zip(found, want, strict=True))


def test_another_thread_sees_nothing(kernel: CKernel, counted: dict[str, int]) -> None:
    """Nor does what is compared of the model's code change meanwhile; a log of another thread goes on."""
    model = model_of("qwen3_5")
    modules = list(model.modules())
    functions = state_log.updating_functions(map(type, modules))
    example, before = c_functions._delta_example(), describe_calls(modules)
    originals = [one.namespace[one.name] for one in functions]
    calls = list[Any]()

    def run() -> None:
        log = state_log.StateLog([])
        with torch.no_grad():
            getattr(modeling_qwen3_5, DELTA)(**example)
            with log.active(functions):
                getattr(modeling_qwen3_5, DELTA)(**example)
        calls.append(log.last_call)

    with torch.no_grad(), state_log.computed_in_c(kernel, functions):
        assert describe_calls(modules) == before
        assert getattr(modeling_qwen3_5, DELTA) not in originals
        counted.update(dict.fromkeys(counted, 0))
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert counted["solve_triangular"] == 4 and not counted["delta_rule"] and calls[0] is not None
        assert calls[0].function in originals
        getattr(modeling_qwen3_5, DELTA)(**example)
        assert counted["solve_triangular"] == 4 and counted["delta_rule"] == 1
    assert [one.namespace[one.name] for one in functions] == originals
