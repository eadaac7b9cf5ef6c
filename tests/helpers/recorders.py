"""Recorders for a CPU, in place of CUDA graphs: a function as it is, or the aten operators that it ran."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from mmspec.engine.graph import Replay, StaticFunction


def record_nothing(function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Replay:
    """The function itself."""
    return lambda new_inputs: function(*state, *new_inputs)


def record_trace(function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Replay:
    """The aten operators that the function ran, without Python: whatever Python computed is constant, as in a graph."""
    graph = trace(function, state, [one.clone(memory_format=torch.contiguous_format) for one in inputs])

    def replay(new_inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = graph(*state, *new_inputs)
        return outputs

    return replay


def trace(function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
    """The function as a graph of aten operators.

    Raises:
        Exception: of torch, among others where the function reads a tensor's value: traced on tensors without data, so
            that no value can become a constant.
    """
    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*state, *inputs)
