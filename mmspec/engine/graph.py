"""Record a function of tensors once and run it many times, without Python and without launching each kernel.

A recordable function has static shapes, reads no tensor's value on the host, and keeps what changes between calls in
tensors. `state` are tensors at fixed addresses, which the function may change in place; `inputs` are new in every call.

- `CudaGraphRecorder`: kernels captured by a CUDA graph, replayed in one launch.
- `record_compiled`: traced to aten operators, compiled by inductor; linear layers in our own C kernel. For a CPU.
  Without it weights are constants in inductor's layout.
- `record_trace`: traced only. It has the semantics of both (whatever Python computed is constant), for tests.
- `record_nothing`: calls the function.

Independent of models.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmspec.cpu.c_kernel import load_kernel
from mmspec.cpu.graph_linear import CLinears, join_linears
from mmspec.cpu.interception import operators_are_intercepted

logger = logging.getLogger("mmspec")

StaticFunction = Callable[..., tuple[Tensor, ...]]
"""(*state, *inputs) -> outputs."""
Replay = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
"""inputs -> outputs, which stay valid after the next replay."""
Recorder = Callable[[StaticFunction, Sequence[Tensor], Sequence[Tensor]], Replay]
"""(function, state, example inputs) -> its replay. May run the function, which must then be repeatable."""

FROZEN_OPTIONS = {
    "freezing": True,
    "max_autotune": True,
    "autotune_num_choices_displayed": 0,
    "max_autotune_report_choices_stats": False,
}
"""Weights are constants in the layout of the fastest kernel; kernels are chosen by timing; no reports of that. Options
that a version of torch does not have are left out."""
C_OPTIONS = {"cpp.vec_isa_ok": True}
"""No trial compilations: what the processor says that it can do is believed. If that fails, they are made."""
NUM_WARMUPS = 2
"""Runs before a capture, in which libraries allocate workspaces and choose kernels."""

_COMPILE_LOCK = threading.Lock()


def record_nothing(function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Replay:
    """The function itself."""
    return lambda new_inputs: function(*state, *new_inputs)


def record_trace(function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Replay:
    """The aten operators that the function ran, without Python."""
    graph = trace(function, state, _normalize(inputs))

    def replay(new_inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = graph(*state, *new_inputs)
        return outputs

    return replay


def record_compiled(function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Replay:
    """The function compiled by inductor, linear layers in our own kernel, which reads the weights where they lie.

    Takes 10 to 20 seconds, and logs that it begins. Where the kernel does not compute all linear layers (another dtype,
    more than 32 rows, no C on this machine), inductor chooses and compiles kernels with the weights as
    constants, in up to two minutes: they must not change afterwards. Inductor caches in its folder
    (`TORCHINDUCTOR_CACHE_DIR`, by default one per user).
    """
    has_kernel = load_kernel() is not None and not operators_are_intercepted()
    with _COMPILE_LOCK:
        logger.info("mmspec: compiling a part of a round; this happens once per shape")
        inputs = _normalize(inputs)
        graph = _trace_with_kernel(function, state, inputs) if has_kernel else None
        if graph is None:
            compiled = _compile(trace(function, state, inputs), [*state, *inputs], FROZEN_OPTIONS)
        else:
            try:
                compiled = _compile(graph, [*state, *inputs], C_OPTIONS)
            except Exception as error:  # an old compiler for a new processor, for example
                logger.debug("mmspec: compiled again with checks of the compiler: %s", error)
                compiled = _compile(graph, [*state, *inputs], {})

    def replay(new_inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = compiled(*state, *_normalize(new_inputs))
        return outputs

    return replay


def _compile(graph: Any, example: Sequence[Tensor], options: Mapping[str, Any]) -> Any:
    """A traced function compiled for arguments like `example`, as which it runs once."""
    from torch._inductor import config as inductor_config  # on demand: imports sympy

    known = {name: value for name, value in options.items() if _has_option(inductor_config, name)}
    compiled = torch.compile(graph, fullgraph=True, dynamic=False)
    with inductor_config.patch(known):  # dynamo reads `freezing` too, and does not see `options`
        compiled(*example)
    return compiled


def _has_option(config: Any, name: str) -> bool:
    group, _, option = name.rpartition(".")
    return hasattr(getattr(config, group, None) if group else config, option)


def _trace_with_kernel(function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
    """`trace` with linear layers as operators of our kernel; None if it does not compute all of them."""
    mode = CLinears()

    def c_function(*tensors: Tensor) -> tuple[Tensor, ...]:
        with mode:
            return function(*tensors)

    graph = trace(c_function, state, inputs)
    return join_linears(graph) if mode.num_replaced and not mode.num_left else None


class CudaGraphRecorder:
    """The function's kernels as a CUDA graph. Weights are read at their addresses in every replay.

    One per owner of a `state`: all its graphs share memory, so that two of them must not run at the same time.
    """

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Replay:
        static_inputs = [tensor.clone() for tensor in inputs]
        with torch.cuda.device(inputs[0].device):
            side_stream = torch.cuda.Stream()
            side_stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side_stream):
                for _ in range(NUM_WARMUPS):
                    function(*state, *static_inputs)
            torch.cuda.current_stream().wait_stream(side_stream)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=side_stream, capture_error_mode="thread_local"):
                static_outputs = function(*state, *static_inputs)

        def replay(new_inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            for static_input, new_input in zip(static_inputs, new_inputs, strict=True):
                static_input.copy_(new_input)
            graph.replay()
            return tuple(output.clone() for output in static_outputs)  # the next replay overwrites them

        return replay


def _normalize(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous copies that are no inference tensors: compiled code is compiled anew for others."""
    return [tensor.clone(memory_format=torch.contiguous_format) for tensor in inputs]


def trace(function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
    """The function as a graph of aten operators.

    Raises:
        Exception: of torch, among others where the function reads a tensor's value: traced on tensors without data, so
            that no value can become a constant.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # on demand: imports sympy

    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*state, *inputs)
