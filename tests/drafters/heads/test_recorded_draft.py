"""Recorded drafts: the same text and the same drafts as unrecorded, on other prompts, and what a draft costs a GPU."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any
from unittest import mock

import fuzz
import pytest
import torch
from forced_drafts import planned
from recorded_rounds import (
    SPEC,
    HostCounter,
    KernelCounter,
    build_drafter,
    build_inputs,
    build_model,
    counted_rounds,
    fails_later,
    generate,
    patched,
    recording,
    wrong,
)
from recorders import record_nothing, record_trace
from torch import Tensor

import mmspec
from mmspec.cpu.kernel_timing import IN_C, KernelChoices
from mmspec.drafters.heads.base import c_draft
from mmspec.drafters.heads.base.recorded import DraftFunction, RecordedDraft
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.heads.eagle.drafter import EagleDrafter
from mmspec.drafters.heads.eagle.head import EagleHead
from mmspec.economy.chooser import Chooser
from mmspec.engine.graph import Recorder, Replay, StaticFunction
from mmspec.engine.kv_cache import RecordedKVCache
from mmspec.engine.loop import DecodeLoop
from mmspec.engine.recordings import NUM_CHECKED_REPLAYS, Recordings
from mmspec.engine.tree import DraftTree
from mmspec.interfaces.round import DraftPart, ScorePart

KINDS = (
    "coupled",
    "decoupled",
    "trimmed",
    "eagle3",
    "vispec",
    "flash",
    "chained",
    "parallel",
    "linked",
    "falcon",
    "dspark",
    "dspark:1",
    "dspark:2",
)
"""`coupled`: EAGLE, `decoupled`: MSD, `chained`: FLASH with a `MarkovHead`, `linked`: parallel with a correction,
`dspark`: DFlash, `dspark:1`: DSpark with two layers, `dspark:2`: with windows in two of three layers."""
FUZZ_SEED = 7000
"""Of the first case."""
TRACED = {
    ("decoupled", 1, False),
    ("coupled", 3, True),
    ("chained", 1, True),
    ("flash", 3, False),
    ("falcon", 3, True),
    ("dspark:1", 3, True),
}
"""(kind, batch size, sampled) whose drafts are traced in the fast tests: tracing takes a second."""


@pytest.fixture(autouse=True)
def without_compiled_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU some heads run in C instead. Whole rounds, of which drafts are a part, have their own tests."""
    monkeypatch.setattr(c_draft, "active_kernel", lambda: None)
    monkeypatch.setattr("mmspec.engine.loop.can_record_rounds", lambda *args: False)


