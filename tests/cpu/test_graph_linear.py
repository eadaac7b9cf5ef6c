"""Linear layers of traced functions in our own kernel: the same values, joined by their rows, and when not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from recorded_rounds import build_drafter, build_inputs, build_model, generate, patched, record_frozen, recording
from torch import Tensor, nn
from torch.nn import functional

import mmspec
from mmspec.cpu.c_kernel import load_kernel
from mmspec.cpu.graph_linear import CLinears, join_linears
from mmspec.engine import graph as graphs
from mmspec.engine.graph import C_OPTIONS, Replay, StaticFunction, record_compiled, trace

OPERATOR = "mmspec.few_rows_linear.default"

pytestmark = pytest.mark.skipif(load_kernel() is None, reason="no C kernel on this machine")


class Layer(nn.Module):
    """Two layers of the same rows, one with a bias, and one of other rows."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.last = (nn.Linear(16, 16, bias=one, dtype=dtype) for one in (True, False, False))

    def forward(self, state: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        """Some function of both."""
        return (self.last(self.first(rows) * self.second(rows)) + state,)


def count_operators(graph: Any) -> Counter[str]:
    """{operator: calls} of a traced function."""
    return Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function")


def trace_c(function: StaticFunction, tensors: Sequence[Tensor]) -> tuple[Any, CLinears]:
    """A traced function, and the mode in which it was."""
    mode = CLinears()

    def run(*args: Tensor) -> tuple[Tensor, ...]:
        with mode:
            return function(*args)

    return trace(run, tensors[:1], tensors[1:]), mode


def record_c_trace(function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Replay:
    """What `record_compiled` compiles, as it is."""
    graph, mode = trace_c(function, [*state, *inputs])
    assert mode.num_replaced and not mode.num_left
    graph = join_linears(graph)
    return lambda new_inputs: graph(*state, *new_inputs)  # type: ignore[no-any-return]


@torch.no_grad()
@pytest.mark.parametrize("shape", [(1, 16), (32, 16), (2, 3, 16)])
def test_the_operator_computes_the_layers(shape: tuple[int, ...]) -> None:
    layer, state = Layer(), torch.ones(1)
    graph, mode = trace_c(layer, [state, torch.randn(shape)])
    assert (mode.num_replaced, mode.num_left) == (3, 0) and count_operators(graph)[OPERATOR] == 3
    joined = join_linears(graph)
    counts = count_operators(joined)
    assert counts[OPERATOR] == 2, "first and second read the same rows"
    assert not counts["aten.mm.default"] and not counts["aten.addmm.default"]
    for _ in range(2):
        rows = torch.randn(shape)
        torch.testing.assert_close(joined(state, rows), layer(state, rows))
        layer.first.weight.mul_(2)  # weights are read where they lie


@torch.no_grad()
def test_rows_that_are_not_contiguous() -> None:
    layer, state = Layer(), torch.ones(1)
    graph, _ = trace_c(layer, [state, torch.randn(16, 4).t()])
    rows = torch.randn(16, 4).t()
    torch.testing.assert_close(join_linears(graph)(state, rows), layer(state, rows))


@torch.no_grad()
@pytest.mark.parametrize("fault", ["rows", "dtype", "layout", "keywords"])
def test_layers_that_are_left(fault: str) -> None:
    layer = Layer(torch.float64 if fault == "dtype" else torch.float32)
    rows = torch.randn(33 if fault == "rows" else 4, 16, dtype=layer.last.weight.dtype)
    if fault == "layout":
        layer.last.weight.data = layer.last.weight.data.t()
    function: Callable[..., tuple[Tensor, ...]] = layer
    if fault == "keywords":

        def function(state: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
            return (functional.linear(rows, weight=layer.last.weight),)

    _, mode = trace_c(function, [torch.ones(1, dtype=rows.dtype), rows])
    assert mode.num_left == {"layout": 1, "keywords": 1}.get(fault, 3)
    with mock.patch.object(graphs, "_compile") as compiled:
        record_compiled(function, [torch.ones(1, dtype=rows.dtype)], [rows])
    assert compiled.call_args.args[2] is graphs.FROZEN_OPTIONS, "all or none"


@pytest.mark.parametrize("recorder", [record_compiled, record_frozen])
def test_how_it_is_compiled(recorder: Callable[..., Replay]) -> None:
    """A compiler that fails without trials of it is tried with them."""
    layer, options = Layer(), []

    def compile_some(graph: Any, example: Any, given: Any) -> Any:
        options.append(given)
        if given is C_OPTIONS:
            raise RuntimeError("unrecognized option")
        return graph

    rows = torch.randn(4, 16)
    with torch.no_grad(), mock.patch.object(graphs, "_compile", compile_some):
        replay = recorder(layer, [torch.ones(1)], [rows])
        torch.testing.assert_close(replay([rows]), layer(torch.ones(1), rows))
    assert options == ([C_OPTIONS, {}] if recorder is record_compiled else [graphs.FROZEN_OPTIONS])


def test_options_that_torch_does_not_have_are_left_out() -> None:
    from torch._inductor import config

    assert graphs._has_option(config, "cpp.vec_isa_ok") and graphs._has_option(config, "freezing")
    assert not graphs._has_option(config, "cpp.no_such") and not graphs._has_option(config, "none.such")


@pytest.mark.parametrize("kind", ["lookup", "leaning-flash", "leaning-decoupled"])
def test_rounds_and_drafts(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """The same tokens as plain `generate`, traced and joined, on other prompts."""
    model = build_model()
    prompts = [build_inputs(model, seed, 1) for seed in range(3)]
    plain = [generate(model, inputs, True) for inputs in prompts]
    with (
        recording(record_c_trace) as recorder,
        patched(model, build_drafter(kind), tree_size=8),
        mock.patch("mmspec.drafters.heads.base.c_draft.active_kernel", return_value=None),
    ):
        for inputs, expected in zip(prompts, plain, strict=True):
            assert torch.equal(generate(model, inputs, True), expected)
        assert not mmspec.stats(model).fallback_calls
    assert "not recorded" not in caplog.text
    assert recorder.replays + recorder.draft_replays + getattr(recorder, "whole_replays", 0) > 20


@pytest.mark.parametrize("backend", ["c", "recorded"])
def test_a_backend_that_cannot_be_had_is_one_warning(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    """The calls run in torch."""
    model = build_model()
    inputs = build_inputs(model, 0, 1)
    expected = generate(model, inputs, False)
    why = {
        "c": [mock.patch("mmspec.backend.load_kernel", return_value=None)],
        "recorded": [mock.patch("mmspec.targets.lanes.LanePool.reason", return_value="for a test")],
    }[backend]
    with why[0], patched(model, "lookup", tree_size=4, backend=backend):
        for _ in range(2):
            assert torch.equal(generate(model, inputs, False), expected)
    (line,) = [record.getMessage() for record in caplog.records if "backend=" in record.getMessage()]
    runs = {"c": "runs in torch (there is no C kernel", "recorded": "runs eager (for a test"}[backend]
    assert line.startswith(f"mmspec: backend='{backend}': a call {runs}")
