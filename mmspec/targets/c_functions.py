"""Functions of transformers that recurrent layers call, computed in C (`mmspec.cpu.mixers`).

Where no other package is installed, transformers computes a gated delta rule in torch, by chunks of 64 tokens: on a CPU
most of a prompt's forward. A function is recognised by what it is: code of transformers, with these parameters, that
gives for an example what C gives. Whatever a user has put in its place runs.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmspec.cpu import mixers
from mmspec.cpu.c_kernel import CKernel
from mmspec.targets.module_scan import is_library_code

DELTA_RULE = ("query", "key", "value", "g", "beta")
"""First parameters of a gated delta rule."""
CONVOLUTION = ("hidden_states", "weight", "bias", "activation")
"""First parameters of a causal convolution without a state."""
ACTIVATIONS = {None: False, "silu": True, "swish": True}
"""{activation of a convolution: whether it is SiLU}"""
PACKED = ("cu_seqlens", "seq_idx")
"""Arguments that divide a row into several texts."""
TOLERANCE = 1e-4
"""Of an example in float32 whose numbers are below 1."""


def may_be_computed(parameters: Sequence[str]) -> bool:
    """Whether a function with parameters of these names may be one that C computes."""
    return tuple(parameters[: len(DELTA_RULE)]) == DELTA_RULE or tuple(parameters[: len(CONVOLUTION)]) == CONVOLUTION


def in_c(kernel: CKernel, function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """What a function returns for these arguments, by name; None if C does not compute it, or not with these."""
    if (
        torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or any(values.get(name) is not None for name in PACKED)
    ):
        return None
    compute = find_computation(kernel, function)
    return None if compute is None else compute(kernel, values)


@functools.lru_cache(maxsize=256)
def find_computation(
    kernel: CKernel, function: Callable[..., Any]
) -> Callable[[CKernel, Mapping[str, Any]], Any] | None:
    """What computes a function in C, or None. Runs both on an example, once for each function."""
    if not isinstance(function, types.FunctionType) or not is_library_code(function):
        return None
    parameters = tuple(inspect.signature(function).parameters)
    if not may_be_computed(parameters):
        return None
    is_delta_rule = parameters[: len(DELTA_RULE)] == DELTA_RULE
    compute, example = (_delta_rule, _delta_example()) if is_delta_rule else (_convolution, _convolution_example())
    with torch.inference_mode():
        found = compute(kernel, example)
        try:
            want = function(**example)
        except Exception:  # one that cannot run here, or with other parameters than we know
            return None
    return compute if found is not None and _agree(found, want) else None


def _delta_rule(kernel: CKernel, values: Mapping[str, Any]) -> tuple[Tensor, Tensor | None] | None:
    if not values.get("use_qk_l2norm_in_kernel"):
        return None
    query, key, value, g, beta = (values[name] for name in DELTA_RULE)
    found = mixers.delta_rule(kernel, query, key, value, g, beta, values.get("initial_state"))
    return found if found is None or values.get("output_final_state") else (found[0], None)


def _convolution(kernel: CKernel, values: Mapping[str, Any]) -> Tensor | None:
    activation = values.get("activation")
    if activation not in ACTIVATIONS:
        return None
    inputs, weight, bias = values["hidden_states"], values["weight"], values.get("bias")
    return mixers.convolution(kernel, inputs, weight, bias, ACTIVATIONS[activation])


def _delta_example() -> dict[str, Any]:
    """More tokens than a chunk has, behind a state."""
    query, key, value, gates = (
        _numbers(2, 70, 2, 8),
        _numbers(2, 70, 2, 8, 5),
        _numbers(2, 70, 2, 6),
        _numbers(2, 70, 2),
    )
    tensors = {"query": query, "key": key[..., 2], "value": value, "g": -gates.abs(), "beta": gates.square()}
    return tensors | {
        "initial_state": _numbers(2, 2, 8, 6),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }


def _convolution_example() -> dict[str, Any]:
    return {"hidden_states": _numbers(2, 6, 9), "weight": _numbers(6, 4), "bias": _numbers(6), "activation": "silu"}


def _numbers(*shape: int) -> Tensor:
    """Numbers between -1 and 1; no generator is asked for them."""
    return torch.arange(math.prod(shape), dtype=torch.float32, device="cpu").mul_(0.37).sin_().view(shape)


def _agree(found: Any, want: Any) -> bool:
    pairs = zip(*((one,) if isinstance(one, Tensor) else tuple(one) for one in (found, want)), strict=False)
    return all(
        isinstance(b, Tensor)
        and (a.shape, a.dtype) == (b.shape, b.dtype)
        and torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)
        for a, b in pairs
    )
