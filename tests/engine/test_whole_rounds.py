"""Whole rounds as one recorded function: the same text as plain `generate`, what they launch, and when they are not."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from statistics import median
from typing import Any
from unittest import mock

import fuzz
import pytest
import torch
from forced_drafts import planned
from recorded_rounds import (
    CountingRecorder,
    HostCounter,
    KernelCounter,
    build_drafter,
    build_inputs,
    build_model,
    counted_rounds,
    fails_later,
    generate,
    is_whole,
    patched,
    recording,
    whole_only,
    wrong,
)
from recorders import record_nothing, record_trace
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import mmspec
from mmspec.drafters.heads.base import c_draft
from mmspec.drafters.heads.eagle.drafter import EagleDrafter
from mmspec.economy.chooser import Chooser
from mmspec.engine import round as engine_round
from mmspec.engine.graph import Recorder, StaticFunction
from mmspec.engine.loop import DecodeLoop
from mmspec.engine.output import OutputBuffer
from mmspec.engine.recorded import RecordedRounds
from mmspec.engine.recordings import NUM_CHECKED_REPLAYS, Recordings
from mmspec.engine.sampler import TreeSampler
from mmspec.targets import lanes
from mmspec.targets.hf import HFTarget

KINDS = ("coupled", "decoupled", "trimmed", "eagle3", "vispec", "flash", "chained", "parallel", "linked", "falcon")
KINDS += ("dspark", "dspark:1")
"""`decoupled`: MSD, `chained`: FLASH with a `MarkovHead`, `linked`: parallel with a correction, `dspark`: DFlash,
`dspark:1`: DSpark with two layers."""
TRACED = {("decoupled", 1, False), ("decoupled", 3, True), ("chained", 3, False), ("dspark:1", 1, True)}
"""(kind, batch size, sampled) that are traced in the fast tests: tracing takes a second."""
FAST_KINDS = ("decoupled", "chained", "dspark:1")
"""The three forms of drafts; the other kinds are slow tests."""
EVERY_KIND = [pytest.param(kind, marks=[] if kind in FAST_KINDS else pytest.mark.slow) for kind in KINDS]
FUZZ_SEED = 60_000
"""Of the first random call."""
FUSABLE_OPTIONS = {
    "repetition_penalty",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "max_new_tokens",
    "num_return_sequences",
}
"""Options of a random call that leave its rounds whole."""


@pytest.fixture(autouse=True)
def without_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: heads, checks of trees and accepted paths do not run in C."""
    monkeypatch.setattr(c_draft, "active_kernel", lambda: None)
    monkeypatch.setattr("mmspec.engine.tree.compiled_sanitize", lambda *args: None)
    monkeypatch.setattr("mmspec.engine.accept.compiled_accept_path", lambda *args: None)


@cache
def plain_calls(batch: int, sampled: bool, options: tuple[tuple[str, Any], ...]) -> tuple[list[Any], list[Tensor]]:
    """Prompts, and their ids by plain `generate`."""
    model = build_model()
    prompts = [build_inputs(model, seed, batch) for seed in range(2)]
    return prompts, [generate(model, inputs, sampled, **dict(options)) for inputs in prompts]


def run_calls(kind: str, batch: int, sampled: bool, options: tuple[tuple[str, Any], ...]) -> list[int]:
    """Compare calls with plain `generate`. Returns accepted tokens, rounds and drafted tokens."""
    prompts, plain = plain_calls(batch, sampled, options)
    model = build_model()
    with patched(model, build_drafter(f"leaning-{kind}"), tree_size=8):
        for inputs, expected in zip(prompts, plain, strict=True):
            assert torch.equal(generate(model, inputs, sampled, **dict(options)), expected)
        stats = mmspec.stats(model)
    return [stats.num_accepted_tokens, stats.rounds, stats.num_draft_tokens]


@cache
def run_in_parts(kind: str, batch: int, sampled: bool, options: tuple[tuple[str, Any], ...]) -> list[int]:
    """`run_calls` with rounds that are recorded in parts."""
    with recording(record_nothing), mock.patch("mmspec.engine.loop.can_record_rounds", return_value=False):
        return run_calls(kind, batch, sampled, options)


def check_calls(
    kind: str, batch: int, sampled: bool, recorder: Recorder = record_nothing, **options: Any
) -> CountingRecorder:
    """Compare calls with plain `generate`, and their drafts with those of rounds that are recorded in parts."""
    given = tuple((options | {"max_new_tokens": 24}).items())
    expected = run_in_parts(kind, batch, sampled, given)
    with recording(recorder) as counting:
        assert run_calls(kind, batch, sampled, given) == expected
    assert expected[0] > 0 or kind == "falcon", "whose drafts are rarely right"
    return counting


