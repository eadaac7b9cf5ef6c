"""Each bug that a loop like ours invites is planted in the real engine, and the suite must go red."""

from __future__ import annotations

import os

import fuzz as fuzz
import mutation as mutation
import pytest

pytestmark = pytest.mark.skipif("MMSPEC_MUTANT" in os.environ, reason="a mutant is planted already")


def test_the_slice_is_green_without_a_mutant() -> None:
    """What the mutants are judged against."""
    for seed in range(5):
        assert not fuzz.run_seed(seed).differences


@pytest.mark.parametrize("name", mutation.MUTANTS)
def test_mutants_can_be_planted(name: str) -> None:
    """After a change of the engine a mutant may have lost its place."""
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
def test_every_mutant_is_caught(name: str) -> None:
    catch = mutation.detect(name, range(150))
    print(f"{name}: {catch.detected_by} after {catch.seconds:.0f} s")
    assert catch.detected_by
