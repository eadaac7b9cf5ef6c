"""Calls that share recordings, models and heads that change between and within calls, and calls without recordings."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from forced_drafts import planned
from fuzz import patch_model
from recorded_rounds import (
    SPEC,
    build_drafter,
    build_inputs,
    build_model,
    generate,
    in_parts,
    recording,
    without_compiled_code,
)
from recorders import record_nothing, record_trace
from spies import UserCode, at
from torch import Tensor, nn
from transformers import DynamicCache, LogitsProcessor, PreTrainedModel

import mmspec
from mmspec.backend import recorder_for
from mmspec.drafters.heads.eagle.drafter import EagleDrafter
from mmspec.drafters.heads.eagle.head import EagleHead
from mmspec.economy.chooser import Chooser
from mmspec.engine.graph import CudaGraphRecorder
from mmspec.engine.sampler import TreeSampler
from mmspec.engine.tree import DraftTree
from mmspec.engine.tree_cache import CACHE_ARGUMENT
from mmspec.patching import patch_state

_ = pytest.fixture(autouse=True)(without_compiled_code)


# --- between calls ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["leaning-decoupled", "lookup"])
def test_within_inference_mode(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call has made in the user's inference mode is written to within it; recorded tensors outlive the call."""
    monkeypatch.setattr("mmspec.engine.output.INITIAL_STEPS", 4)  # the buffer grows between rounds too
    model = build_model()
    inputs = build_inputs(model, 0, 3)
    expected = generate(model, inputs, True, repetition_penalty=1.1)
    with recording(record_nothing) as counting, patch_model(model, build_drafter(drafter), tree_size=8):
        for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.equal(generate(model, inputs, True, repetition_penalty=1.1), expected)
    assert max(counting.whole_recordings, counting.recordings) == 1
    assert counting.whole_replays + counting.replays > 20


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "parts"])
def test_nothing_remains_of_the_last_call(whole: bool) -> None:
    """Nan that a call leaves in every tensor reaches neither the text nor the drafts of the next one, which has another
    temperature and length."""
    model = build_model()
    prompts = [build_inputs(model, seed, 2) for seed in range(2)]
    options: list[dict[str, Any]] = [{"temperature": 0.7}, {"temperature": 0.7, "max_new_tokens": 20}]
    plain = [generate(model, *given, True, **option) for given, option in zip(zip(prompts), options, strict=True)]

    def run(poison: bool) -> list[int]:
        with patch_model(model, build_drafter("leaning-decoupled"), tree_size=8):
            for inputs, option, expected in zip(prompts, options, plain, strict=True):
                assert torch.equal(generate(model, inputs, True, **option), expected)
                if poison:
                    (lane,) = patch_state(model).lanes._lanes.values()
                    for group in lane.kv_cache.groups:
                        group.fill_(torch.nan)
                    (tensors,) = lane.recordings._attachments.values()
                    for tensor in tensors.named.values():
                        if tensor.is_floating_point() and tensor.shape != tensors.named["cos"].shape:
                            tensor.fill_(torch.nan)
                    for tensor in lane.recordings._fixed.values():
                        tensor.zero_()
            return [mmspec.stats(model).num_accepted_tokens, mmspec.stats(model).rounds]

    expected = run(poison=False)
    with recording(record_nothing) as counting, nullcontext() if whole else in_parts():
        assert run(poison=True) == expected
    assert counting.whole_recordings + counting.draft_recordings == 1


def test_other_options_are_other_recordings() -> None:
    model = build_model()
    inputs = build_inputs(model, 0, 1)
    options: list[dict[str, Any]] = [{"temperature": 0.7}, {"temperature": 1.4}, {"top_k": 3}, {"temperature": 0.7}]
    plain = [generate(model, inputs, True, **option) for option in options]
    with recording(record_nothing) as counting, patch_model(model, build_drafter("leaning-decoupled"), tree_size=8):
        for option, expected in zip(options, plain, strict=True):
            assert torch.equal(generate(model, inputs, True, **option), expected)
    assert counting.whole_recordings == 3


def test_the_returned_cache() -> None:
    """It is the caller's: a copy, which the next call does not change."""
    model = build_model()
    inputs = build_inputs(model, 0, 2)
    options = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 12, "do_sample": False}
    plain = model.generate(**inputs, **options)
    with recording(record_nothing), patch_model(model, "lookup", tree_size=4):
        out = model.generate(**inputs, **options)
        copied = copy.deepcopy(out.past_key_values)
        model.generate(**build_inputs(model, 1, 2), **options)
    for ours, theirs, before in zip(
        out.past_key_values.layers, plain.past_key_values.layers, copied.layers, strict=True
    ):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-4)
        assert torch.equal(ours.keys, before.keys)


