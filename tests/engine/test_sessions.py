"""Sessions of random calls that share one model, with changes between them (`tests/helpers/sessions.py`)."""

from __future__ import annotations

from collections import Counter

import pytest
import sessions


@pytest.mark.parametrize("seed", [3, 21, 40])
def test_a_session(seed: int) -> None:
    session = sessions.run_session(seed, 8)
    assert session.faults == [] and session.counts["calls"] >= 8 - session.counts["interrupts"]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 4000, 100))
def test_sessions(first: int) -> None:
    """3,000 sessions of ten calls."""
    total = Counter[str]()
    for seed in range(first, first + 100):
        session = sessions.run_session(seed)
        assert session.faults == [], seed
        total += session.counts
    assert total["reused"] > 0 and total["near-ties"] <= total["calls"] // 500


def test_a_difference_is_found() -> None:
    """A change that the patched model alone sees."""
    session = sessions.build_session(21)
    sessions.CHANGES["in place"](session.patched)
    for _ in range(6):
        session.call()
    assert session.faults
