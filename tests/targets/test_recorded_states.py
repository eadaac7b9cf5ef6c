"""Recorded rounds of models with recurrent layers: the states are inputs, their next values outputs."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest import mock

import fuzz
import pytest
import tiny_models as tiny
import torch
from fuzz import patch_model
from recorded_rounds import (
    CountingRecorder,
    build_drafter,
    build_inputs,
    build_model,
    fails_later,
    generate,
    recording,
    runs_twice,
    spoils_output,
)
from recorders import record_nothing, record_trace
from recurrent_models import FAMILIES, OTHERS, HalfRight, model_of, text_batch, text_model
from spies import spy_on
from torch import Tensor
from transformers import PreTrainedModel

import mmspec
from mmspec.drafters.heads.base import c_draft
from mmspec.engine.graph import Recorder
from mmspec.engine.sampler import TreeSampler
from mmspec.patching import patch_state
from mmspec.targets.recurrent_states import RecurrentStates
from mmspec.targets.state_log import RecurrenceCall, StateLog

NUM_TOKENS = 14
FAST = ("qwen3_5", "lfm2_vl", "bamba", "olmo_hybrid")
"""The kinds of states: gated delta rule, convolution alone, Mamba-2, several convolutions of a layer."""
MODELS = [*FAMILIES, *OTHERS]
EVERY_MODEL = [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in MODELS]
EVERY_TRACE = [pytest.param(name, marks=[] if name == "bamba" else pytest.mark.slow) for name in MODELS]
MIXTURES = ("lfm2_moe", "qwen3_5_moe", "qwen3_next")
"""Experts, whose kernels cannot be traced in float32."""
WHOLE = pytest.mark.parametrize("whole", [True, False], ids=["whole", "parts"])
FAMILY = pytest.mark.parametrize("name", [name for name in ("qwen3_5", "lfm2_vl") if name in FAMILIES])


@cache
def build(name: str) -> tuple[PreTrainedModel, list[tuple[tiny.Inputs, Tensor]]]:
    """A model without an end token, and ragged batches of one shape with their greedy texts."""
    model = text_model(name, **OTHERS[name]) if name in OTHERS else copy.deepcopy(model_of(name))
    model.generation_config.eos_token_id = None
    inputs = text_batch() if name in OTHERS else tiny.build_inputs(model, 5, 3, images=[0, 0, 0], padding="left")
    flipped = {**inputs, "input_ids": inputs["input_ids"].flip(0), "attention_mask": inputs["attention_mask"].flip(0)}
    return model, [(one, generate(model, one, False, max_new_tokens=NUM_TOKENS)) for one in (inputs, flipped)]


@dataclass
class Run:
    """Calls of which the later ones replay what the first has recorded.

    Attributes:
        equal: whether each text is that of plain `generate`.
        failure: why nothing is recorded any more, or None.
        counting: the recorder.
    """

    equal: list[bool]
    failure: str | None
    counting: CountingRecorder

    @property
    def is_right(self) -> bool:
        """Whether all was recorded, and as plain `generate`."""
        return all(self.equal) and self.failure is None and self.counting.replays > 5 and self.counting.recordings == 1


def run(name: str, recorder: Recorder, whole: bool = True, tree_size: int = 8) -> Run:
    """Greedy calls of a model, each with another prompt."""
    model, calls = build(name)
    allowed = nullcontext() if whole else mock.patch("mmspec.engine.loop.can_record_rounds", return_value=False)
    drafter = HalfRight(calls[0][1])
    equal = []
    with recording(recorder) as counting, allowed, patch_model(model, drafter, tree_size=tree_size):
        for inputs, expected in calls:
            drafter.texts = expected.tolist()
            equal.append(torch.equal(generate(model, inputs, False, max_new_tokens=NUM_TOKENS), expected))
        failure = patch_state(model).lanes.failure
        assert mmspec.stats(model).num_accepted_tokens > 0 or tree_size == 1
    return Run(equal, failure, counting)


@pytest.fixture(autouse=True)
def without_compiled_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU some heads run in C instead."""
    monkeypatch.setattr(c_draft, "active_kernel", lambda: None)


@pytest.mark.every(2)
@WHOLE
@pytest.mark.parametrize("name", EVERY_MODEL)
def test_every_function_may_run_twice(name: str, whole: bool) -> None:
    """It writes no state. Logits of these models are up to 30: the bound is that of others, times 30."""
    assert run(name, partial(runs_twice, atol=3e-4), whole).is_right


