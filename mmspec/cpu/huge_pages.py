"""Huge pages for the weights that the kernels read in every round, on Linux.

A round reads all weights, and with pages of 4 KiB a share of its time is spent on looking up where they are.
`madvise(MADV_COLLAPSE)` (Linux 6.1 or later) moves memory into pages of 2 MiB; addresses and contents stay. It takes
0.3 to 5 ms a page, in the calling thread, so calls of `generate` spend what their own tokens gain by it, step by step:
one of a single token spends nothing. Weights that are mapped from a file (a checkpoint in the type that is loaded) are
first copied, where memory is free, unless they have gradients. What the kernel refuses (no memory in one piece) stays
as it is, and is not tried again. New weights, of copies, lie there from their first use on (`HugeMemory`). Independent
of models.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmspec.cpu.bf16_copies import free_bytes
from mmspec.cpu.mapped import MappedFile, copy_mapping, restore_mapping
from mmspec.cpu.weights import QuantisedWeight, Weight
from mmspec.forks import new_lock

logger = logging.getLogger("mmspec")

SYSTEM_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""Of Linux, the chosen value in brackets."""
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25
"""Of <linux/mman.h>."""
SMALL_PAGE, HUGE_PAGE = 4 << 10, 2 << 20
"""Bytes, on x86-64, for which the kernels are."""
MAX_GAP = 2 * SMALL_PAGE
"""Bytes between two weights of one range: an allocator's header, and what aligns the block behind it."""
STEP = 8 * HUGE_PAGE
"""Bytes of one system call, between which the time is looked at."""
MIN_BYTES = 64 << 20
"""Of weights: fewer may stay in a processor's caches."""
GAIN_S = 1e-11
"""Seconds that a token gains for each byte: a quarter of reading it at 25 GB/s."""
MAX_TOKENS, MAX_CALL_S = 200, 0.5
"""Most tokens of a call that are counted, and most seconds that it spends."""
FIRST_STEP_S = 0.04
"""Seconds of a step before one was taken, at 5 ms a page."""
Range = tuple[int, int]
"""Addresses: of the first byte, and behind the last."""
_PID = os.getpid()
"""Of the process that has imported this."""


