"""Cost model of a draft head: seconds of its prefill and of its draft levels as functions of its context length.

Measured in real calls of the running process, as in `mmspec.economy.chooser`: no separate timing pass, and no
synchronisation. On a GPU, CUDA events are recorded before and after, and read once the device has passed both.
Independent of drafters and compressors. The measurements affect what a drafter reads, never the output.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from dataclasses import dataclass, field

import torch

from mmspec.economy.tables import Seconds, Yields
from mmspec.forks import new_lock

BUCKETS_PER_OCTAVE = 4
"""Resolution of context lengths: factors of 2 ** (1 / 4) apart."""
MIN_LENGTH_RATIO = 1.25
"""A slope is estimated once two measured lengths differ by at least this factor."""
EXPLORE_EVERY = 32
"""Every so many prompts more visual tokens are kept than the estimate prefers, so that high costs are remeasured."""
Timestamp = float | torch.cuda.Event
"""A point in time: `time.perf_counter()` seconds, or an event in the CUDA stream."""


@dataclass(frozen=True)
class DraftCosts:
    """Measured costs at one batch size, in seconds.

    Attributes:
        prefill_token_s: one more prompt token in the head's prefill.
        draft_token_s: one more context token in the drafting of one round.
        round_s: a whole round.
        tokens_per_round: tokens that a round emits per row.
    """

    prefill_token_s: float
    draft_token_s: float
    round_s: float
    tokens_per_round: float


@dataclass
class HeadCostModel:
    """Measured costs of one drafter; one object serves all its calls and threads.

    Attributes:
        seconds: of "prefill" and "level" by (batch size, length), and of "round" by (batch size, 1).
        means: levels and tokens per row of a round, by (batch size, "levels" or "tokens").
        num_prompts: {batch size: prefills so far, the unmeasured first one included}.
    """

    seconds: Seconds = field(default_factory=lambda: Seconds(step=1.0))
    means: Yields = field(default_factory=lambda: Yields(weight=1e-9, decay=0.9))
    num_prompts: dict[int, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=new_lock, repr=False)

    def __deepcopy__(self, memo: dict[int, object]) -> HeadCostModel:
        """An empty model: a deep copy of a model may run on another device. See `snapshot`."""
        return type(self)()

    def snapshot(self) -> HeadCostModel:
        """An independent model with the same measurements, for the same device."""
        return type(self)(self.seconds.copy(), copy.deepcopy(self.means), dict(self.num_prompts))

    def costs(self, batch: int) -> DraftCosts | None:
        """Costs at a batch size; None before prefills of two lengths and a round were measured."""
        prefill_token_s = self.seconds.slope("prefill", batch, MIN_LENGTH_RATIO)
        if prefill_token_s is None or not self.seconds.count("round", batch):
            return None
        level_token_s = self.seconds.slope("level", batch, MIN_LENGTH_RATIO) or 0.0
        draft_token_s = self.means.rate((batch, "levels"), 0.0) * level_token_s
        round_s = self.seconds.get("round", batch, 1) or 0.0
        return DraftCosts(prefill_token_s, draft_token_s, round_s, self.means.rate((batch, "tokens"), 1.0))

    def exploration(self, batch: int) -> int:
        """1 to keep fewer visual tokens than the estimate prefers for the coming prompt, -1 to keep more, else 0.

        The first prompt warms up, the second is measured, the third is shorter: then two lengths are measured.
        """
        num_prompts = self.num_prompts.get(batch, 0)
        if num_prompts == 2:
            return 1
        return -1 if num_prompts and num_prompts % EXPLORE_EVERY == 0 else 0

    def record_prefill(self, batch: int, length: int, seconds: float) -> None:
        """Add a measured prefill of `length` tokens; the first one warms up and is not counted."""
        with self.lock:
            self.num_prompts[batch] = self.num_prompts.get(batch, 0) + 1
        if self.num_prompts[batch] > 1:
            self.seconds.add("prefill", batch, _rounded(length), seconds)

    def record_draft(self, batch: int, length: int, levels: int, seconds: float) -> None:
        """Add the measured drafting of `levels` levels with a context of `length` tokens."""
        self.means.add([((batch, "levels"), levels, 1)])
        self.seconds.add("level", batch, _rounded(length), seconds / levels)

    def record_round(self, batch: int, seconds: float, tokens_per_row: float) -> None:
        """Add a measured round: its seconds, and the mean number of tokens that it emitted per row."""
        self.seconds.add("round", batch, 1, seconds)
        self.means.add([((batch, "tokens"), tokens_per_row, 1)])


def _rounded(length: int) -> int:
    """The length under which costs of similar lengths are kept."""
    return round(2 ** (round(BUCKETS_PER_OCTAVE * math.log2(max(1, length))) / BUCKETS_PER_OCTAVE))


@dataclass
class CallTimer:
    """Measures one call for a `HeadCostModel`; does nothing without one.

    Attributes:
        cost_model: receives the measurements.
        batch: batch size of the call.
        device: device of the draft head; None for the CPU.
    """

    cost_model: HeadCostModel | None = None
    batch: int = 0
    device: torch.device | None = None
    _pending: list[tuple[Timestamp, Timestamp, int, int]] = field(default_factory=list)

    def now(self) -> Timestamp:
        """The current point in the device's work."""
        if self.cost_model is None or self.device is None or self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def record_prefill(self, start: Timestamp, length: int) -> None:
        """A prefill of `length` tokens, begun at `start`, was launched completely."""
        self._add_pending(start, length, 0)

    def record_draft(self, start: Timestamp, length: int, levels: int) -> None:
        """`levels` draft levels with a context of `length` tokens, begun at `start`, were launched completely."""
        self._add_pending(start, length, levels)

    def record_round(self, seconds: float, tokens_per_row: float) -> None:
        """A round is finished."""
        if self.cost_model is not None:
            self.cost_model.record_round(self.batch, seconds, tokens_per_row)

    def drain(self) -> None:
        """Pass on the measurements that the device has completed. Never waits."""
        while self._pending:
            start, end, length, levels = self._pending[0]
            seconds = elapsed(start, end)
            if seconds is None:
                return
            self._pending.pop(0)
            assert self.cost_model is not None
            if levels:
                self.cost_model.record_draft(self.batch, length, levels, seconds)
            else:
                self.cost_model.record_prefill(self.batch, length, seconds)

    def _add_pending(self, start: Timestamp, length: int, levels: int) -> None:
        if self.cost_model is not None:
            self._pending.append((start, self.now(), length, levels))
            self.drain()


def elapsed(start: Timestamp, end: Timestamp) -> float | None:
    """Seconds between two points in time; None while the device has not reached the second."""
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float) and isinstance(end, float)
        return end - start
    return start.elapsed_time(end) / 1e3 if end.query() else None