@WHOLE
@pytest.mark.parametrize("tree_size", [1, 16])
def test_chains_of_any_length(tree_size: int, whole: bool) -> None:
    """One token, and more than are repeated one after the other."""
    assert run("qwen3_5", record_nothing, whole, tree_size).is_right


@WHOLE
@pytest.mark.parametrize("name", EVERY_TRACE)
def test_traced(name: str, whole: bool, caplog: pytest.LogCaptureFixture) -> None:
    """No value becomes a constant. What cannot be traced runs eager, with the reason."""
    result = run(name, record_trace, whole)
    assert all(result.equal) and (result.is_right or name in MIXTURES)
    said = any("rounds are not recorded, but run as before (" in record.message for record in caplog.records)
    assert said is (result.failure is not None)


def test_drafts_within_the_round() -> None:
    """Trees of heads lose their branches there, too."""
    spec = tiny.ModelSpec("lfm2_vl")
    model = build_model(spec)
    inputs = build_inputs(model, 0, 3)
    plain = generate(model, inputs, True)
    drafter = build_drafter("leaning-coupled", spec)
    with recording(partial(runs_twice, atol=3e-4)) as counting, patch_model(model, drafter, tree_size=8):
        assert torch.equal(generate(model, inputs, True), plain)
        assert mmspec.stats(model).num_accepted_tokens > 0 and patch_state(model).lanes.failure is None
    assert counting.whole_replays > 5


@WHOLE
@FAMILY
def test_a_failure_in_the_middle_of_a_call(name: str, whole: bool) -> None:
    """Eager rounds go on with the states of recorded ones."""
    result = run(name, fails_later, whole)
    assert all(result.equal) and result.failure is not None and result.counting.replays > 2


@FAMILY
def test_an_error_at_a_draft(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were ahead go back to the prompt's states and read again what recorded rounds have read."""
    sample, calls = TreeSampler.sample_nodes, itertools.count()
    restored = spy_on(monkeypatch, RecurrentStates, "restore", lambda _, states, rows: list(rows))

    def sometimes_nan(self: TreeSampler, *args: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        sampled_ids, scores, is_nan = sample(self, *args)
        assert is_nan is not None
        return sampled_ids, scores, is_nan | (next(calls) >= 6)

    monkeypatch.setattr(TreeSampler, "sample_nodes", sometimes_nan)
    result = run(name, record_nothing)
    assert all(result.equal) and result.failure is None and result.counting.replays > 1
    assert any(restored[0]) and not all(restored[0])


@FAMILY
def test_the_returned_states(name: str) -> None:
    """They are the caller's: a copy, which the next call does not change."""
    model, calls = build(name)
    (inputs, text), (others, _) = calls
    options: dict[str, Any] = {"return_dict_in_generate": True, "max_new_tokens": 12, "do_sample": False}
    plain = model.generate(**inputs, **options)
    with recording(record_nothing) as counting, patch_model(model, HalfRight(text), tree_size=8):
        found = model.generate(**inputs, **options)
        generate(model, others, False)
    ours, theirs = (fuzz.clone_cache_tensors(one.past_key_values) for one in (found, plain))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)
    assert counting.replays > 3


# --- planted bugs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [7, 8])
def test_a_bug_in_each_state_is_caught(number: int, caplog: pytest.LogCaptureFixture) -> None:
    """The outputs behind the seven that every round has: a convolution's window, and a recurrence's state."""
    assert all(run("qwen3_5", spoils_output(number)).equal)
    assert any(f"output {number}" in record.message for record in caplog.records)


def _other_rows(original: Any) -> Any:
    def faulty(self: StateLog, counts: Tensor, *args: Any) -> list[Tensor]:
        states: list[Tensor] = original(self, counts.roll(1), *args)
        return states

    return faulty


def _never(original: Any) -> Any:
    return lambda *args: None


def _all_tokens(original: Any) -> Any:
    return lambda self, counts, longest, path: original(self, torch.full_like(counts, longest), longest, path)


BUGS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "tokens accepted in another row": (StateLog, "after", _other_rows),
    "states that do not advance": (RecurrentStates, "advance", _never),
    "rejected tokens in a state": (RecurrenceCall, "repeat", _all_tokens),
    "states that stay where they are": (RecurrentStates, "move_to", _never),
}


@WHOLE
@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_caught(name: str, whole: bool) -> None:
    """Recordings and plain runs have the same bug: the texts show it."""
    owner, attribute, bug = BUGS[name]
    with mock.patch.object(owner, attribute, bug(getattr(owner, attribute))):
        assert not all(run("qwen3_5", record_nothing, whole).equal)