# --- the same text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "batch", "sampled"),
    [
        pytest.param(*case, marks=[] if case in TRACED else pytest.mark.slow)
        for case in itertools.product(KINDS, (1, 3), (False, True))
    ],
)
def test_a_recorded_round_replayed_on_other_prompts(kind: str, batch: int, sampled: bool) -> None:
    """Recorded in the first round of all and replayed since: a value that became a constant would be wrong."""
    counting = check_calls(kind, batch, sampled, whole_only(record_trace))
    assert counting.whole_recordings == 1 and counting.whole_replays > 20
    assert not counting.draft_recordings, "no draft outside of whole rounds"


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind in ("coupled", "trimmed", "parallel", "dspark") else [])
        for kind in KINDS
    ],
)
def test_drafts_equal_those_recorded_alone(kind: str) -> None:
    assert check_calls(kind, 3, sampled=True).whole_replays > 20


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8},
        {"top_p": 0.9, "top_k": 0},
        {"min_p": 0.1, "top_k": 5},
        {"repetition_penalty": 1.3, "temperature": 0.8},
    ],
)
def test_sampling_options(options: dict[str, Any]) -> None:
    assert check_calls("chained", 2, True, **options).whole_replays > 20


@pytest.mark.parametrize("batch", [1, 3])
def test_a_repetition_penalty_replayed_on_other_prompts(batch: int) -> None:
    """It reads the prompt, without the pads of each row, what was emitted, and the path to each node."""
    counting = check_calls("decoupled", batch, False, whole_only(record_trace), repetition_penalty=1.5)
    assert counting.whole_recordings == 1 and counting.whole_replays > 20


def test_other_options_are_other_recordings() -> None:
    model = build_model()
    inputs = build_inputs(model, 0, 1)
    options: list[dict[str, Any]] = [{"temperature": 0.7}, {"temperature": 1.4}, {"top_k": 3}, {"temperature": 0.7}]
    plain = [generate(model, inputs, True, **option) for option in options]
    with recording(record_nothing) as counting, patched(model, build_drafter("leaning-decoupled"), tree_size=8):
        for option, expected in zip(options, plain, strict=True):
            assert torch.equal(generate(model, inputs, True, **option), expected)
    assert counting.whole_recordings == 3


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("num_ends", [1, 3])
def test_rows_that_end(sampled: bool, num_ends: int) -> None:
    """At other ids in every call, replayed: rows that have ended idle, and the others' rounds stay whole."""
    model = build_model()
    inputs = build_inputs(model, 0, 3)
    free = generate(model, inputs, sampled)[:, inputs["input_ids"].shape[1] :]
    ends = [sorted({int(free[row, 4 + 3 * row + turn]) for row in range(num_ends)}) for turn in range(3)]
    plain = [generate(model, inputs, sampled, eos_token_id=ids) for ids in ends]
    with recording(whole_only(record_trace if sampled and num_ends > 1 else record_nothing)) as counting:
        drafter = build_drafter("leaning-decoupled")
        with patched(model, drafter, tree_size=8):
            for ids, expected in zip(ends, plain, strict=True):
                assert torch.equal(generate(model, inputs, sampled, eos_token_id=ids), expected)
    assert counting.whole_replays > 8
    assert counting.whole_recordings <= len({len(ids) for ids in ends})
    assert any(bool((ids[:, -1] == model.generation_config.pad_token_id).any()) for ids in plain), "no row has ended"


def test_fuzz() -> None:
    """Random calls of random model types whose rounds are whole, user code at every step included."""
    num_replays = 0
    for seed in range(FUZZ_SEED, FUZZ_SEED + 8):
        case = fuzz.draw_case(seed)
        options = {name: value for name, value in case.options.items() if name in FUSABLE_OPTIONS}
        changes: dict[str, Any] = {
            "cache": "",
            "biased": (),
            "processor": "",
            "prefix": "",
            "turns": "",
            "override": "",
        }
        drafter = f"head-{KINDS[seed % len(KINDS)].partition(':')[0]}"
        case = replace(case, drafter=drafter, nodes=8, options=options | {"max_new_tokens": 16}, **changes)
        with recording(record_nothing) as counting, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = fuzz.run_case(replace(case, spec=replace(case.spec, window=0)))
        assert not result.differences, result.report()
        num_replays += counting.whole_replays
    assert num_replays > 30


