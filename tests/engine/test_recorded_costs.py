"""What recorded rounds cost a GPU, counted without one: reads of values, copies to the device, kernels launched one by
one; and that the time of recording is no cost of a round."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any
from unittest import mock

import pytest
import torch
from fuzz import patch_model
from recorded_rounds import (
    KINDS,
    SPEC,
    HostCounter,
    KernelCounter,
    build_drafter,
    build_inputs,
    build_model,
    generate,
    in_parts,
    is_whole,
    recording,
    without_compiled_code,
)
from recorders import record_nothing
from torch import Tensor

import mmspec
from mmspec import backend
from mmspec.economy.kernels import IN_C, KernelChoices
from mmspec.engine.graph import Replay, StaticFunction
from mmspec.engine.loop import DecodeLoop
from mmspec.engine.recordings import NUM_CHECKED_REPLAYS, Recordings

FAST_KINDS = ("decoupled", "chained", "dspark:1", "falcon")
"""The forms of drafts; the other kinds are slow tests."""
EVERY_KIND = [pytest.param(kind, marks=[] if kind in FAST_KINDS else pytest.mark.slow) for kind in KINDS]
SAMPLED = pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
_ = pytest.fixture(autouse=True)(without_compiled_code)


@dataclass
class RoundCosts:
    """Of one round.

    Attributes:
        kernels: all that it launches.
        outside: those outside of recordings.
        copies: inputs and outputs of recordings.
        reads: values read by the host.
        made: tensors made from values of the host.
        blocking: those of `made` that on a GPU wait.
    """

    kernels: int = 0
    outside: int = 0
    copies: int = 0
    reads: int = 0
    made: int = 0
    blocking: int = 0


def count_rounds(
    drafter: Any, batch: int, sampled: bool, whole: bool = True, recorded: bool = True, layers: int = 2, **options: Any
) -> list[RoundCosts]:
    """The costs of the rounds of a call, but for those in which recordings are made and checked."""
    model = build_model(dataclasses.replace(SPEC, layers=layers))
    inputs = build_inputs(model, 0, batch)
    rounds: list[RoundCosts] = []
    kernels, round_, run = KernelCounter(), DecodeLoop.round, Recordings.run
    inner = copies = 0

    def counted_round(self: DecodeLoop, state: Any) -> None:
        nonlocal inner, copies
        kernels.count = inner = copies = 0
        with HostCounter() as host, kernels:
            round_(self, state)
        rounds.append(
            RoundCosts(kernels.count, kernels.count - inner, copies, **host.counts, blocking=host.num_blocking)
        )

    def counted_run(self: Recordings, *args: Any) -> Any:
        nonlocal inner, copies
        before = kernels.count
        outputs = run(self, *args)
        inner += kernels.count - before
        copies += len(args[-1]) + len(outputs)
        return outputs

    with (
        recording(record_nothing) if recorded else nullcontext(),
        nullcontext() if whole else in_parts(),
        patch_model(model, drafter, tree_size=options.pop("tree_size", 8), backend="recorded" if recorded else "torch"),
        mock.patch.object(DecodeLoop, "round", counted_round),
        mock.patch.object(Recordings, "run", counted_run),
    ):
        generate(model, inputs, sampled, **options)
    settled = rounds[NUM_CHECKED_REPLAYS + 1 :] if recorded else rounds[2:]
    assert len(settled) > 4
    return settled


@pytest.mark.every(2)
@SAMPLED
@pytest.mark.parametrize("kind", ["decoupled", "chained", "dspark:1"])
def test_launches_of_a_round(kind: str, sampled: bool) -> None:
    """One kernel outside of the recording (the output's ids), and when sampling two per new step: of the generator that
    looks ahead, and of the shared one, which no call may set back. Besides them the copies of the recording's inputs
    and outputs; the noise stays where it is."""
    rounds = count_rounds(build_drafter(f"leaning-{kind}"), 1, sampled)[:-2]
    assert median(one.outside for one in rounds) <= (5 if sampled else 1)
    assert max(one.copies for one in rounds) <= 8 + 2 * (kind == "dspark:1")


@pytest.mark.every(2)
@SAMPLED
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "parts"])
def test_a_round_waits_once(whole: bool, sampled: bool) -> None:
    """One read of values per round of three rows, drafter included, and one copy to the device; in parts one more for
    the steps of the noise of rows of different lengths, and one more once a row has ended."""
    rounds = count_rounds(build_drafter("leaning-decoupled"), 3, sampled, whole)
    rounds = rounds[:-2] if whole else rounds  # the last tokens, of which no draft is needed
    assert {one.reads for one in rounds} == {1}
    made = [one.made for one in rounds]
    assert median(made) == 1 + (sampled and not whole) and max(made) <= (1 if whole else 2 + sampled)


@pytest.mark.every(3)
@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("kind", ["decoupled", "trimmed", "eagle3", "chained", "parallel", "falcon", "dspark:1"])
def test_no_copy_to_the_device_waits(kind: str, recorded: bool) -> None:
    """Sampled rows of different lengths, some of which end: whatever the host sends comes from pinned memory."""
    model = build_model()
    end = generate(model, build_inputs(model, 0, 3), True)[1, -9].item()
    drafter = build_drafter(f"leaning-{kind}")
    rounds = count_rounds(drafter, 3, True, whole=False, recorded=recorded, eos_token_id=end)
    assert not any(one.blocking for one in rounds)


def choose_c(self: KernelChoices, key: Any, names: Sequence[str], *args: Any) -> str:
    """The kernel of linear layers that is not counted, whichever is faster here."""
    return IN_C if IN_C in names else names[0]


@cache
def count_kernels(kind: str | None, num_layers: int) -> tuple[int, int]:
    """Kernels of a round with a recorded draft, and those outside of recordings (medians). None: of a plain step."""
    spec = dataclasses.replace(SPEC, layers=num_layers)
    if kind is None:
        model, counts = build_model(spec), []
        for num_tokens in (4, 5):
            with KernelCounter() as counter:
                generate(model, build_inputs(model, 0, 1), False, max_new_tokens=num_tokens)
            counts.append(counter.count)
        return counts[1] - counts[0], 0
    drafter = build_drafter(f"leaning-{kind}", spec)
    drafter.top_k = 8  # as on a GPU
    if kind == "decoupled":
        drafter.max_depth = drafter.max_levels = 6
    with (
        mock.patch.object(KernelChoices, "used", return_value=None),
        mock.patch.object(KernelChoices, "choose", choose_c),
        mock.patch.object(backend, "SMALLEST_REPLACED", 0),
    ):
        rounds = count_rounds(drafter, 1, False, False, layers=num_layers, tree_size=16, max_new_tokens=32)[:-1]
    return int(median(one.kernels for one in rounds)), int(median(one.outside for one in rounds))


@pytest.mark.parametrize(("kind", "limit"), [("chained", 1.10), ("decoupled", 1.25)])
def test_kernels_of_a_round(kind: str, limit: float) -> None:
    """At most 10% (FLASH) and 25% (MSD, six levels) more than a plain step, for a target of 32 layers."""

    def at_32(kind: str | None, part: int) -> int:
        few, more = (count_kernels(kind, num_layers)[part] for num_layers in (1, 2))
        return few + 31 * (more - few)

    plain, total, outside = at_32(None, 0), at_32(kind, 0), at_32(kind, 1)
    assert total <= limit * plain, (total, plain)
    assert outside < 100, "launched one by one"


@pytest.mark.every(2)
@SAMPLED
@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "parts"])
def test_functions_on_the_meta_device_read_and_make_nothing(kind: str, whole: bool, sampled: bool) -> None:
    """A whole round, or a draft and a forward alone, of two rows of different lengths; with every option of the
    sampling that may be recorded, and end ids."""
    model, drafter = build_model(), build_drafter(f"leaning-{kind}")
    options: dict[str, Any] = {"repetition_penalty": 1.2}
    options |= {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01} if sampled else {}
    runs: dict[type, tuple[StaticFunction, list[Tensor]]] = {}
    run = Recordings.run

    def spy(self: Recordings, owner: Any, key: Any, function: Any, state: Any, inputs: Any) -> Any:
        if is_whole(function) or not whole:
            runs[type(function)] = function, [*state, *inputs]
        return run(self, owner, key, function, state, inputs)

    with (
        recording(record_nothing),
        nullcontext() if whole else in_parts(),
        patch_model(model, drafter, tree_size=8),
        mock.patch.object(Recordings, "run", spy),
    ):
        generate(model, build_inputs(model, 0, 2), sampled, max_new_tokens=5, eos_token_id=[1, 2], **options)
    model.to("meta")
    drafter.head.to("meta")
    assert len(runs) == (1 if whole else 2)
    for function, tensors in runs.values():
        tensors = [tensor.to("meta") for tensor in tensors]
        with torch.no_grad():
            function(*tensors)  # path tables are made once
            with HostCounter() as counter:
                outputs = function(*tensors)
        assert counter.counts == {"reads": 0, "made": 0}
        assert all(output.is_meta and len(output) == 2 for output in outputs)


def test_time_of_recording_is_no_cost_of_a_draft() -> None:
    """Neither of the drafter's levels nor of the round, by which controllers choose."""
    model = build_model()

    def slow(function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Replay:
        (lane,) = mmspec.patching.patch_state(model).lanes._lanes.values()
        lane.recordings.setup_s += 1000.0
        return record_nothing(function, state, inputs)

    with recording(slow), in_parts(), patch_model(model, build_drafter("leaning-decoupled"), tree_size=8):
        generate(model, build_inputs(model, 0, 1), False)
        stats = mmspec.stats(model)
    assert stats.draft_s < 0 and stats.score_s < 0, "less the 1000 s each that the recorder claims"
