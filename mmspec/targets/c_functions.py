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
from torch.nn import functional

from mmspec.cpu import mixers
from mmspec.cpu.c_kernel import CKernel
from mmspec.targets.module_scan import is_library_code

DELTA_RULE = ("query", "key", "value", "g", "beta")
"""First parameters of a gated delta rule."""
STATE_SPACE = ("hidden_states", "dt", "A", "B", "C", "chunk_size")
"""The same of a state space (Mamba-2)."""
CONVOLUTION = ("hidden_states", "weight", "bias", "activation")
"""First parameters of a causal convolution without a state."""
ACTIVATIONS = {None: False, "silu": True, "swish": True}
"""{activation of a convolution: whether it is SiLU}"""
PACKED = ("cu_seqlens", "seq_idx")
"""Arguments that divide a row into several texts."""
TOLERANCE = 1e-4
"""Of an example in float32 whose numbers are below 1."""


Computation = Callable[[CKernel, Mapping[str, Any]], Any]


def may_be_computed(parameters: Sequence[str]) -> bool:
    """Whether a function with parameters of these names may be one that C computes."""
    return _known(parameters) is not None


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
def find_computation(kernel: CKernel, function: Callable[..., Any]) -> Computation | None:
    """What computes a function in C, or None. Runs both on an example, once for each function."""
    if not isinstance(function, types.FunctionType) or not is_library_code(function):
        return None
    if (known := _known(tuple(inspect.signature(function).parameters))) is None:
        return None
    compute, example = known[0], known[1]()
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


def _state_space(kernel: CKernel, values: Mapping[str, Any]) -> tuple[Tensor, Tensor] | Tensor | None:
    dt, bias, skip = values["dt"], values.get("dt_bias"), values.get("D")
    if skip is None or values.get("z") is not None:
        return None
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    dt = functional.softplus(dt) if values.get("dt_softplus") else dt
    dt = dt.clamp(*values.get("dt_limit", (0.0, math.inf))).float()
    parts = values["hidden_states"], dt, values["A"].float() * dt, values["B"], values["C"], skip
    found = mixers.state_space(kernel, *parts, values.get("initial_states"))
    return found if found is None or values.get("return_final_states") else found[0]


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


def _state_space_example() -> dict[str, Any]:
    """More tokens than two chunks have, behind a state; some time steps are at a limit."""
    groups = {name: _numbers(2, 20, 2, 8, factor) for name, factor in (("B", 3), ("C", 5))}
    tensors = {"hidden_states": _numbers(2, 20, 4, 6), "dt": _numbers(2, 20, 4), "A": -_numbers(4).square()}
    tensors |= {name: part[..., 2] for name, part in groups.items()}
    tensors |= {"D": _numbers(4, 2)[:, 1], "dt_bias": _numbers(4), "initial_states": _numbers(2, 4, 6, 8)}
    return tensors | {"chunk_size": 8, "dt_softplus": True, "dt_limit": (0.5, 1.0), "return_final_states": True}


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


def _known(parameters: Sequence[str]) -> tuple[Computation, Callable[[], dict[str, Any]]] | None:
    """What may compute a function with these parameters, and an example; None if there is none."""
    known = {
        DELTA_RULE: (_delta_rule, _delta_example),
        STATE_SPACE: (_state_space, _state_space_example),
        CONVOLUTION: (_convolution, _convolution_example),
    }
    return next((one for names, one in known.items() if tuple(parameters[: len(names)]) == names), None)
