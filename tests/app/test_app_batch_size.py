"""`--batch-size auto`: the size is doubled while that brings more rows per second, whatever first runs take."""

from __future__ import annotations

import random
from unittest import mock

import pytest

from mmspec.app.caption import batch_size
from mmspec.app.caption.batch_size import AUTO_BATCH_SIZE, FIRST_AUTO_SIZE, MAX_AUTO_SIZE, BatchSizer


def found(
    row_s: float, memory: float = 0.0, cold: float = 1.0, stall: float = 0.0, start: int = AUTO_BATCH_SIZE
) -> int:
    """The size after 60 batches that take one second and `row_s` for each row."""
    sizer, rng, runs = BatchSizer(start), random.Random(0), dict[int, int]()
    for _ in range(60):
        size = sizer.size
        runs[size] = runs.get(size, 0) + 1
        slow = (cold if runs[size] == 1 else 1.0) * (9.0 if rng.random() < stall else 1.0)
        with mock.patch.object(batch_size, "used_memory_share", lambda size=size: memory * size):
            sizer.add(size, slow * (1 + row_s * size) * rng.uniform(1.0, 1.03))
            sizer.add(size - 1, 1e-9)  # the last batch of a job is smaller
    return sizer.size


@pytest.mark.parametrize("cold", [1.0, 3.0, 10.0])
def test_the_fastest_size_that_fits(cold: float) -> None:
    assert found(0.0, cold=cold) == found(0.001, cold=cold) == MAX_AUTO_SIZE
    assert found(100.0, cold=cold) == FIRST_AUTO_SIZE, "each row takes as long in any batch"
    assert found(0.1, cold=cold) == MAX_AUTO_SIZE and found(1.0, cold=cold) in (8, 16)
    assert found(0.0, memory=1 / 32, cold=cold) == 16, "32 rows would take all"


def test_stalls_and_wrong_clocks() -> None:
    assert found(0.0, stall=0.1) == MAX_AUTO_SIZE
    sizer = BatchSizer(AUTO_BATCH_SIZE)
    for seconds in (0.0, -1.0, float("nan")):
        sizer.add(sizer.size, seconds)
    assert sizer.size == FIRST_AUTO_SIZE


def test_a_fixed_size_only_shrinks() -> None:
    assert found(0.0, start=5) == 5
    sizer = BatchSizer(8)
    sizer.limit(4)
    sizer.limit(6)
    assert sizer.size == 4
