"""`Recordings`: functions of tensors that are recorded and checked when they first run, and replayed from then on.

Forwards of a target, drafts of a head and whole rounds are such functions (`mmspec.engine.round`). Independent of both.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspec.cpu.linear import ACTIVE_CONTEXT
from mmspec.engine.graph import Recorder, Replay, StaticFunction
from mmspec.engine.undo import VariableSet

NUM_CHECKED_REPLAYS = 3
"""Replays of each function that are compared with a plain run: later ones have other inputs than those recorded."""
MAX_OWNERS = 2
"""Owners, besides the target, whose tensors and recordings stay allocated."""
REPLAY_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Largest difference between a first replay and a plain run, relative to the range of the first output."""
HALF_REPLAY_TOLERANCE = 0.1
"""The same for half precision."""


class Recordings:
    """The recorded functions of one call at a time, by owner: the target's round, and the drafts of each head.

    Attributes:
        recorder: records the functions.
        capacity: largest length of a row of the call, draft nodes included.
        warn: logs a message once.
        in_parts: owners of drafts whose whole rounds failed to be recorded, which are recorded in parts from then on.
        setup_s: seconds that recording and checking have taken so far. They are no cost of later rounds: clocks
            subtract them.
    """

    def __init__(self, recorder: Recorder, capacity: int, warn: Callable[[str], None]) -> None:
        """Arguments: see the attributes."""
        self.recorder = recorder
        self.capacity = capacity
        self.warn = warn
        self.setup_s = 0.0
        self._replays: dict[tuple[Hashable, Hashable], Replay] = {}
        self._num_checked: Counter[tuple[Hashable, Hashable]] = Counter()
        self.in_parts: set[Hashable] = set()
        self._attachments: dict[Hashable, Any] = {}  # last used at the end
        self._fixed: dict[Hashable, Tensor] = {}

    def __len__(self) -> int:
        return len(self._replays)

    def attachment(self, owner: Hashable, create: Callable[[], Any]) -> Any:
        """What an owner stores between calls, created at first."""
        found = self._attachments.pop(owner, None)
        self._attachments[owner] = create() if found is None else found
        for old in list(self._attachments)[:-MAX_OWNERS]:
            self.clear(self._attachments.pop(old))
        return self._attachments[owner]

    def clear(self, owner: Hashable = None) -> None:
        """Drop the recordings of one owner, whose tensors or weights have changed, or all."""
        for key in [key for key in self._replays if owner is None or key[0] == owner]:
            del self._replays[key], self._num_checked[key]
        self.in_parts = {other for other in self.in_parts if owner is not None and other != owner}

    def fixed(self, name: str, value: Tensor) -> Tensor:
        """A constant of a call at an address that is the same in every call, as long as shape and dtype are."""
        key = name, tuple(value.shape), value.dtype
        if key not in self._fixed:
            self._fixed[key] = torch.empty_like(value)
        return self._fixed[key].copy_(value)

    def run(
        self,
        owner: Hashable,
        key: Hashable,
        function: StaticFunction,
        state: Sequence[Tensor],
        inputs: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """Replay a function, recorded the first time. Within `recordable_mode`.

        Args:
            owner: whose function it is.
            key: what else distinguishes it from the owner's other functions.
            function: gives the same result when it runs again. All outputs are compared; if it has a method `written`
                of the same arguments, so is what it has written in the `WrittenPlace`s that this returns.
            state: its first arguments, at fixed addresses.
            inputs: its other arguments.

        Returns:
            Its outputs.

        Raises:
            Exception: of the recorder; RuntimeError if one of the first replays differs from a plain run.
        """
        replay = self._replays.get((owner, key))
        if replay is not None and self._num_checked[owner, key] >= NUM_CHECKED_REPLAYS:
            return replay(inputs)
        start, replay_s = time.perf_counter(), 0.0
        written: Callable[..., list[WrittenPlace]] = getattr(function, "written", lambda *tensors: [])
        try:
            with VariableSet(ACTIVE_CONTEXT, None):  # the recording contains no timed kernels
                expected = [output.clone() for output in function(*state, *inputs)]
                if replay is None:
                    replay = self.recorder(function, state, inputs)
                    function(*state, *inputs)  # a recorder may have run it on something else
                places = written(*state, *inputs)
                expected_writes = [place.read() for place in places]
                for place in places:
                    place.erase()
                _wait_for(expected[0])
                replay_start = time.perf_counter()
                outputs = replay(inputs)
                _wait_for(outputs[0])
                replay_s = time.perf_counter() - replay_start  # what a round costs
                check_replay([*outputs, *(place.read() for place in places)], [*expected, *expected_writes])
        finally:
            self.setup_s += time.perf_counter() - start - replay_s
        self._replays[owner, key] = replay
        self._num_checked[owner, key] += 1
        return outputs


@contextmanager
def recordable_mode() -> Iterator[None]:
    """Context without gradients and without inference mode, also within the user's: recorded tensors outlive calls."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _wait_for(output: Tensor) -> None:
    if output.is_cuda:
        torch.cuda.synchronize(output.device)


@dataclass(frozen=True)
class WrittenPlace:
    """What a function writes besides its outputs: n positions of each row, behind its length.

    Attributes:
        tensor: [..., B, H, C, D], in which it writes.
        positions: [B, n] int64.
    """

    tensor: Tensor
    positions: Tensor

    def read(self) -> Tensor:
        """[B, ..., H, n, D], a copy."""
        return self.tensor.gather(-2, self._index()).movedim(-4, 0)

    def erase(self) -> None:
        """Set it to zero, so that the next run must write it."""
        self.tensor.scatter_(-2, self._index(), 0)

    def _index(self) -> Tensor:
        *others, _, width = self.tensor.shape
        return self.positions[:, None, :, None].expand(*others, self.positions.shape[1], width)


def check_replay(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Compare all outputs of a first replay, and what it wrote, with those of a plain run.

    Floats may differ by rounding. Rows in which the two largest logits of a node are closer than that may decide
    otherwise; in all others integers must be equal. The first output, if it is [B, N, 2], holds these logits.

    Raises:
        RuntimeError: they differ by more.
    """
    first = expected[0]
    tied: Tensor | None = None
    if first.dim() == 3 and first.shape[-1] == 2:
        limit = tolerance_of(first)
        tied = ((first[..., 0] - first[..., 1]) <= limit).any(1)
    for number, (found, wanted) in enumerate(zip(outputs, expected, strict=True)):
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            raise RuntimeError(f"output {number} of the recording has another shape or dtype than a plain run's")
        differs = _differs(found, wanted)
        if tied is not None and number > 0 and differs.dim() and len(differs) == len(tied):
            differs = differs.flatten(1).any(1) & ~tied if differs.dim() > 1 else differs & ~tied
        if bool(differs.any()):
            raise RuntimeError(f"the recording differs from a plain run in output {number} ({_largest(found, wanted)})")


def tolerance_of(values: Tensor) -> float:
    """Largest difference between these numbers and those of a recording that is rounding."""
    finite = values.float().nan_to_num(0, 0, 0)
    scale = float(finite.max() - finite.min()) if finite.numel() else 0.0
    return REPLAY_TOLERANCE.get(values.dtype, HALF_REPLAY_TOLERANCE) * scale


def _differs(found: Tensor, wanted: Tensor) -> Tensor:
    """Where two tensors differ by more than rounding."""
    if not wanted.is_floating_point():
        return found != wanted
    return (found.nan_to_num(0, 0, 0) - wanted.nan_to_num(0, 0, 0)).abs() > tolerance_of(wanted)


def _largest(found: Tensor, wanted: Tensor) -> str:
    if not wanted.is_floating_point():
        return f"{int((found != wanted).sum())} of {wanted.numel()} integers"
    return f"by {float((found.float() - wanted.float()).nan_to_num(0, 0, 0).abs().max()):.1e}"
