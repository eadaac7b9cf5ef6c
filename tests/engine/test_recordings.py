"""What makes recordings safe: functions that may run twice, and replays that are compared whole."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from recorded_rounds import (
    build_drafter,
    build_inputs,
    build_model,
    generate,
    patched,
    recording,
    runs_twice,
    spoils_output,
)
from recorders import record_nothing
from torch import Tensor

from mmspec.drafters.heads.base import c_draft
from mmspec.engine.graph import Replay, StaticFunction
from mmspec.engine.kv_cache import RaggedKVCache, RecordedKVCache
from mmspec.engine.recordings import Recordings, WrittenPlace, check_replay
from mmspec.targets.hf import HFTarget

DRAFTERS = ("leaning-decoupled", "leaning-dspark:1", "lookup", "none")
"""A head whose rounds are one function, one with further state, and trees that are an input."""


@pytest.fixture(autouse=True)
def without_compiled_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU some heads run in C instead."""
    monkeypatch.setattr(c_draft, "active_kernel", lambda: None)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "parts"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_function_may_run_twice(drafter: str, whole: bool) -> None:
    """It writes nothing but its outputs, and keys and values behind the committed lengths."""
    model = build_model()
    inputs = build_inputs(model, 0, 2)
    expected = generate(model, inputs, True)
    allowed = mock.patch("mmspec.engine.loop.can_record_rounds", return_value=False)
    with recording(runs_twice) as counting, patched(model, build_drafter(drafter), tree_size=8):
        if whole:
            assert torch.equal(generate(model, inputs, True), expected)
        else:
            with allowed:
                assert torch.equal(generate(model, inputs, True), expected)
    assert counting.replays + counting.whole_replays > 10


def test_an_eager_forward_may_run_twice() -> None:
    model = build_model()
    inputs = build_inputs(model, 0, 2)
    expected = generate(model, inputs, True)
    score = HFTarget.score

    def twice(self: HFTarget, *args: Any) -> Any:
        first, _ = score(self, *args)
        first = first.clone()
        second, hidden_states = score(self, *args)
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)
        return second, hidden_states

    for backend in ("auto", "torch"):  # "auto" is C here
        with (
            patched(model, build_drafter("leaning-decoupled"), tree_size=8, backend=backend),
            mock.patch.object(HFTarget, "score", twice),
        ):
            assert torch.equal(generate(model, inputs, True), expected)


@pytest.mark.parametrize("drafter", ["leaning-decoupled", "lookup"])
@pytest.mark.parametrize("number", range(7))
def test_a_bug_in_each_output_is_caught(number: int, drafter: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whole rounds have four outputs (largest logits, what is read, hidden states, the head's state), those with a
    given tree seven. Only speed is lost."""
    if number > 3 and drafter != "lookup":
        pytest.skip("four outputs")
    model = build_model()
    inputs = build_inputs(model, 0, 2)
    expected = generate(model, inputs, False)
    with (
        recording(spoils_output(number)),
        patched(model, build_drafter(drafter), tree_size=8),
        caplog.at_level(logging.WARNING),
    ):
        assert torch.equal(generate(model, inputs, False), expected)
    assert any(f"output {number}" in record.message for record in caplog.records)


def loses_writes(function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Replay:
    """A recorder whose replays write into copies of the cache."""
    copies = [tensor.clone() for tensor in state]

    def replay(new_inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for copy, tensor in zip(copies, state, strict=True):
            copy.copy_(tensor)
        return function(*copies, *new_inputs)

    return replay


def test_a_replay_that_does_not_write_is_caught(caplog: pytest.LogCaptureFixture) -> None:
    """Its outputs are right in the first round."""
    model = build_model()
    inputs = build_inputs(model, 0, 2)
    expected = generate(model, inputs, False)
    with (
        recording(loses_writes),
        patched(model, build_drafter("lookup"), tree_size=8),
        caplog.at_level(logging.WARNING),
    ):
        assert torch.equal(generate(model, inputs, False), expected)
    assert any("differs from a plain run" in record.message for record in caplog.records)


def test_rows_with_a_tie_may_decide_otherwise() -> None:
    top = torch.tensor([[[5.0, 1.0]], [[5.0, 5.0]]])
    tokens = torch.tensor([[1, 2], [3, 4]])
    check_replay([top, tokens], [top, tokens])
    check_replay([top, torch.tensor([[1, 2], [3, 9]])], [top, tokens])
    with pytest.raises(RuntimeError, match="output 1"):
        check_replay([top, torch.tensor([[1, 9], [3, 4]])], [top, tokens])
    with pytest.raises(RuntimeError, match="another shape"):
        check_replay([top, tokens[:, :1]], [top, tokens])


def test_what_a_function_has_written_is_compared() -> None:
    cache = RaggedKVCache(1, 64)
    cache.begin_forward(2)
    cache.write(0, torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4))
    cache.advance(2)
    cache.pack(64)
    (group,) = cache.groups

    class Write:
        """Writes two nodes, once or always."""

        def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
            group, lengths, nodes = tensors
            view = RecordedKVCache([(group[0],)], lengths, 32)
            view.begin_forward(2)
            view.write(0, nodes, nodes)
            return (nodes.flatten(1).sum(-1),)

        def written(self, group: Tensor, lengths: Tensor, nodes: Tensor) -> list[WrittenPlace]:
            return [WrittenPlace(group, lengths[:, None] + torch.arange(2))]

    inputs = [torch.tensor([2]), torch.randn(1, 1, 2, 4)]
    Recordings(record_nothing, 64, print).run("owner", "key", Write(), [group], inputs)
    assert torch.equal(group[0, 0, :, :, 2:4], inputs[1]) and not group[..., 4:, :].any()

    def forgets(function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Replay:
        return lambda new_inputs: (new_inputs[1].flatten(1).sum(-1),)

    with pytest.raises(RuntimeError, match="differs"):
        Recordings(forgets, 64, print).run("owner", "key", Write(), [group], inputs)
