"""The arbiter of draft arms on simulated rounds: close to the best arm, whichever it is and when it changes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from mmspec.control.arbiter import FIRST_ROUNDS, MAX_TRIAL_INTERVAL, DraftArbiter

Arm = tuple[float, float]
"""(probability that a further token is accepted, seconds of a round)"""


def draw_tokens(rng: random.Random, acceptance: float) -> int:
    """Tokens of a round: geometric, at most 8."""
    count = 1
    while count < 8 and rng.random() < acceptance:
        count += 1
    return count


def mean_tokens(acceptance: float) -> float:
    return sum(acceptance**depth for depth in range(8))


def simulate(
    arbiter: DraftArbiter, arms: Callable[[int], list[Arm]], calls: int, rounds: int, seed: int, first: int = 0
) -> tuple[float, list[int]]:
    """(share of the best arm's rate that was reached, rounds of each arm); `arms` by the number of the round."""
    rng = random.Random(seed)
    chosen = [0] * arbiter.num_arms
    seconds = best_s = 0.0
    available = [True] * arbiter.num_arms
    for call in range(calls):
        state = arbiter.start(1)
        for number in range(rounds):
            table = arms(call * rounds + number)
            arm = arbiter.choose(state, available)
            acceptance, round_s = table[arm]
            tokens = draw_tokens(rng, acceptance)
            arbiter.record(state, arm, tokens, round_s * rng.uniform(0.9, 1.2), available)
            if call >= first:
                chosen[arm] += 1
                seconds += round_s
                best_s += mean_tokens(acceptance) / max(mean_tokens(p) / s for p, s in table)
    return best_s / seconds, chosen


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "arms",
    [
        [(0.5, 4.0), (0.4, 4.2), (0.6, 4.5), (0.7, 4.4)],
        [(0.9, 4.0), (0.4, 4.2), (0.6, 4.5), (0.7, 4.4)],
        [(0.1, 4.0), (0.1, 4.5), (0.1, 6.0), (0.1, 5.0)],
        [(0.5, 4.0), (0.5, 4.0), (0.5, 4.0), (0.5, 4.0)],
        [(0.2, 4.0), (0.6, 4.2), (0.6, 7.5), (0.0, 4.4)],
    ],
)
def test_it_loses_at_most_three_percent(arms: list[Arm], seed: int) -> None:
    share, _ = simulate(DraftArbiter(4), lambda _: arms, calls=100, rounds=40, seed=seed, first=10)
    assert share > 0.97


@pytest.mark.parametrize("seed", range(3))
def test_it_follows_a_change_within_a_call(seed: int) -> None:
    def arms(number: int) -> list[Arm]:
        return [(0.9 if number >= 200 else 0.1, 4.0), (0.5, 4.2)]

    share, chosen = simulate(DraftArbiter(2), arms, calls=1, rounds=400, seed=seed)
    assert share > 0.85 and chosen[0] > 120


def test_an_arm_that_is_not_available_is_not_chosen() -> None:
    arbiter = DraftArbiter(2)
    call = arbiter.start(1)
    for _ in range(50):
        assert arbiter.choose(call, [True, False]) == 0
        arbiter.record(call, 0, 1.0, 1.0, [True, False])
    assert arbiter.choose(call, [True, True]) == 1, "now it is, and nothing is known of it"


def test_a_changed_arm_is_tried_in_the_next_call() -> None:
    arbiter = DraftArbiter(2)
    simulate(arbiter, lambda _: [(0.9, 1.0), (0.0, 5.0)], calls=20, rounds=40, seed=0)
    arbiter.retry(1)
    assert arbiter.choose(arbiter.start(1), [True, True]) == 1


def test_bad_arms_are_tried_rarely() -> None:
    _, chosen = simulate(
        DraftArbiter(2), lambda _: [(0.9, 1.0), (0.0, 50.0)], calls=1, rounds=4 * MAX_TRIAL_INTERVAL, seed=0
    )
    assert chosen[1] < 50


def test_the_first_arm_drafts_before_others_are_tried() -> None:
    arbiter = DraftArbiter(3, first=2)
    call = arbiter.start(1)
    chosen = []
    for _ in range(FIRST_ROUNDS + 60):
        arm = arbiter.choose(call, [True] * 3)
        arbiter.record(call, arm, 1.0 + (arm == 2), 1.0, [True] * 3)
        chosen.append(arm)
    assert set(chosen[:FIRST_ROUNDS]) == {2} and set(chosen[FIRST_ROUNDS:]) == {0, 1, 2}