def test_two_drafters_of_one_model() -> None:
    model = build_model()
    inputs = build_inputs(model, 0, 2)
    drafters = [build_drafter("leaning-coupled"), build_drafter("leaning-falcon"), build_drafter("leaning-flash")]
    expected = generate(model, inputs, False)
    with recording(record_nothing) as recorder, in_parts(), patch_model(model, drafters[0], tree_size=8):
        for drafter in (*drafters, *drafters):
            assert torch.equal(generate(model, inputs, False, mmspec={"drafter": drafter}), expected)
    assert recorder.draft_recordings == 6, "those of two drafters stay, the third drops the first"


def test_a_drafter_is_copied_without_its_recordings() -> None:
    model = build_model()
    inputs = build_inputs(model, 0, 1)
    drafter = build_drafter("leaning-flash")
    with recording(record_nothing), patch_model(model, drafter, tree_size=8):
        expected = generate(model, inputs, False)
    with patch_model(model, copy.deepcopy(drafter), tree_size=8):
        assert torch.equal(generate(model, inputs, False), expected)


# --- a model or a head that changes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["double", "eager"])
def test_a_changed_model_is_recorded_anew(change: str) -> None:
    model = build_model()
    inputs = build_inputs(model, 0, 1)
    with recording(record_trace) as recorder, patch_model(model, "none"):
        generate(model, inputs, False, max_new_tokens=8)
        model.double() if change == "double" else model.set_attn_implementation("eager")
        with mmspec.disabled(model):
            expected = generate(model, inputs, False, max_new_tokens=8)
        assert torch.equal(generate(model, inputs, False, max_new_tokens=8), expected)
    assert recorder.recordings == 2


