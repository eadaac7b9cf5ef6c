"""What makes recordings safe: functions that may run twice, replays that are compared whole, failures that cost speed
only, models and heads that change, and calls without recordings. Costs: `test_recorded_costs.py`."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from fuzz import patch_model
from recorded_rounds import (
    build_drafter,
    build_inputs,
    build_model,
    drafts_only,
    fails_later,
    generate,
    in_parts,
    recording,
    runs_twice,
    spoils_output,
    whole_only,
    without_compiled_code,
    wrong,
)
from recorders import record_nothing, record_trace, trace
from torch import Tensor

from mmspec.engine.graph import Recorder, Replay, StaticFunction
from mmspec.engine.kv_cache import RaggedKVCache, RecordedKVCache
from mmspec.engine.recordings import Recordings, WrittenPlace, check_replay
from mmspec.engine.sampler import TreeSampler
from mmspec.targets.hf import HFTarget

DRAFTERS = ("leaning-decoupled", "leaning-dspark:1", "lookup", "none")
"""A head whose rounds are one function, one with further state, and trees that are an input."""
_ = pytest.fixture(autouse=True)(without_compiled_code)


@pytest.mark.every(2)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "parts"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_function_may_run_twice(drafter: str, whole: bool) -> None:
    """It writes nothing but its outputs, and keys and values behind the committed lengths."""
    model = build_model()
    inputs = build_inputs(model, 0, 2)
    expected = generate(model, inputs, True, max_new_tokens=24)
    with (
        recording(runs_twice) as counting,
        nullcontext() if whole else in_parts(),
        patch_model(model, build_drafter(drafter), tree_size=8),
    ):
        assert torch.equal(generate(model, inputs, True, max_new_tokens=24), expected)
    assert counting.replays + counting.whole_replays > 6


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
            patch_model(model, build_drafter("leaning-decoupled"), tree_size=8, backend=backend),
            mock.patch.object(HFTarget, "score", twice),
        ):
            assert torch.equal(generate(model, inputs, True), expected)


@pytest.mark.parametrize(
    ("number", "drafter"), [*((n, "leaning-decoupled") for n in range(4)), *((n, "lookup") for n in range(7))]
)
def test_a_bug_in_each_output_is_caught(number: int, drafter: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whole rounds have four outputs (largest logits, what is read, hidden states, the head's state), those with a
    given tree seven. Only speed is lost."""
    model = build_model()
    inputs = build_inputs(model, 0, 2)
    expected = generate(model, inputs, False)
    with (
        recording(spoils_output(number)),
        patch_model(model, build_drafter(drafter), tree_size=8),
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
        patch_model(model, build_drafter("lookup"), tree_size=8),
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


def test_no_value_becomes_a_constant() -> None:
    """`make_fx` on real tensors would turn what the host reads into a constant without a word."""

    def multiply(state: Tensor, inputs: Tensor) -> tuple[Tensor, ...]:
        return (inputs * state.sum().item(),)

    def branch(state: Tensor, inputs: Tensor) -> tuple[Tensor, ...]:
        return (inputs if bool(state.sum() > 0) else -inputs,)

    state = torch.ones(2)
    replay = record_trace(multiply, [state], [torch.ones(2)])
    state.fill_(3.0)
    assert replay([torch.ones(2)])[0].tolist() == [6.0, 6.0]
    with pytest.raises(Exception, match="data-dependent"):
        trace(branch, [state], [torch.ones(2)])


# --- failures ---------------------------------------------------------------------------------------------------------


def fails_at_once(function: Any, state: Any, inputs: Any) -> Any:
    """A recorder that cannot capture."""
    raise RuntimeError("operation not permitted when stream is capturing")


def fails_afterwards(function: Any, state: Any, inputs: Any) -> Any:
    """A recorder whose third replay runs, but does not return."""
    count = iter(range(100))

    def replay(new_inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = function(*state, *new_inputs)
        if next(count) == 3:
            raise RuntimeError("out of memory")
        return outputs

    return replay


FAILURES = [
    *(
        (whole_only(one), "leaning-decoupled", "in parts")
        for one in (fails_at_once, fails_later, fails_afterwards, wrong)
    ),
    *((drafts_only(one), "leaning-decoupled", "drafts are not recorded") for one in (fails_later, wrong)),
    *((one, "lookup", "not recorded") for one in (fails_at_once, wrong, fails_later)),
]


@pytest.mark.parametrize(("recorder", "drafter", "word"), FAILURES)
def test_a_failure_costs_speed_only(
    recorder: Recorder, drafter: str, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line; what failed is not tried again, and the rest stays recorded."""
    model = build_model()
    inputs = build_inputs(model, 0, 2)
    expected = generate(model, inputs, True)
    way = in_parts() if word.startswith("drafts") else nullcontext()
    with (
        recording(recorder) as counting,
        way,
        patch_model(model, build_drafter(drafter), tree_size=8),
        caplog.at_level(logging.WARNING),
    ):
        for _ in range(2):
            assert torch.equal(generate(model, inputs, True), expected)
    if drafter == "lookup":
        assert counting.recordings + counting.whole_recordings == 2, "whole rounds and forwards alone"
    elif word == "in parts":
        assert counting.whole_recordings == 1 and counting.draft_replays > 10 and counting.replays > 10
    else:
        assert counting.draft_recordings <= 1 and counting.replays > 10
    assert len([record for record in caplog.records if word in record.message]) == 1


def test_nan_at_a_draft(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of the round is committed, and the rest of the call is decoded without drafts."""
    model = build_model()
    inputs = build_inputs(model, 0, 2)
    expected = generate(model, inputs, True)
    sample, calls = TreeSampler.sample_nodes, itertools.count()

    def sometimes_nan(self: TreeSampler, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        sampled_ids, scores, is_nan = sample(self, *args)
        return sampled_ids, scores, is_nan | (next(calls) >= 10)

    with (
        recording(record_nothing) as counting,
        patch_model(model, build_drafter("leaning-decoupled"), tree_size=8),
        mock.patch.object(TreeSampler, "sample_nodes", sometimes_nan),
        caplog.at_level(logging.WARNING),
    ):
        assert torch.equal(generate(model, inputs, True), expected)
    assert counting.whole_replays > 3
    assert len([record for record in caplog.records if "decoded without drafts" in record.message]) == 1


def test_a_call_that_raises_returns_the_lane() -> None:
    model = build_model()
    inputs = build_inputs(model, 0, 1)
    expected = generate(model, inputs, False)
    with recording(record_nothing) as recorder, patch_model(model, "lookup", tree_size=4):
        with (
            mock.patch.object(HFTarget, "follow_part", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            generate(model, inputs, False)
        assert torch.equal(generate(model, inputs, False), expected) and recorder.replays > 5


def test_two_threads() -> None:
    """The second call does not wait for the first: it runs as without recordings."""
    model = build_model()
    inputs = build_inputs(model, 0, 1)
    expected = generate(model, inputs, False)
    found: list[bool] = []
    inner = threading.Thread(target=lambda: found.append(torch.equal(generate(model, inputs, False), expected)))
    score = HFTarget.score_part

    def score_beside_another_call(self: HFTarget, *args: Any) -> Any:
        if not inner.ident:
            inner.start()
            inner.join()
        return score(self, *args)

    with recording(record_nothing) as recorder, patch_model(model, "lookup", tree_size=4):
        with mock.patch.object(HFTarget, "score_part", score_beside_another_call):
            assert torch.equal(generate(model, inputs, False), expected)
        assert found == [True] and recorder.recordings == 1
        assert torch.equal(generate(model, inputs, False), expected), "the lane is free again"
