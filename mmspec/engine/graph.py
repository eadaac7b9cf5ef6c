"""Record a function of tensors once and run it many times, without Python and without launching each kernel.

A recordable function has static shapes, reads no tensor's value on the host, and keeps what changes between calls in
tensors. `state` are tensors at fixed addresses, which the function may change in place; `inputs` are new in every call.

`CudaGraphRecorder` captures kernels by a CUDA graph, replayed in one launch. On a CPU nothing is recorded, but by
tests. Independent of models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

StaticFunction = Callable[..., tuple[Tensor, ...]]
"""(*state, *inputs) -> outputs."""
Replay = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
"""inputs -> outputs, which stay valid after the next replay."""
Recorder = Callable[[StaticFunction, Sequence[Tensor], Sequence[Tensor]], Replay]
"""(function, state, example inputs) -> its replay. May run the function, which must then be repeatable."""

NUM_WARMUPS = 2
"""Runs before a capture, in which libraries allocate workspaces and choose kernels."""


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