def _replace_module(model: Any) -> None:
    layer = model.get_decoder().layers[1]
    layer.mlp = copy.deepcopy(layer.mlp)
    layer.mlp.down_proj.weight.data.neg_()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hook": lambda model: model.get_decoder().layers[0].mlp.register_forward_hook(lambda *args: args[-1].flip(-1)),
    "forward": lambda model: setattr(model.get_decoder().norm, "forward", lambda states: states.flip(-1)),
    "constant": lambda model: setattr(model.get_decoder().layers[0].self_attn, "scaling", 3.0),
    "weight": lambda model: setattr(model.get_decoder().norm, "weight", nn.Parameter(torch.arange(32) / 9)),
    "module": _replace_module,
    "bits": lambda model: model.get_output_embeddings().weight.data.neg_(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_streamer_that_changes_the_model_is_seen_by_the_next_round(change: str) -> None:
    """Rounds of one token, so that the next forward is that of plain decoding."""
    plain_model = build_model()
    model, inputs = copy.deepcopy(plain_model), build_inputs(plain_model, 0, 1)

    def call(one: PreTrainedModel, act: Callable[[Any], Any] = lambda model: None) -> Tensor:
        """A call that acts after the fifth token."""
        return generate(one, inputs, False, max_new_tokens=16, streamer=UserCode(at(5, partial(act, one))))

    unchanged = call(plain_model)
    expected = call(plain_model, CHANGES[change])
    assert not torch.equal(expected, unchanged)
    with recording(record_trace) as counting, patch_model(model, "none", tree_size=1):
        found = call(model, CHANGES[change])
    assert torch.equal(found, expected) and counting.replays > 3
    assert counting.replays < 10 or change == "bits", "a graph reads weights where they lie"


def replace_weight(head: EagleHead) -> None:
    head.fc.weight = nn.Parameter(head.fc.weight.detach() * 0.2)


def edit_weight(head: EagleHead) -> None:
    with torch.no_grad():
        head.fc.weight.mul_(0.2)


@pytest.mark.parametrize("change", [replace_weight, edit_weight])
def test_a_changed_head_is_recorded_anew(change: Callable[[EagleHead], None]) -> None:
    model = build_model()
    inputs = build_inputs(model, 0, 1)
    drafter = build_drafter("leaning-coupled")
    with recording(record_nothing) as recorder, in_parts(), patch_model(model, drafter, tree_size=8):
        first = generate(model, inputs, False)
        before = mmspec.stats(model).num_accepted_tokens
        change(drafter.head)
        assert torch.equal(generate(model, inputs, False), first)
        found = mmspec.stats(model).num_accepted_tokens - before
    assert recorder.draft_recordings == 2
    unrecorded = build_drafter("leaning-coupled")
    change(unrecorded.head)
    with patch_model(model, unrecorded, tree_size=8):
        generate(model, inputs, False)
        assert mmspec.stats(model).num_accepted_tokens == found


def test_more_pending_tokens_than_fit() -> None:
    """After many rounds without a draft they are read unrecorded, into the same keys and values."""
    model = build_model()
    inputs = build_inputs(model, 0, 2)
    expected = generate(model, inputs, False, max_new_tokens=60)
    drafter = build_drafter("leaning-coupled")
    propose = type(drafter).propose
    calls = iter(range(1000))

    def seldom(self: Any, state: Any, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        return propose(self, state, max_nodes if next(calls) % 40 in (0, 1, 2) else 1, active)

    with (
        recording(record_nothing) as recorder,
        in_parts(),
        patch_model(model, drafter, tree_size=8),
        mock.patch.object(type(drafter), "propose", seldom),
    ):
        assert torch.equal(generate(model, inputs, False, max_new_tokens=60), expected)
    assert recorder.draft_replays > 3


# --- calls whose rounds are not whole, or not recorded ----------------------------------------------------------------


class UsersProcessor(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


class UsersDrafter(EagleDrafter):
    """May read values on the host."""


def test_calls_in_parts() -> None:
    """Most processors that read the history, user code in their place, collected scores."""
    model = build_model()
    inputs = build_inputs(model, 0, 2)
    drafter = build_drafter("leaning-coupled")
    options: list[dict[str, Any]] = [
        {"no_repeat_ngram_size": 3},
        {"logits_processor": [UsersProcessor()]},
    ]
    scores = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 20, "do_sample": False}
    plain = [generate(model, inputs, True, **option) for option in options]
    plain_scores = model.generate(**inputs, **scores)
    free = generate(model, inputs, True)
    with recording(record_nothing) as counting:
        with patch_model(model, drafter, tree_size=8):
            for option, expected in zip(options, plain, strict=True):
                assert torch.equal(generate(model, inputs, True, **option), expected)
            found = model.generate(**inputs, **scores)
            assert torch.equal(found.sequences, plain_scores.sequences)
            assert all(map(torch.equal, found.scores, plain_scores.scores)) or len(found.scores) == 20
        assert not counting.whole_replays
        with patch_model(model, drafter, tree_size=8):
            assert torch.equal(generate(model, inputs, True), free)
        assert counting.whole_replays > 10


def test_rows_whose_padding_is_returned() -> None:
    """With a returned cache the padding of ended rows is decoded too, in rounds that are recorded in parts."""
    model = build_model()
    inputs = build_inputs(model, 0, 3)
    free = generate(model, inputs, False)
    options = {"eos_token_id": int(free[0, inputs["input_ids"].shape[1] + 6]), "return_dict_in_generate": True}
    plain = model.generate(**inputs, max_new_tokens=30, do_sample=False, **options)
    with recording(record_nothing) as counting, patch_model(model, build_drafter("leaning-decoupled"), tree_size=8):
        found = model.generate(**inputs, max_new_tokens=30, do_sample=False, **options)
    assert torch.equal(found.sequences, plain.sequences)
    for ours, theirs in zip(found.past_key_values.layers, plain.past_key_values.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-4)
    assert counting.whole_replays > 0 and counting.draft_replays > 0


def test_calls_that_are_not_recorded() -> None:
    """A cache of the user, and a user's hook."""
    model = build_model()
    inputs = build_inputs(model, 0, 1)
    expected = generate(model, inputs, False)
    with recording(record_nothing) as recorder, patch_model(model, "lookup", tree_size=4):
        assert torch.equal(generate(model, inputs, False, **{CACHE_ARGUMENT: DynamicCache()}), expected)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            generate(model, inputs, False)
        handle = model.get_decoder().layers[0].register_forward_hook(lambda module, args, output: None)
        assert torch.equal(generate(model, inputs, False), expected)
        handle.remove()
        assert recorder.recordings == 0
        assert torch.equal(generate(model, inputs, False), expected) and recorder.recordings == 1


def test_drafts_that_are_not_recorded() -> None:
    """Hooks, a subclass of the user, an architecture without recordings, and heads in C."""
    model = build_model()
    inputs = build_inputs(model, 0, 1)
    expected = generate(model, inputs, False)
    hooked = build_drafter("leaning-coupled")
    hooked.head.fc.register_forward_hook(lambda module, args, output: None)
    plain = build_drafter("leaning-coupled")
    users = UsersDrafter(plain.head, "coupled", num_layers=SPEC.layers)
    with recording(record_nothing) as recorder:
        for drafter in (hooked, users):
            with patch_model(model, drafter, tree_size=8):
                assert torch.equal(generate(model, inputs, False), expected)
        assert recorder.recordings > 0 and recorder.draft_recordings == 0
        with patch_model(model, plain, tree_size=8), torch.autocast("cpu", torch.bfloat16):
            generate(model, inputs, False)
        assert recorder.draft_recordings == 0
        with patch_model(model, plain, tree_size=8):
            assert torch.equal(generate(model, inputs, False), expected)


def test_what_is_recorded_by_default() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert recorder_for(cuda, "auto", False) is recorder_for(cuda, "recorded", True) is CudaGraphRecorder
    assert recorder_for(cuda, "auto", True) is None, "half precision is rounded differently"
    assert not any(recorder_for(cpu, backend, False) for backend in ("auto", "recorded", "torch", "c"))
    assert not any(recorder_for(cuda, backend, False) for backend in ("torch", "c"))


def test_on_a_cpu_nothing_is_recorded(caplog: pytest.LogCaptureFixture) -> None:
    model = build_model()
    inputs = build_inputs(model, 0, 1)
    expected = generate(model, inputs, False)
    with patch_model(model, "none", tree_size=1, backend="recorded"):
        assert all(torch.equal(generate(model, inputs, False), expected) for _ in range(2))
        assert not patch_state(model).lanes._lanes
    found = [record.message for record in caplog.records if "backend='recorded'" in record.message]
    assert len(found) == 1 and "runs eager (nothing records on cpu)" in found[0]


def test_a_text_that_grows_beyond_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmspec.targets.lanes.RESERVED_TOKENS", 0)
    model = build_model()
    inputs = build_inputs(model, 0, 1)
    expected = generate(model, inputs, False, max_new_tokens=300)
    with recording(record_nothing) as recorder, patch_model(model, "lookup", tree_size=4):
        assert torch.equal(generate(model, inputs, False, max_new_tokens=300), expected)
    assert recorder.recordings == 2


def test_the_controller_chooses_before_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """On devices whose scores are not read; on a CPU the size depends on the draft."""
    model = build_model()
    prompts = [build_inputs(model, seed, 2) for seed in range(3)]
    plain = [generate(model, inputs, True) for inputs in prompts]

    def run() -> Any:
        with recording(record_nothing) as counting, patch_model(model, build_drafter("leaning-decoupled")):
            for inputs, expected in zip(prompts, plain, strict=True):
                assert torch.equal(generate(model, inputs, True), expected)
        return counting

    assert run().whole_replays == 0
    monkeypatch.setattr("mmspec.economy.chooser.DEVICES_WITH_SCORES", frozenset())
    sizes = itertools.cycle((8, 4, 1))
    monkeypatch.setattr(Chooser, "choose_nodes", lambda *args: next(sizes))
    monkeypatch.setattr(Chooser, "plan", planned())
    counting = run()
    assert counting.whole_replays > 10 and counting.whole_recordings >= 2


def test_the_controllers_choose_freely() -> None:
    """Other numbers of levels and nodes, and rounds without a draft, in one call after another."""
    model = build_model()
    prompts = [build_inputs(model, seed, 2) for seed in range(3)]
    plain = [generate(model, inputs, True, max_new_tokens=60) for inputs in prompts]
    asked = itertools.count(1)
    drafts = planned(lambda chooser: next(asked) % 5 > 0)  # whatever drafts cost

    def most(chooser: Chooser) -> bool:
        is_drafted = bool(drafts(chooser))
        chooser.levels = 1 + next(asked) % 3
        return is_drafted

    with (
        recording(record_nothing) as recorder,
        patch_model(model, build_drafter("leaning-decoupled")),
        mock.patch.object(Chooser, "plan", most),
    ):
        for inputs, expected in zip(prompts, plain, strict=True):
            assert torch.equal(generate(model, inputs, True, max_new_tokens=60), expected)
    assert recorder.draft_recordings > 1


@pytest.mark.every(2)
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("num_ends", [1, 3])
def test_rows_that_end(sampled: bool, num_ends: int) -> None:
    """At other ids in every call, replayed: rows that have ended idle, and the others' rounds stay whole."""
    model = build_model()
    inputs = build_inputs(model, 0, 3)
    free = generate(model, inputs, sampled)[:, inputs["input_ids"].shape[1] :]
    ends = [sorted({int(free[row, 4 + 3 * row + turn]) for row in range(num_ends)}) for turn in range(3)]
    plain = [generate(model, inputs, sampled, eos_token_id=ids) for ids in ends]
    with recording(record_nothing) as counting:
        drafter = build_drafter("leaning-decoupled")
        with patch_model(model, drafter, tree_size=8):
            for ids, expected in zip(ends, plain, strict=True):
                assert torch.equal(generate(model, inputs, sampled, eos_token_id=ids), expected)
    assert counting.whole_replays > 8
    assert counting.whole_recordings <= len({len(ids) for ids in ends})
    assert any(bool((ids[:, -1] == model.generation_config.pad_token_id).any()) for ids in plain), "no row has ended"


def test_what_a_sampler_records() -> None:
    assert TreeSampler([], None).recording_key is not None
    assert TreeSampler([UsersProcessor()], None).recording_key is None
