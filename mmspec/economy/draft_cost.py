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

from mmspec.economy.ema import ema
from mmspec.forks import new_lock

BUCKETS_PER_OCTAVE = 4
"""Resolution of context lengths: factors of 2 ** (1 / 4) apart."""
MIN_LENGTH_RATIO = 1.25
"""A slope is estimated once two measured lengths differ by at least this factor."""
EXPLORE_EVERY = 32
"""Every so many prompts more visual tokens are kept than the estimate prefers, so that high costs are remeasured."""
MEAN_WEIGHT = 0.1
"""Weight of a new value in the running means of a batch size."""

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
class CostByLength:
    """Mean seconds by length; similar lengths share a mean.

    Attributes:
        means: {bucket of the length: (mean length, mean seconds)}.
    """

    means: dict[int, tuple[float, float]] = field(default_factory=dict)

    def update(self, length: int, seconds: float) -> None:
        """Add a measurement. Faster ones weigh more: on shared machines delays are common, speed-ups are not."""
        bucket = round(BUCKETS_PER_OCTAVE * math.log2(max(1, length)))
        if bucket not in self.means:
            self.means[bucket] = float(length), seconds
            return
        mean_length, mean_s = self.means[bucket]
        weight = 0.5 if seconds < mean_s else 0.2
        mean_s = ema(mean_s, seconds, weight, restart_below=0.5)  # the first one may have been a stall
        self.means[bucket] = mean_length + weight * (length - mean_length), mean_s

    def slope(self) -> float | None:
        """Seconds per additional token between the shortest and the longest bucket; None if they are too close."""
        if not self.means:
            return None
        shortest, shortest_s = self.means[min(self.means)]
        longest, longest_s = self.means[max(self.means)]
        if longest < MIN_LENGTH_RATIO * shortest:
            return None
        return max(0.0, (longest_s - shortest_s) / (longest - shortest))


@dataclass
class BatchCosts:
    """Measurements at one batch size.

    Attributes:
        num_prompts: prefills so far, the unmeasured first one included.
        prefill: seconds of a prefill by prompt length.
        draft: seconds of one draft level by context length.
        levels: mean draft levels per round.
        round_s: mean seconds of a round.
        tokens_per_round: mean tokens per row and round.
    """

    num_prompts: int = 0
    prefill: CostByLength = field(default_factory=CostByLength)
    draft: CostByLength = field(default_factory=CostByLength)
    levels: float = 0.0
    round_s: float = 0.0
    tokens_per_round: float = 0.0


@dataclass
class HeadCostModel:
    """Measured costs of one drafter; one object serves all its calls and threads.

    Attributes:
        by_batch: {batch size: measurements}.
    """

    by_batch: dict[int, BatchCosts] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=new_lock, repr=False)

    def __deepcopy__(self, memo: dict[int, object]) -> HeadCostModel:
        """An empty model: a deep copy of a model may run on another device. See `snapshot`."""
        return type(self)()

    def snapshot(self) -> HeadCostModel:
        """An independent model with the same measurements, for the same device."""
        with self.lock:
            return type(self)(copy.deepcopy(self.by_batch))

    def costs(self, batch: int) -> DraftCosts | None:
        """Costs at a batch size; None before prefills of two lengths and a round were measured."""
        with self.lock:
            measured = self.by_batch.get(batch, BatchCosts())
            prefill_token_s = measured.prefill.slope()
            if prefill_token_s is None or not measured.round_s:
                return None
            draft_token_s = measured.levels * (measured.draft.slope() or 0.0)
            return DraftCosts(prefill_token_s, draft_token_s, measured.round_s, max(1.0, measured.tokens_per_round))

    def exploration(self, batch: int) -> int:
        """1 to keep fewer visual tokens than the estimate prefers for the coming prompt, -1 to keep more, else 0.

        The first prompt warms up, the second is measured, the third is shorter: then two lengths are measured.
        """
        with self.lock:
            num_prompts = self.by_batch.get(batch, BatchCosts()).num_prompts
        if num_prompts == 2:
            return 1
        return -1 if num_prompts and num_prompts % EXPLORE_EVERY == 0 else 0

    def record_prefill(self, batch: int, length: int, seconds: float) -> None:
        """Add a measured prefill of `length` tokens; the first one warms up and is not counted."""
        with self.lock:
            measured = self.by_batch.setdefault(batch, BatchCosts())
            measured.num_prompts += 1
            if measured.num_prompts > 1:
                measured.prefill.update(length, seconds)

    def record_draft(self, batch: int, length: int, levels: int, seconds: float) -> None:
        """Add the measured drafting of `levels` levels with a context of `length` tokens."""
        with self.lock:
            measured = self.by_batch.setdefault(batch, BatchCosts())
            measured.levels = ema(measured.levels, levels, MEAN_WEIGHT, clip_above=math.inf)
            measured.draft.update(length, seconds / levels)

    def record_round(self, batch: int, seconds: float, tokens_per_row: float) -> None:
        """Add a measured round: its seconds, and the mean number of tokens that it emitted per row."""
        with self.lock:
            measured = self.by_batch.setdefault(batch, BatchCosts())
            measured.round_s = ema(measured.round_s, seconds, MEAN_WEIGHT)
            measured.tokens_per_round = ema(measured.tokens_per_round, tokens_per_row, MEAN_WEIGHT, clip_above=math.inf)


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
