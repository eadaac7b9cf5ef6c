"""Rows per batch: a fixed number, or as many as speed and memory permit, found while the job runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

AUTO_BATCH_SIZE = 0
"""`--batch-size auto`."""
FIRST_AUTO_SIZE = 4
MAX_AUTO_SIZE = 64
MEMORY_SHARE = 0.45
"""A batch is doubled only while this share of the device's memory suffices for it: the double then fits."""
MIN_BATCH_GAIN = 1.05
"""Rows per second of a doubled batch over those before, below which the smaller size is taken."""
BATCHES_PER_SIZE = 2
"""Batches of one size that are measured. One more if they are no faster: one may have stalled."""


class BatchSizer:
    """The largest batch to run at once.

    A fixed size only shrinks, when memory does not suffice. `AUTO_BATCH_SIZE` begins with `FIRST_AUTO_SIZE` and
    doubles while rows per second rise and memory permits.
    """

    def __init__(self, batch_size: int) -> None:
        from mmspec.economy.tables import Seconds  # late: it imports torch, and the command line reads this module

        self._searching = batch_size == AUTO_BATCH_SIZE
        self.size = FIRST_AUTO_SIZE if self._searching else batch_size
        self._seconds = Seconds(step=1.0)

    def limit(self, size: int) -> None:
        """Never run more than `size` rows again: more did not fit."""
        self.size, self._searching = min(self.size, size), False

    @contextmanager
    def measure(self, num_rows: int) -> Iterator[None]:
        """Time a batch of `num_rows`."""
        start = time.perf_counter()
        yield
        self.add(num_rows, time.perf_counter() - start)

    def add(self, num_rows: int, seconds: float) -> None:
        """Add what a batch of `num_rows` took."""
        if not self._searching or num_rows != self.size:
            return
        self._seconds.add("batch", 1, num_rows, seconds)
        measured = self._seconds.count("batch", 1, num_rows)
        if measured < BATCHES_PER_SIZE:
            return
        if self._gain() < MIN_BATCH_GAIN:
            if measured > BATCHES_PER_SIZE:
                self.limit(self.size // 2)
        elif 2 * self.size > MAX_AUTO_SIZE or used_memory_share() > MEMORY_SHARE:
            self._searching = False
        else:
            self.size *= 2

    def _gain(self) -> float:
        """Rows per second over those of batches of half the size."""
        whole_s, half_s = (self._seconds.get("batch", 1, size) for size in (self.size, self.size // 2))
        return 2 * (half_s or 0.0) / (whole_s or 1.0) if self.size > FIRST_AUTO_SIZE else MIN_BATCH_GAIN


def used_memory_share() -> float:
    """Largest share of the memory that was used: of the GPU, else of this machine."""
    import torch

    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        return float(torch.cuda.max_memory_reserved() / total)
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    import os

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return float(peak / (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))