def drafts_only(recorder: Recorder) -> Recorder:
    """Records drafts by `recorder`; the rounds of the target run as they are."""

    def record(function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Replay:
        return (record_nothing if isinstance(function, ScorePart) else recorder)(function, state, inputs)

    return record


trace_drafts = drafts_only(record_trace)


def replays_only(test: Callable[[], Any]) -> Any:
    """The result of a test in which no draft runs in the head's own code but to be recorded and checked."""
    done: list[bool] = []

    def spy(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            result = method(*args)
            done.append(bool(result))
            return result

        return call

    with mock.patch.object(RecordedDraft, "tree", spy(RecordedDraft.tree)):
        result = test()
    assert all(done) and len(done) > 10, "a draft was not replayed"
    return result


# --- the same text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "batch", "sampled"),
    [
        pytest.param(*case, marks=[] if case in TRACED else pytest.mark.slow)
        for case in itertools.product(KINDS, (1, 3), (False, True))
    ],
)
def test_a_recorded_draft_replayed_on_other_prompts(kind: str, batch: int, sampled: bool) -> None:
    """The text of plain `generate`, and as many accepted tokens as unrecorded: a value that became a constant would be
    wrong in the other prompts."""
    model = build_model()
    prompts = [build_inputs(model, seed, batch) for seed in range(3)]
    plain = [generate(model, inputs, sampled, repetition_penalty=1.1) for inputs in prompts]

    def run() -> list[int]:
        with patched(model, build_drafter(f"leaning-{kind}"), tree_size=8):
            for inputs, expected in zip(prompts, plain, strict=True):
                assert torch.equal(generate(model, inputs, sampled, repetition_penalty=1.1), expected)
            return [mmspec.stats(model).num_accepted_tokens, mmspec.stats(model).rounds]

    expected = run()
    with recording(trace_drafts) as recorder:
        found = replays_only(run)
    assert (recorder.recordings, recorder.draft_recordings) == (1, 1), "one recording of each function"
    assert recorder.draft_replays > 20
    assert found == expected and found[0] > 0


def compare_drafts(kind: str, sampled: bool) -> None:
    """Compare every recorded draft of two calls, of three rows of different lengths, with the same unrecorded.

    In double precision, where two nodes have equal scores only if they are the same: sums of a recorded draft are taken
    in another order, and on some processors a near-tie of single precision falls otherwise.
    """
    model, drafter = build_model().double(), build_drafter(f"leaning-{kind}")
    drafter.head.double()
    found = 0
    differences: list[AssertionError] = []  # a drafter that raises is dropped, and the call goes on
    tree = RecordedDraft.tree

    def compare(self: RecordedDraft, state: DraftState, *args: int) -> DraftTree | None:
        nonlocal found
        before = copy.copy(state)
        before.kv_cache = copy.deepcopy(state.kv_cache)
        recorded = tree(self, state, *args)
        drafter.read_pending(before)
        plain = drafter.draft_tree(before, *args)
        try:
            assert recorded is not None and plain.scores is not None
            assert torch.equal(recorded.tokens, plain.tokens) and torch.equal(recorded.parents, plain.parents)
            torch.testing.assert_close(recorded.scores, plain.scores, rtol=1e-6, atol=1e-8)
            torch.testing.assert_close(state.last_hidden, before.last_hidden, rtol=1e-11, atol=1e-12)
            assert state.next_positions == before.next_positions and state.kv_cache.seq_lens == before.kv_cache.seq_lens
        except AssertionError as error:
            differences.append(error)
        found += 1
        return recorded

    with (
        recording(record_nothing),
        patched(model, drafter),
        mock.patch.object(RecordedDraft, "tree", compare),
        mock.patch.object(Chooser, "plan", planned()),  # whatever it costs
    ):
        for seed in range(2):
            generate(model, build_inputs(model, seed, 3), sampled)
    assert found > 5
    if differences:
        raise differences[0]


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_equal_unrecorded_ones(kind: str) -> None:
    compare_drafts(kind, sampled=KINDS.index(kind) % 2 == 0)


def _stale_lengths(original: Any) -> Any:
    def faulty(self: RecordedKVCache, layers: Any, lengths: Tensor, *args: Any) -> None:
        original(self, layers, lengths, *args)
        self._lengths = lengths.clamp(max=int(lengths.min()))  # a number of the host, here of the shortest row

    return faulty


def _noise_of_the_next_token(original: Any) -> Any:
    def faulty(self: DraftFunction, named: Any, lengths: Tensor, noise: Tensor | None) -> DraftState:
        return original(self, named, lengths, None if noise is None else noise.roll(1, 1))

    return faulty


@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [
        (RecordedKVCache, "__init__", _stale_lengths),
        (DraftFunction, "_state", _noise_of_the_next_token),
    ],
)
def test_planted_bugs_are_caught(owner: type, name: str, bug: Callable[[Any], Any]) -> None:
    with mock.patch.object(owner, name, bug(getattr(owner, name))), pytest.raises(AssertionError):
        compare_drafts("decoupled", sampled=True)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if ":" not in kind])
def test_fuzz(kind: str) -> None:
    """Random calls of random model types: compressed prompts, padding, processors, stopping rules, user code."""
    with recording(record_nothing):
        for seed in range(FUZZ_SEED, FUZZ_SEED + 2):
            result = fuzz.run_seed(seed, drafter=f"head-{kind}")
            assert not result.differences, result.report()


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
        patched(model, build_drafter("leaning-decoupled")),
        mock.patch.object(Chooser, "plan", most),
    ):
        for inputs, expected in zip(prompts, plain, strict=True):
            assert torch.equal(generate(model, inputs, True, max_new_tokens=60), expected)
    assert recorder.draft_recordings > 1