class HugePages:
    """Moves the weights of one model into huge pages, bit by bit. Thread-safe: one thread at a time does so.

    Attributes:
        nbytes: of the weights that lie in huge pages by this.
        refused: why the last range that was not moved was not; "" if all were.
        copied: of the ranges that were copied, where they were mapped from.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.refused = ""
        self.copied: dict[Range, MappedFile] = {}
        self._may_copy = False
        self._earned_s, self._step_s = 0.0, FIRST_STEP_S
        self._addresses: list[Range] = []
        self._waiting: list[Range] = []
        self._seen: set[Range] = set()
        self._lock = new_lock()

    @property
    def is_done(self) -> bool:
        """Whether there is nothing more to try."""
        return not self._waiting

    @property
    def copied_bytes(self) -> int:
        """Of weights that were mapped from a file."""
        return sum(end - start for start, end in self.copied)

    def describe(self) -> str:
        """How much was moved, or why nothing was."""
        if self.nbytes:
            copied = f", {self.copied_bytes >> 20} MiB of them copied from a file's" if self.copied else ""
            return f"on for {self.nbytes >> 20} MiB{copied}" + (
                f"; not for all: {self.refused}" if self.refused else ""
            )
        return f"off: {self.refused or 'the weights are few, or in small pieces'}"

    def add(self, weights: Iterable[Weight], num_tokens: int = MAX_TOKENS) -> None:
        """Move the memory of weights into huge pages, or go on with it.

        Args:
            weights: that are read for every token; on the CPU. If they lie where those of the last call lay, and all
                has been tried, nothing happens.
            num_tokens: that are going to be decoded.
        """
        weights = list(weights)
        addresses = [block for weight in weights for block in _blocks(weight)]
        self._may_copy = all(isinstance(one, QuantisedWeight) or one.grad is None for one in weights)
        if (addresses == self._addresses and not self._waiting) or not self._lock.acquire(blocking=False):
            return
        try:
            total = sum(end - start for start, end in addresses)
            if addresses != self._addresses:
                self._addresses, self._waiting = addresses, []
                if total >= MIN_BYTES and not (reason := obstacle()):
                    self._waiting = [one for one in huge_ranges(addresses) if one not in self._seen][::-1]
                elif total >= MIN_BYTES:
                    self.refused = reason
            self._earned_s = min(MAX_CALL_S, self._earned_s + GAIN_S * total * min(num_tokens, MAX_TOKENS))
            self._move()
        finally:
            self._lock.release()

    def _move(self) -> None:
        """Move ranges that wait, while a step takes no more than calls have earned."""
        while self._waiting and self._earned_s >= self._step_s:
            if sum(end - start for start, end in self._waiting) > free_bytes():
                self.refused, self._waiting = "too little memory is free", []
                return
            one, start = self._waiting.pop(), time.perf_counter()
            self._seen.add(one)
            if reason := self._collapse(*one):
                self.refused = reason
            else:
                self.nbytes += one[1] - one[0]
            self._step_s = min(MAX_CALL_S, time.perf_counter() - start)  # whatever stalls: later calls go on
            self._earned_s -= self._step_s
            if not self._waiting:
                logger.info("mmspec: huge pages for weights: %s", self.describe())

    def _collapse(self, start: int, end: int) -> str:
        """`collapse`, of a copy where the range is mapped from a file."""
        if not (reason := collapse(start, end)) or not self._may_copy:
            return reason
        source = copy_mapping(start, end)
        if source is None:
            return reason
        self.copied[start, end] = source
        return collapse(start, end)

    def give_back(self, weights: Iterable[Weight]) -> None:
        """Map what was copied from its file again, if it is memory of these weights and nobody has changed it."""
        with self._lock:
            blocks = _joined(block for weight in weights for block in _blocks(weight)) if self.copied else []
            for (start, end), source in self.copied.items():
                if any(first <= start and end <= last for first, last in blocks):
                    restore_mapping(start, end, source)
            self.copied.clear()


class HugeMemory:
    """New memory that lies in huge pages from its first use on, where the system has them."""

    def __init__(self, nbytes: int) -> None:
        """
        Args:
            nbytes: in all, with 64 for each piece.
        """
        memory = torch.empty(nbytes + HUGE_PAGE, dtype=torch.uint8, device="cpu")
        start = memory.data_ptr()
        first, end = -(-start // HUGE_PAGE) * HUGE_PAGE, start + len(memory)
        if not obstacle():
            _madvise()(first, (end - first) // HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE)
        self._rest = memory[first - start :]

    def take(self, nbytes: int) -> Tensor:
        """The next uint8 [nbytes], at a multiple of 64."""
        found, self._rest = self._rest[:nbytes], self._rest[-(-nbytes // 64) * 64 :]
        return found


def huge_ranges(blocks: Iterable[Range]) -> list[Range]:
    """What can be moved into huge pages: blocks of memory that follow one another are joined, then cut into steps.

    Args:
        blocks: which may overlap, in any order.

    Returns:
        Ranges of whole huge pages, ascending, each of at most `STEP` bytes.
    """
    found = []
    for start, end in _joined(blocks):
        first, last = -(-start // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
        found += [(at, min(at + STEP, last)) for at in range(first, last, STEP)]
    return found


def _joined(blocks: Iterable[Range]) -> list[Range]:
    """Blocks, ascending; those that follow one another are one."""
    joined: list[Range] = []
    for start, end in sorted(blocks):
        if joined and start - joined[-1][1] <= MAX_GAP:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def collapse(start: int, end: int) -> str:
    """Move the memory of a range into huge pages; returns why the system does not, or ""."""
    if not _madvise()(start, end - start, MADV_COLLAPSE):
        return ""
    number = ctypes.get_errno()
    return "mapped from a file, or not permitted" if number == errno.EINVAL else os.strerror(number)


def obstacle() -> str:
    """Why nothing can be moved into huge pages on this system; "" if it can be tried."""
    if sys.platform != "linux" or os.sysconf("SC_PAGE_SIZE") != SMALL_PAGE:
        return "they are for Linux with pages of 4 KiB"
    if os.getpid() != _PID:
        return "this process was forked, and moving the weights that it shares would copy them"
    try:
        if "[never]" in SYSTEM_SETTING.read_text(encoding="ascii"):
            return f"{SYSTEM_SETTING} says never"
    except OSError:
        return "this Linux has none"
    if _madvise()(0, 0, MADV_COLLAPSE):  # of no bytes: refused if it is unknown
        return "they need Linux 6.1 or later"
    return ""


def describe_huge_pages() -> str:
    """Whether weights are moved into huge pages on this system, or why not."""
    if reason := obstacle():
        return f"off: {reason}"
    return f"on for weights of {MIN_BYTES >> 20} MiB or more"


@cache
def _madvise() -> Any:
    """The function of the C library, which returns 0 or sets errno. Another thread may run Python meanwhile."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes, madvise.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return madvise


def _blocks(weight: Weight) -> Iterator[Range]:
    """Where the numbers of a weight lie."""
    for part in (weight.data, weight.scales) if isinstance(weight, QuantisedWeight) else (weight,):
        yield part.data_ptr(), part.data_ptr() + part.nbytes
