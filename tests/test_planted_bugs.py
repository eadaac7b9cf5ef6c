"""Each bug that a loop like ours invites is planted in the real engine, and the suite must go red."""

from __future__ import annotations

import os

import fuzz as cases
import mutation as mutants
import pytest

pytestmark = pytest.mark.skipif("MMSPEC_MUTANT" in os.environ, reason="a mutant is planted already")


def test_the_slice_is_green_without_a_mutant() -> None:
    """What the mutants are judged against."""
    for seed in range(5):
        assert not cases.attempt(seed).differences


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_mutants_can_be_planted(name: str) -> None:
    """After a change of the engine a mutant may have lost its place."""
    before = [getattr(owner, attribute) for owner, attribute, _ in mutants.MUTANTS[name]]
    with mutants.planted(name):
        assert all(
            getattr(owner, attribute) is not old
            for (owner, attribute, _), old in zip(mutants.MUTANTS[name], before, strict=True)
        )
    assert [getattr(owner, attribute) for owner, attribute, _ in mutants.MUTANTS[name]] == before


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_every_mutant_is_caught(name: str) -> None:
    catch = mutants.hunt(name, range(150))
    print(f"{name}: {catch.by} after {catch.seconds:.0f} s")
    assert catch.by
