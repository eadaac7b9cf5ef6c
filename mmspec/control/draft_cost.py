"""What a draft head's reading and drafting cost here, as both grow with the number of tokens that it has before it.

Learned from the real calls of the running process, like `mmspec.control.tree_size`: no timing pass, and nobody ever waits for the
device. On a GPU an event is left in the stream before and after, and read once the device has passed both. Knows
neither drafters nor compressors. What is learned may change what a drafter is shown, never a token.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field

import torch

BUCKETS_PER_OCTAVE = 4
"""Widths are kept apart by a fourth of an octave."""
MIN_LENGTH_RATIO = 1.25
"""What one more token costs is known once two widths were measured of which one is this many times the other."""
EXPLORE_EVERY = 32
"""Every so many prompts more is shown than seems best, so that what was once measured dear may turn out cheap."""

Timestamp = float | torch.cuda.Event
"""A moment: seconds, or an event in the device's stream."""


@dataclass(frozen=True)
class DraftCosts:
    """What is known at one batch size, in seconds.

    Attributes:
        read_s: of one more token in a prompt that the head reads. draft_s: by how much one more token that it has
            before it lengthens a round's drafting. round_s: of a whole round.
        gained: tokens that a round emits per row.
    """

    prefill_token_s: float
    draft_token_s: float
    round_s: float
    tokens_per_round: float


@dataclass
class CostByLength:
    """Mean seconds by width, nearby widths as one."""

    means: dict[int, tuple[float, float]] = field(default_factory=dict)
    """{steps of width: (mean width, mean seconds)}"""

    def update(self, length: int, seconds: float) -> None:
        """A mean that follows what was quicker at once and what was slower slowly: machines are shared."""
        place = round(BUCKETS_PER_OCTAVE * math.log2(max(1, length)))
        old = self.means.get(place)
        if old is None:
            self.means[place] = float(length), seconds
            return
        share = 0.5 if seconds < old[1] else 0.2
        self.means[place] = (
            old[0] + share * (length - old[0]),
            old[1] + share * (min(seconds, 2 * old[1]) - old[1]),
        )

    def slope(self) -> float | None:
        """Seconds of one more token, from the narrowest and the widest; None if these are about the same."""
        if not self.means:
            return None
        (low, low_s), (high, high_s) = self.means[min(self.means)], self.means[max(self.means)]
        return max(0.0, (high_s - low_s) / (high - low)) if high >= MIN_LENGTH_RATIO * low else None


@dataclass
class BatchCosts:
    """What was measured at one batch size. `levels`: passes of the head in a round; `drafting` is of one pass."""

    num_prompts: int = 0
    prefill: CostByLength = field(default_factory=CostByLength)
    draft: CostByLength = field(default_factory=CostByLength)
    levels: float = 0.0
    round_s: float = 0.0
    tokens_per_round: float = 0.0


@dataclass
class DraftCostModel:
    """What one drafter costs here; one object serves all its calls and threads."""

    by_batch: dict[int, BatchCosts] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __deepcopy__(self, memo: dict[int, object]) -> DraftCostModel:
        return DraftCostModel()

    def costs(self, batch: int) -> DraftCosts | None:
        """What things cost at that batch size; None before two widths of prompts and a round were measured."""
        with self.lock:
            tally = self.by_batch.get(batch, BatchCosts())
            read_s = tally.prefill.slope()
            if read_s is None or not tally.round_s:
                return None
            draft_s = tally.levels * (tally.draft.slope() or 0.0)
            return DraftCosts(read_s, draft_s, tally.round_s, max(1.0, tally.tokens_per_round))

    def exploration(self, batch: int) -> int:
        """1 if the coming prompt should be shown less than seems best, -1 if more, so that other widths are measured.

        The first prompt warms up, the second is measured, and the third is narrower: then there are two widths.
        """
        with self.lock:
            prompts = self.by_batch.get(batch, BatchCosts()).num_prompts
        return 1 if prompts == 2 else -1 if prompts and prompts % EXPLORE_EVERY == 0 else 0

    def record_prefill(self, batch: int, width: int, seconds: float) -> None:
        """Take in what it took to read a prompt; the first one warms up."""
        with self.lock:
            tally = self.by_batch.setdefault(batch, BatchCosts())
            tally.num_prompts += 1
            if tally.num_prompts > 1:
                tally.prefill.update(width, seconds)

    def record_draft(self, batch: int, width: int, levels: int, seconds: float) -> None:
        """Take in what it took to draft so many levels."""
        with self.lock:
            tally = self.by_batch.setdefault(batch, BatchCosts())
            tally.levels = _follow(tally.levels, levels)
            tally.draft.update(width, seconds / levels)

    def record_round(self, batch: int, seconds: float, gained: float) -> None:
        """Take in a whole round: its seconds, and the tokens that it emitted per row."""
        with self.lock:
            tally = self.by_batch.setdefault(batch, BatchCosts())
            tally.round_s = _follow(tally.round_s, min(seconds, 2 * tally.round_s) if tally.round_s else seconds)
            tally.tokens_per_round = _follow(tally.tokens_per_round, gained)


@dataclass
class CallTimer:
    """Measures one call for a `Pace`; measures nothing without one."""

    cost_model: DraftCostModel | None = None
    batch: int = 0
    device: torch.device | None = None
    _pending: list[tuple[Timestamp, Timestamp, int, int]] = field(default_factory=list)

    def now(self) -> Timestamp:
        """Now, as the device counts it."""
        if self.cost_model is None or self.device is None or self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def record_prefill(self, began: Timestamp, width: int) -> None:
        """The head has been given a prompt of that width, since `began`."""
        self._note(began, width, 0)

    def record_draft(self, began: Timestamp, width: int, levels: int) -> None:
        """The head has been asked for so many levels with that many tokens before it, since `began`."""
        self._note(began, width, levels)

    def record_round(self, seconds: float, gained: float) -> None:
        """A round is over."""
        if self.cost_model is not None:
            self.cost_model.record_round(self.batch, seconds, gained)

    def drain(self) -> None:
        """Take in what the device is done with, and leave the rest for later."""
        while self._pending:
            began, ended, width, levels = self._pending[0]
            seconds = elapsed(began, ended)
            if seconds is None:
                return
            self._pending.pop(0)
            assert self.cost_model is not None
            if levels:
                self.cost_model.record_draft(self.batch, width, levels, seconds)
            else:
                self.cost_model.record_prefill(self.batch, width, seconds)

    def _note(self, began: Timestamp, width: int, levels: int) -> None:
        if self.cost_model is not None:
            self._pending.append((began, self.now(), width, levels))
            self.drain()


def elapsed(began: Timestamp, ended: Timestamp) -> float | None:
    """Seconds from one moment to another; None while the device has not come that far."""
    if isinstance(began, float) or isinstance(ended, float):
        assert isinstance(began, float) and isinstance(ended, float)
        return ended - began
    return began.elapsed_time(ended) / 1e3 if ended.query() else None


def ema(old: float | None, seconds: float, share: float) -> float:
    """A mean that follows slow changes and shrugs off single outliers (machines are shared).

    What takes half as long as it was thought to was held up before, as first uses are: that is believed at once.
    """
    return seconds if not old or seconds < old / 2 else old + share * (min(seconds, 2 * old) - old)


def _follow(old: float, new: float) -> float:
    return old + 0.1 * (new - old) if old else float(new)


__all__ = ["CallTimer", "CostByLength", "DraftCostModel", "DraftCosts", "Timestamp", "elapsed", "ema"]
