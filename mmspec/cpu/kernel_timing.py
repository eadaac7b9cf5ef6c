"""Which kernel is fastest for one shape, learnt from timed calls. Runs nothing itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

TIMED_CALLS = 5
"""Real calls of each kernel that are timed before a shape is decided."""
TRIAL_EVERY = 16
"""With the C kernel, one of so many calls before the decision is a trial; the others use the fastest so far."""
TRIAL_CALLS = 2
"""Real calls of each kernel after which clearly slower ones are no longer timed."""
CLEARLY_SLOWER = 1.5
"""Ratio of the fastest calls from which a kernel is clearly slower."""
PLAIN, TRANSPOSED, IN_C, ONEDNN = "plain", "transposed", "c", "onednn"


@dataclass
class KernelTiming:
    """Measurements of one shape.

    Attributes:
        kernels: the kernels to choose from.
        seconds: {kernel: seconds of timed calls, or seconds per row, at most twice `TIMED_CALLS`}.
        num_calls: calls so far.
        best: the kernel with the lowest median, None until all are measured.
    """

    kernels: tuple[str, ...] = (PLAIN, TRANSPOSED, IN_C)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    num_calls: int = 0
    best: str | None = None

    def next_kernel(self) -> str:
        """The kernel of the next call, until `best` is decided.

        Begins with the C kernel, which is nearly always the fastest, and spreads the trials of others over many
        calls: with slow kernels the first rounds of a tree size look expensive to the controller, which then avoids it.
        """
        contenders = self._contenders()
        if IN_C in contenders:
            if not self.seconds:
                return IN_C
            if self.num_calls % TRIAL_EVERY:
                return min(self.seconds, key=lambda kernel: median(self.seconds[kernel]))
        return min(contenders, key=self._num_timed)

    def add(self, kernel: str, seconds: float) -> None:
        """Add a timed call; decides once all kernels that may be the fastest have `TIMED_CALLS`."""
        self.num_calls += 1
        timed = self.seconds.setdefault(kernel, [])
        if len(timed) < 2 * TIMED_CALLS:  # short lists, since each call computes medians
            timed.append(seconds)
        contenders = self._contenders()
        if min(map(self._num_timed, contenders)) >= TIMED_CALLS:
            self.best = min(contenders, key=lambda kernel: median(self.seconds[kernel]))

    def _num_timed(self, kernel: str) -> int:
        return len(self.seconds.get(kernel, ()))

    def _contenders(self) -> list[str]:
        """The kernels that are not clearly slower than another; all until each has `TRIAL_CALLS`."""
        if any(self._num_timed(kernel) < TRIAL_CALLS for kernel in self.kernels):
            return list(self.kernels)
        fastest = {kernel: min(self.seconds[kernel]) for kernel in self.kernels}
        limit = CLEARLY_SLOWER * min(fastest.values())
        return [kernel for kernel in self.kernels if fastest[kernel] <= limit]