def test_more_pending_tokens_than_fit() -> None:
    """After many rounds without a draft they are read unrecorded, into the same keys and values."""
    model = build_model()
    inputs = build_inputs(model, 0, 2)
    expected = generate(model, inputs, False, max_new_tokens=120)
    drafter = build_drafter("leaning-coupled")
    propose = type(drafter).propose
    calls = iter(range(1000))

    def seldom(self: Any, state: Any, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        is_due = next(calls) % 80 in (0, 1, 2)
        return propose(self, state, max_nodes if is_due else 1, active)

    with (
        recording(record_nothing) as recorder,
        patched(model, drafter, tree_size=8),
        mock.patch.object(type(drafter), "propose", seldom),
    ):
        assert torch.equal(generate(model, inputs, False, max_new_tokens=120), expected)
    assert recorder.draft_replays > 5


# --- between calls ----------------------------------------------------------------------------------------------------


def test_nothing_remains_of_the_last_call() -> None:
    """A recording serves calls with other banned ids, temperatures and lengths; nan of one does not reach another."""
    model = build_model()
    prompts = [build_inputs(model, seed, 2) for seed in range(2)]
    options: list[dict[str, Any]] = [{"temperature": 0.7}, {"temperature": 1.5, "max_new_tokens": 20}]

    def run(poison: bool) -> list[int]:
        accepted = []
        with patched(model, build_drafter("leaning-decoupled"), tree_size=8):
            for inputs, option in zip(prompts, options, strict=True):
                generate(model, inputs, True, **option)
                accepted.append(mmspec.stats(model).num_accepted_tokens)
                if poison:
                    (lane,) = mmspec.patching.patch_state(model).lanes._lanes.values()
                    (tensors,) = lane.recordings._attachments.values()
                    for tensor in tensors.named.values():
                        if tensor.is_floating_point() and tensor.shape != tensors.named["cos"].shape:
                            tensor.fill_(torch.nan)
        return accepted

    expected = run(poison=False)
    with recording(record_nothing) as recorder:
        assert run(poison=True) == expected
    assert recorder.draft_recordings == 1


def replace_weight(head: EagleHead) -> None:
    head.fc.weight = torch.nn.Parameter(head.fc.weight.detach() * 0.2)


def edit_weight(head: EagleHead) -> None:
    with torch.no_grad():
        head.fc.weight.mul_(0.2)


@pytest.mark.parametrize("change", [replace_weight, edit_weight])
def test_a_changed_head_is_recorded_anew(change: Callable[[EagleHead], None]) -> None:
    model = build_model()
    inputs = build_inputs(model, 0, 1)
    drafter = build_drafter("leaning-coupled")
    with recording(record_nothing) as recorder, patched(model, drafter, tree_size=8):
        first = generate(model, inputs, False)
        before = mmspec.stats(model).num_accepted_tokens
        change(drafter.head)
        assert torch.equal(generate(model, inputs, False), first)
        found = mmspec.stats(model).num_accepted_tokens - before
    assert recorder.draft_recordings == 2
    unrecorded = build_drafter("leaning-coupled")
    change(unrecorded.head)
    with patched(model, unrecorded, tree_size=8):
        generate(model, inputs, False)
        assert mmspec.stats(model).num_accepted_tokens == found


def test_two_drafters_of_one_model() -> None:
    model = build_model()
    inputs = build_inputs(model, 0, 2)
    drafters = [build_drafter("leaning-coupled"), build_drafter("leaning-falcon"), build_drafter("leaning-flash")]
    expected = generate(model, inputs, False)
    with recording(record_nothing) as recorder, patched(model, drafters[0], tree_size=8):
        for drafter in (*drafters, *drafters):
            assert torch.equal(generate(model, inputs, False, mmspec={"drafter": drafter}), expected)
    assert recorder.draft_recordings == 6, "those of two drafters stay, the third drops the first"


def test_a_drafter_is_copied_without_its_recordings() -> None:
    model = build_model()
    inputs = build_inputs(model, 0, 1)
    drafter = build_drafter("leaning-flash")
    with recording(record_nothing), patched(model, drafter, tree_size=8):
        expected = generate(model, inputs, False)
    with patched(model, copy.deepcopy(drafter), tree_size=8):
        assert torch.equal(generate(model, inputs, False), expected)


# --- when nothing is recorded -----------------------------------------------------------------------------------------


class UsersDrafter(EagleDrafter):
    """May read values on the host."""


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
            with patched(model, drafter, tree_size=8):
                assert torch.equal(generate(model, inputs, False), expected)
        assert recorder.recordings > 0 and recorder.draft_recordings == 0
        with patched(model, plain, tree_size=8), torch.autocast("cpu", torch.bfloat16):
            generate(model, inputs, False)
        assert recorder.draft_recordings == 0
        with patched(model, plain, tree_size=8):
            assert torch.equal(generate(model, inputs, False), expected)


@pytest.mark.parametrize("recorder", [drafts_only(fails_later), drafts_only(wrong)])
def test_a_failure_costs_speed_only(recorder: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The rounds of the target stay recorded."""
    model = build_model()
    inputs = build_inputs(model, 0, 2)
    expected = generate(model, inputs, True)
    drafter = build_drafter("leaning-decoupled")
    with recording(recorder) as counting, patched(model, drafter, tree_size=8), caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert torch.equal(generate(model, inputs, True), expected)
    assert counting.draft_recordings <= 1 and counting.replays > 20, "not tried again"
    assert len([record for record in caplog.records if "drafts are not recorded" in record.message]) == 1


def test_time_of_recording_is_no_cost_of_a_draft() -> None:
    """Neither of the drafter's levels nor of the round, by which controllers choose."""
    model = build_model()
    inputs = build_inputs(model, 0, 1)

    def slow(function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Replay:
        (lane,) = mmspec.patching.patch_state(model).lanes._lanes.values()
        lane.recordings.setup_s += 1000.0
        return record_nothing(function, state, inputs)

    with recording(slow), patched(model, build_drafter("leaning-decoupled"), tree_size=8):
        generate(model, inputs, False)
        stats = mmspec.stats(model)
    assert stats.draft_s < 0 and stats.score_s < 0, "less the 1000 s each that the recorder claims"


# --- proofs without a GPU ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DraftRun:
    """One run of a recorded function."""

    function: StaticFunction
    tensors: list[Tensor]
    num_outputs: int


@contextmanager
def draft_runs() -> Iterator[list[DraftRun]]:
    """Context that collects the runs of recorded drafts."""
    found: list[DraftRun] = []
    run = Recordings.run

    def spy(self: Recordings, owner: Any, key: Any, function: StaticFunction, state: Any, inputs: Any) -> Any:
        outputs = run(self, owner, key, function, state, inputs)
        if not isinstance(function, ScorePart):
            found.append(DraftRun(function, [*state, *inputs], len(outputs)))
        return outputs

    with mock.patch.object(Recordings, "run", spy):
        yield found


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_on_the_meta_device_reads_and_makes_nothing(kind: str, sampled: bool) -> None:
    """Two rows of different lengths."""
    model, drafter = build_model(), build_drafter(f"leaning-{kind}")
    with recording(record_nothing), patched(model, drafter, tree_size=8), draft_runs() as runs:
        generate(model, build_inputs(model, 0, 2), sampled, max_new_tokens=4)
    model.to("meta")
    drafter.head.to("meta")
    functions = {type(run.function): run for run in runs}
    assert functions.keys() == {DraftPart}
    for run in functions.values():
        tensors = [tensor.to("meta") for tensor in run.tensors]
        with torch.no_grad():
            run.function(*tensors)  # path tables are made once
            with HostCounter() as counter:
                outputs = run.function(*tensors)
        assert counter.counts == {"reads": 0, "made": 0} and len(outputs) == run.num_outputs
        assert all(output.is_meta and len(output) == 2 for output in outputs)


# --- copies and kernels -----------------------------------------------------------------------------------------------


@pytest.mark.every(3)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["decoupled", "chained", "falcon"])
def test_a_whole_round_waits_once(kind: str, sampled: bool) -> None:
    """One read of values per round, drafter included, and one copy to the device; one more for the steps of the noise
    of rows of different lengths, and one more once a row has ended."""
    model = build_model()
    with (
        recording(record_nothing),
        patched(model, build_drafter(f"leaning-{kind}"), tree_size=8),
        counted_rounds(DecodeLoop) as rounds,
    ):
        generate(model, build_inputs(model, 0, 3), sampled)
    settled = [one.counts for one in rounds[NUM_CHECKED_REPLAYS + 1 :]]
    assert len(settled) > 10 and {counts["reads"] for counts in settled} == {1}
    assert median(counts["made"] for counts in settled) == 1 + sampled
    assert max(counts["made"] for counts in settled) <= 2 + sampled


@pytest.mark.every(3)
@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("kind", ["decoupled", "trimmed", "eagle3", "chained", "parallel", "falcon", "dspark:1"])
def test_no_copy_to_the_device_waits(kind: str, recorded: bool) -> None:
    """Sampled rows of different lengths, some of which end: whatever the host sends comes from pinned memory."""
    model = build_model()
    inputs = build_inputs(model, 0, 3)
    model.generation_config.eos_token_id = generate(model, inputs, True)[1, -9].item()
    with (
        recording(record_nothing) if recorded else contextlib.nullcontext(),
        patched(model, build_drafter(f"leaning-{kind}"), tree_size=8, backend="recorded" if recorded else "torch"),
        counted_rounds(DecodeLoop) as rounds,
    ):
        generate(model, inputs, True)
    settled = [one.num_blocking for one in (rounds[NUM_CHECKED_REPLAYS + 1 :] if recorded else rounds[2:])]
    assert len(settled) > 5 and not any(settled)


def choose_c(self: KernelChoices, key: Any, names: Sequence[str], *args: Any) -> str:
    """The kernel of linear layers that is not counted, whichever is faster here."""
    return IN_C if IN_C in names else names[0]


@cache
def count_kernels(kind: str | None, num_layers: int) -> tuple[int, int]:
    """Kernels of a round with a recorded draft, and those outside of recordings (medians). None: of a plain step."""
    spec = dataclasses.replace(SPEC, layers=num_layers)
    model = build_model(spec)
    inputs = build_inputs(model, 0, 1)
    if kind is None:
        counts = []
        for num_tokens in (4, 5):
            with KernelCounter() as counter:
                generate(model, inputs, False, max_new_tokens=num_tokens)
            counts.append(counter.count)
        return counts[1] - counts[0], 0
    drafter = build_drafter(f"leaning-{kind}", spec)
    drafter.top_k = 8  # as on a GPU
    if kind == "decoupled":
        drafter.max_depth = drafter.max_levels = 6
    rounds = []
    counter = KernelCounter()
    inner, round_, run = 0, DecodeLoop.round, Recordings.run

    def counted_round(self: DecodeLoop, state: Any) -> None:
        nonlocal inner
        counter.count = inner = 0
        with counter:
            round_(self, state)
        rounds.append((counter.count, counter.count - inner))

    def counted_run(self: Recordings, *args: Any) -> Any:
        nonlocal inner
        before = counter.count
        outputs = run(self, *args)
        inner += counter.count - before
        return outputs

    with (
        recording(record_nothing),
        mock.patch.object(KernelChoices, "used", return_value=None),
        mock.patch.object(KernelChoices, "choose", choose_c),
        patched(model, drafter, tree_size=16),
        mock.patch.object(DecodeLoop, "round", counted_round),
        mock.patch.object(Recordings, "run", counted_run),
    ):
        generate(model, inputs, False, max_new_tokens=24)
    settled = rounds[NUM_CHECKED_REPLAYS + 1 : -1]
    assert len(settled) > 2
    return int(median(total for total, _ in settled)), int(median(outside for _, outside in settled))


@pytest.mark.parametrize(("kind", "limit"), [("chained", 1.10), ("decoupled", 1.25)])
def test_kernels_of_a_round(kind: str, limit: float) -> None:
    """At most 10% (FLASH) and 25% (MSD, six levels) more than a plain step, for a target of 32 layers."""

    def at_32(kind: str | None, part: int) -> int:
        few, more = (count_kernels(kind, num_layers)[part] for num_layers in (1, 2))
        return few + 31 * (more - few)

    plain, total, outside = at_32(None, 0), at_32(kind, 0), at_32(kind, 1)
    assert total <= limit * plain, (total, plain)
    assert outside < 100, "launched one by one"
