"""Mutation tests: each typical bug of a decode loop is planted in the engine, and the suite must fail."""

from __future__ import annotations

import os

import fuzz as fuzz
import mutation as mutation
import pytest

from mmspec.cpu.c_kernel import load_kernel

pytestmark = pytest.mark.skipif("MMSPEC_MUTANT" in os.environ, reason="a bug is planted already")


def test_no_difference_without_a_bug() -> None:
    """The baseline of the mutation tests."""
    for seed in range(5):
        assert not fuzz.run_seed(seed).differences


@pytest.mark.parametrize("name", mutation.MUTANTS)
def test_bugs_can_be_planted(name: str) -> None:
    """After a change of the engine an attribute of a mutant may be missing."""
    before = [getattr(owner, attribute) for owner, attribute, _ in mutation.MUTANTS[name]]
    with mutation.plant_bug(name):
        assert all(
            getattr(owner, attribute) is not old
            for (owner, attribute, _), old in zip(mutation.MUTANTS[name], before, strict=True)
        )
    assert [getattr(owner, attribute) for owner, attribute, _ in mutation.MUTANTS[name]] == before


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", mutation.MUTANTS)
def test_every_bug_is_detected(name: str) -> None:
    if name in mutation.C_MUTANTS and load_kernel() is None:
        pytest.skip("no compiler or another processor")
    detection = mutation.detect(name, range(150))
    print(f"{name}: {detection.detected_by} after {detection.seconds:.0f} s")
    assert detection.detected_by