def test_the_controller_chooses_before_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """On devices whose scores are not read; on a CPU the size depends on the draft."""
    model = build_model()
    prompts = [build_inputs(model, seed, 2) for seed in range(3)]
    plain = [generate(model, inputs, True) for inputs in prompts]

    def run() -> CountingRecorder:
        with recording(record_nothing) as counting, patched(model, build_drafter("leaning-decoupled")):
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


@pytest.mark.parametrize("sampled", [False, True])
def test_within_inference_mode(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call has made in the user's inference mode is written to within it; recorded tensors outlive the call."""
    monkeypatch.setattr("mmspec.engine.output.INITIAL_STEPS", 4)  # the buffer grows between rounds too
    model = build_model()
    prompts = [build_inputs(model, seed, 3) for seed in range(2)]
    plain = [generate(model, inputs, sampled, repetition_penalty=1.1) for inputs in prompts]
    with recording(record_nothing) as counting, patched(model, build_drafter("leaning-decoupled"), tree_size=8):
        for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
            for inputs, expected in zip(prompts, plain, strict=True):
                with mode():
                    assert torch.equal(generate(model, inputs, sampled, repetition_penalty=1.1), expected)
        assert counting.whole_recordings == 1 and counting.whole_replays > 40


def test_nothing_remains_of_the_last_call() -> None:
    """Nan that a call leaves in every tensor does not reach the next one."""
    model = build_model()
    prompts = [build_inputs(model, seed, 2) for seed in range(2)]
    plain = [generate(model, inputs, True) for inputs in prompts]
    with recording(record_nothing) as counting, patched(model, build_drafter("leaning-decoupled"), tree_size=8):
        for inputs, expected in zip(prompts, plain, strict=True):
            assert torch.equal(generate(model, inputs, True), expected)
            (lane,) = mmspec.patching.patch_state(model).lanes._lanes.values()
            for group in lane.kv_cache.groups:
                group.fill_(torch.nan)
            (tensors,) = lane.recordings._attachments.values()
            tensors.named["keys_values"].fill_(torch.nan)
            for tensor in lane.recordings._fixed.values():
                tensor.zero_()
    assert counting.whole_recordings == 1 and counting.whole_replays > 20


# --- planted bugs -----------------------------------------------------------------------------------------------------


def _other_column(original: Any) -> Any:
    def faulty(tensors: Sequence[Tensor], slots: Tensor) -> Tensor:
        return original(tensors, slots.roll(1, 1))

    return faulty


def _stale_length(original: Any) -> Any:
    """Commits behind the shortest row, as if all rows had one length."""

    def faulty(groups: Any, lengths: Tensor, *args: Any) -> None:
        original(groups, lengths.clamp(max=int(lengths.min())), *args)

    return faulty


def _constant_length(original: Any) -> Any:
    """Attends to as many positions as there were in the first round."""
    first: list[list[int]] = []

    def faulty(self: HFTarget, *args: Any) -> Any:
        part = original(self, *args)
        first.append(part.lengths)
        return replace(part, lengths=first[0])

    return faulty


def _no_limit(original: Any) -> Any:
    def faulty(self: OutputBuffer, num_nodes: int) -> list[int]:
        return [num_nodes for _ in original(self, num_nodes)]

    return faulty


def _no_ignored_pads(original: Any) -> Any:
    def faulty(self: RecordedRounds, *args: Any) -> None:
        original(self, *args)
        self._ignored = [0] * len(self._ignored)

    return faulty


def _other_row(original: Any) -> Any:
    def faulty(tree: Any, sampled_ids: Tensor, *args: Any) -> Any:
        path, counts, tokens = original(tree, sampled_ids, *args)
        return path.roll(1, 0), counts, tokens

    return faulty


BUGS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "noise of another column": (engine_round, "read_noise", _other_column),
    "commit behind the shortest row": (lanes, "commit_nodes", _stale_length),
    "lengths of the first round": (HFTarget, "score_part", _constant_length),
    "limits of rows ignored": (OutputBuffer, "max_emit", _no_limit),
    "penalty of the prompt's pads": (RecordedRounds, "__init__", _no_ignored_pads),
    "path of another row": (engine_round, "accept_path", _other_row),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_caught(name: str) -> None:
    owner, attribute, bug = BUGS[name]
    options = {"repetition_penalty": 1.5} if name.startswith("penalty") else {}
    check_calls("decoupled", 3, True, **options)
    with (
        mock.patch.object(owner, attribute, bug(getattr(owner, attribute))),
        pytest.raises((AssertionError, IndexError)),
    ):
        check_calls("decoupled", 3, True, **options)


# --- when rounds are not whole ----------------------------------------------------------------------------------------


class UsersProcessor(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


class UsersCriterion(StoppingCriteria):
    """Ends every row after 20 tokens, and reads the ids at every step."""

    def __init__(self, prompt_length: int) -> None:
        self.length = prompt_length + 20

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


class ListStreamer(BaseStreamer):
    def __init__(self) -> None:
        self.puts: list[list[int]] = []

    def put(self, value: Tensor) -> None:
        self.puts.append(value.flatten().tolist())

    def end(self) -> None:
        pass


class UsersDrafter(EagleDrafter):
    """May read values on the host."""


def test_calls_in_parts() -> None:
    """Most processors that read the history, user code in their place, collected scores, a drafter of the user."""
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
    users = UsersDrafter(drafter.head, "coupled", num_layers=model.config.get_text_config().num_hidden_layers)
    free = generate(model, inputs, True)
    with recording(record_nothing) as counting:
        with patched(model, drafter, tree_size=8):
            for option, expected in zip(options, plain, strict=True):
                assert torch.equal(generate(model, inputs, True, **option), expected)
            found = model.generate(**inputs, **scores)
            assert torch.equal(found.sequences, plain_scores.sequences)
            assert all(map(torch.equal, found.scores, plain_scores.scores)) or len(found.scores) == 20
        with patched(model, users, tree_size=8):
            assert torch.equal(generate(model, inputs, True), free)
        assert not counting.whole_replays
        with patched(model, drafter, tree_size=8):
            assert torch.equal(generate(model, inputs, True), free)
        assert counting.whole_replays > 10


def test_user_code_between_rounds() -> None:
    """Streamers and criteria run between rounds, which stay whole."""
    model = build_model()
    inputs = build_inputs(model, 0, 1)
    length = inputs["input_ids"].shape[1]
    plain, ours = ListStreamer(), ListStreamer()
    expected = generate(model, inputs, True, streamer=plain, stopping_criteria=[UsersCriterion(length)])
    with recording(record_nothing) as counting, patched(model, build_drafter("leaning-decoupled"), tree_size=8):
        found = generate(model, inputs, True, streamer=ours, stopping_criteria=[UsersCriterion(length)])
    assert torch.equal(found, expected) and ours.puts == plain.puts and expected.shape[1] == length + 20
    assert counting.whole_replays > 5


def test_rows_whose_padding_is_returned() -> None:
    """With a returned cache the padding of ended rows is decoded too, in rounds that are recorded in parts."""
    model = build_model()
    inputs = build_inputs(model, 0, 3)
    free = generate(model, inputs, False)
    options = {"eos_token_id": int(free[0, inputs["input_ids"].shape[1] + 6]), "return_dict_in_generate": True}
    plain = model.generate(**inputs, max_new_tokens=30, do_sample=False, **options)
    with recording(record_nothing) as counting, patched(model, build_drafter("leaning-decoupled"), tree_size=8):
        found = model.generate(**inputs, max_new_tokens=30, do_sample=False, **options)
    assert torch.equal(found.sequences, plain.sequences)
    for ours, theirs in zip(found.past_key_values.layers, plain.past_key_values.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-4)
    assert counting.whole_replays > 0 and counting.draft_replays > 0


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


@pytest.mark.parametrize("recorder", [fails_at_once, fails_later, fails_afterwards, wrong])
def test_a_failure_costs_speed_only(recorder: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    """One line; rounds are recorded in parts from then on, the one that failed included."""
    model = build_model()
    inputs = build_inputs(model, 0, 2)
    expected = generate(model, inputs, True)
    drafter = build_drafter("leaning-decoupled")
    with (
        recording(whole_only(recorder)) as counting,
        patched(model, drafter, tree_size=8),
        caplog.at_level(logging.WARNING),
    ):
        for _ in range(3):
            assert torch.equal(generate(model, inputs, True), expected)
    assert counting.whole_recordings == 1, "not tried again"
    assert counting.draft_replays > 20 and counting.replays > 20
    assert len([record for record in caplog.records if "in parts" in record.message]) == 1


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
        patched(model, build_drafter("leaning-decoupled"), tree_size=8),
        mock.patch.object(TreeSampler, "sample_nodes", sometimes_nan),
        caplog.at_level(logging.WARNING),
    ):
        assert torch.equal(generate(model, inputs, True), expected)
    assert counting.whole_replays > 3
    assert len([record for record in caplog.records if "decoded without drafts" in record.message]) == 1


# --- proofs without a GPU ---------------------------------------------------------------------------------------------


@contextmanager
def whole_runs() -> Iterator[list[tuple[StaticFunction, list[Tensor], int]]]:
    """Context that collects (function, tensors, number of inputs) of whole rounds."""
    found: list[tuple[StaticFunction, list[Tensor], int]] = []
    run = Recordings.run

    def spy(self: Recordings, owner: Any, key: Any, function: Any, state: Any, inputs: Any) -> Any:
        if is_whole(function):
            found.append((function, [*state, *inputs], len(inputs)))
        return run(self, owner, key, function, state, inputs)

    with mock.patch.object(Recordings, "run", spy):
        yield found


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_round_on_the_meta_device_reads_and_makes_nothing(kind: str, sampled: bool) -> None:
    """With every option of the sampling that may be recorded, and end ids."""
    model, drafter = build_model(), build_drafter(f"leaning-{kind}")
    options: dict[str, Any] = {"repetition_penalty": 1.2}
    options |= {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01} if sampled else {}
    with recording(record_nothing), patched(model, drafter, tree_size=8), whole_runs() as runs:
        generate(model, build_inputs(model, 0, 2), sampled, max_new_tokens=5, eos_token_id=[1, 2], **options)
    model.to("meta")
    drafter.head.to("meta")
    function, tensors, _ = runs[-1]
    tensors = [tensor.to("meta") for tensor in tensors]
    with torch.no_grad():
        function(*tensors)  # path tables are made once
        with HostCounter() as counter:
            outputs = function(*tensors)
    assert counter.counts == {"reads": 0, "made": 0}
    assert all(output.is_meta and len(output) == 2 for output in outputs)


def count_launches(kind: str, batch: int, sampled: bool) -> list[tuple[int, int]]:
    """(kernels outside of recordings, copies of a recording's inputs and outputs) of the rounds of a call."""
    model, drafter = build_model(), build_drafter(f"leaning-{kind}")
    inputs = build_inputs(model, 0, batch)
    rounds: list[tuple[int, int]] = []
    counter = KernelCounter()
    inner = copies = 0
    round_, run = DecodeLoop.round, Recordings.run

    def counted_round(self: DecodeLoop, state: Any) -> None:
        nonlocal inner, copies
        counter.count = inner = copies = 0
        with counter:
            round_(self, state)
        rounds.append((counter.count - inner, copies))

    def counted_run(self: Recordings, *args: Any) -> Any:
        nonlocal inner, copies
        before = counter.count
        outputs = run(self, *args)
        inner += counter.count - before
        copies += len(args[-1]) + len(outputs)
        return outputs

    with (
        recording(record_nothing),
        patched(model, drafter, tree_size=8),
        mock.patch.object(DecodeLoop, "round", counted_round),
        mock.patch.object(Recordings, "run", counted_run),
    ):
        generate(model, inputs, sampled)
    return rounds[NUM_CHECKED_REPLAYS + 1 : -2]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["decoupled", "chained", "dspark:1"])
def test_launches_of_a_round(kind: str, sampled: bool) -> None:
    """One kernel outside of the recording (the output's ids), and when sampling two per new step: of the generator that
    looks ahead, and of the shared one, which no call may set back. Besides them the copies of the recording's inputs
    and outputs; the noise stays where it is."""
    rounds = count_launches(kind, 1, sampled)
    assert len(rounds) > 10
    assert median(outside for outside, _ in rounds) <= (5 if sampled else 1)
    assert max(copies for _, copies in rounds) <= 8 + 2 * (kind == "dspark:1")


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_a_round_waits_once(sampled: bool) -> None:
    """One read of values and one copy to the device per round, of three rows."""
    model = build_model()
    with (
        recording(record_nothing),
        patched(model, build_drafter("leaning-decoupled"), tree_size=8),
        counted_rounds(DecodeLoop) as rounds,
        mock.patch.object(DecodeLoop, "_run_eager", side_effect=DecodeLoop._run_eager, autospec=True) as in_parts,
    ):
        generate(model, build_inputs(model, 0, 3), sampled)
    settled = [one.counts for one in rounds[NUM_CHECKED_REPLAYS + 1 : -2]]
    assert len(settled) > 10 and all(counts == {"reads": 1, "made": 1} for counts in settled)
    assert in_parts.call_count <= 2, "the last tokens, of which no draft is needed"


def test_what_a_sampler_records() -> None:
    assert TreeSampler([], None).recording_key is not None
    assert TreeSampler([UsersProcessor()], None).recording_key is None
