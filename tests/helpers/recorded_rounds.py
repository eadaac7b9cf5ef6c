"""Recorded rounds for tests: models whose texts are long, and a recorder that counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import tiny_heads as heads
import tiny_models as tiny
import torch
from recorders import record_nothing
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from mmspec.drafters.heads.base import c_draft
from mmspec.engine.graph import Recorder, Replay, StaticFunction
from mmspec.engine.round import RoundFunction
from mmspec.interfaces.round import ScorePart

SPEC = tiny.ModelSpec("llava")
KINDS = ("coupled", "decoupled", "trimmed", "eagle3", "vispec", "flash", "chained", "parallel", "linked", "falcon")
KINDS += ("dspark", "dspark:1", "dspark:2")
"""`coupled`: EAGLE, `decoupled`: MSD, `chained`: FLASH with a `MarkovHead`, `linked`: parallel with a correction,
`dspark`: DFlash, `dspark:1`: DSpark with two layers, `dspark:2`: with windows in two of three layers."""


class CountingRecorder:
    """Records by another recorder and counts recordings and replays: of forwards of the target, alone or with whatever
    follows them, of drafts, and of whole rounds, drafts included ("fused")."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.recordings = 0
        self.replays = 0
        self.draft_recordings = 0
        self.draft_replays = 0
        self.whole_recordings = 0
        self.whole_replays = 0

    def __call__(self, function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Replay:
        is_whole_round = is_whole(function)
        is_round = isinstance(function, (RoundFunction, ScorePart)) and not is_whole_round
        is_draft = not is_round and not is_whole_round
        self.recordings += is_round
        self.draft_recordings += is_draft
        self.whole_recordings += is_whole_round
        replay = self.recorder(function, state, inputs)

        def counted(new_inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            self.replays += is_round
            self.draft_replays += is_draft
            self.whole_replays += is_whole_round
            return replay(new_inputs)

        return counted


def is_whole(function: StaticFunction) -> bool:
    """Whether a function is a whole round, from draft to commit."""
    return isinstance(function, RoundFunction) and function.draft is not None


def wrong(function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Replay:
    """A recorder whose replays are wrong."""
    return lambda new_inputs: tuple(output.roll(1, -1) for output in function(*state, *new_inputs))


def whole_only(recorder: Recorder) -> Recorder:
    """Records whole rounds by `recorder`; other functions run as they are."""

    def record(function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Replay:
        return (recorder if is_whole(function) else record_nothing)(function, state, inputs)

    return record


def drafts_only(recorder: Recorder) -> Recorder:
    """Records drafts by `recorder`; the rounds of the target run as they are."""

    def record(function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Replay:
        return (record_nothing if isinstance(function, ScorePart) else recorder)(function, state, inputs)

    return record


def in_parts() -> Any:
    """Context in which rounds are recorded in parts, not as a whole."""
    return mock.patch("mmspec.engine.loop.can_record_rounds", return_value=False)


def without_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: heads, checks of trees and accepted paths do not run in C. A fixture of the files that use it."""
    monkeypatch.setattr(c_draft, "active_kernel", lambda: None)
    monkeypatch.setattr("mmspec.engine.tree.compiled_sanitize", lambda *args: None)
    monkeypatch.setattr("mmspec.engine.accept.compiled_accept_path", lambda *args: None)


def fails_later(function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Replay:
    """A recorder whose third replay fails."""
    count = iter(range(100))

    def replay(new_inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if next(count) == 3:
            raise RuntimeError("out of memory")
        return function(*state, *new_inputs)

    return replay


def runs_twice(
    function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor], atol: float = 1e-5
) -> Replay:
    """A recorder whose replays run the function twice."""

    def replay(new_inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        first = function(*state, *new_inputs)
        second = function(*state, *new_inputs)
        for one, other in zip(first, second, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=atol)  # sdpa's rounding depends on addresses
        return second

    return replay


def spoils_output(number: int) -> Callable[..., Replay]:
    """A recorder of whole rounds whose replays have one wrong output."""

    def record(function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Replay:
        def replay(new_inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            outputs = list(function(*state, *new_inputs))
            if isinstance(function, RoundFunction) and number < len(outputs):
                wrong = outputs[number]
                outputs[number] = ~wrong if wrong.dtype == torch.bool else wrong + 1
            return tuple(outputs)

        return replay

    return record


@contextmanager
def recording(recorder: Recorder) -> Iterator[CountingRecorder]:
    """Context in which the rounds of all calls are recorded."""
    counting = CountingRecorder(recorder)

    def make_recorder() -> Recorder:
        return counting

    with mock.patch("mmspec.backend.recorder_for", return_value=make_recorder):
        yield counting


def build_model(spec: tiny.ModelSpec = SPEC) -> PreTrainedModel:
    """A model without an end token, so that all texts are long."""
    model = tiny.build_model(spec)
    model.generation_config.eos_token_id = None
    return model


def build_drafter(name: str, spec: tiny.ModelSpec = SPEC) -> Any:
    """A drafter by name; a head that is often right. "leaning-KIND:SEED" is a head of another seed and form."""
    kind, _, seed = name.partition(":")
    return heads.build_drafter(kind, spec, int(seed or 0)) if name.startswith("leaning") else name


def build_inputs(model: PreTrainedModel, seed: int, batch: int) -> tiny.Inputs:
    """One row, or rows of different lengths."""
    return tiny.build_inputs(model, seed, batch, padding="none" if batch == 1 else "left")


def generate(model: PreTrainedModel, inputs: tiny.Inputs, sampled: bool, **options: Any) -> Tensor:
    """Ids of a call, always with the same seed."""
    torch.manual_seed(7)
    ids: Tensor = model.generate(**inputs, **{"max_new_tokens": 36, "do_sample": sampled} | options)
    return ids


class HostCounter(TorchFunctionMode):
    """Counts values read by the host and tensors made from values of the host.

    Attributes:
        counts: reads, and tensors made.
        num_blocking: tensors that are made where they are used, which on a GPU waits. `host_copy` makes them on "cpu".
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"reads": 0, "made": 0}
        self.num_blocking = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = (Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__)
        self.counts["reads"] += func in reads
        is_made = func in (torch.tensor, torch.as_tensor)
        self.counts["made"] += is_made
        self.num_blocking += is_made and (kwargs or {}).get("device") != "cpu"
        return func(*args, **(kwargs or {}))


NOT_KERNELS = ("aten::new_empty", "aten::empty", "aten::empty_like", "aten::_unsafe_view", "aten::scalar_tensor")
"""Operators that allocate or view, or are values of the host."""


class KernelCounter(TorchDispatchMode):
    """Counts aten operators, each about one kernel on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and func._schema.name not in NOT_KERNELS
        return func(*args, **(kwargs or {}))
