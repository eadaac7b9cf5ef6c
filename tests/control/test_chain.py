"""The controller of drafts by a whole model, on simulated rounds. No model, no clock."""

from __future__ import annotations

import copy
import random
from collections import Counter

import pytest

from mmspec.control.chain import EXPLORE_EVERY_DRAFTS, FIRST_LENGTH, NUM_TRIALS, ChainController, ChainPlan
from mmspec.engine.tree import bucket_size

STEP_S = {"good": 0.3, "cheap": 0.1, "slow": 0.9}
ACCEPTANCE = {"good": 0.9, "cheap": 0.2, "slow": 0.95}


def _play(controller: ChainController, rounds: int, seed: int = 0, batch: int = 1) -> Counter[ChainPlan]:
    """Plans of simulated rounds in which a round without its draft takes a second."""
    rng, plans = random.Random(seed), Counter[ChainPlan]()
    for _ in range(rounds):
        plan = controller.plan(batch, tuple(STEP_S))
        plans[plan] += 1
        accepted = []
        for _ in range(batch):
            count = 0
            while count < plan.length and rng.random() < ACCEPTANCE[str(plan.variant)]:
                count += 1
            accepted.append(count)
        controller.record(
            batch, plan, plan.length, accepted, STEP_S[str(plan.variant)], 1.0, bucket_size(plan.length + 1)
        )
    return plans


@pytest.mark.parametrize("batch", [1, 4])
def test_the_variant_with_the_most_tokens_per_second_drafts(batch: int) -> None:
    controller = ChainController(6)
    _play(controller, 120, batch=batch)
    plans = _play(controller, 200, seed=1, batch=batch)
    variants = Counter(str(plan.variant) for plan in plans.elements())
    assert variants["good"] > 150
    assert min(variants.values()) > 0, "the others are tried from time to time"
    good = [plan for plan in plans.elements() if plan.variant == "good"]
    mean = sum(plan.length for plan in good) / len(good)
    rates = {n: sum(0.9**i for i in range(n + 1)) / (1 + 0.3 * n) for n in range(1, 7)}
    assert rates[round(mean)] > 0.97 * max(rates.values())
    assert all(0 <= plan.min_prob < 1 for plan in good)


def test_the_first_variant_drafts_before_the_others_are_tried() -> None:
    controller = ChainController(6)
    plans = _play(controller, NUM_TRIALS)
    assert plans == {ChainPlan("good", FIRST_LENGTH): NUM_TRIALS}
    variants = Counter(str(plan.variant) for plan in _play(controller, 3 * EXPLORE_EVERY_DRAFTS).elements())
    assert variants["good"] > 2 * EXPLORE_EVERY_DRAFTS and variants["cheap"] > 0 and variants["slow"] > 0


def test_a_draft_that_was_not_scored_is_no_evidence() -> None:
    controller = ChainController(6)
    before = copy.deepcopy(controller)
    plan = controller.plan(1, ("good",))
    assert plan.length == FIRST_LENGTH
    controller.record(1, plan, 0, [0], 0.1, 1.0, 1)
    stats = controller.by_batch[1]["good"]
    assert stats.num_drafts == 1 and stats.acceptance == controller.by_batch[1]["good"].acceptance
    assert not before.by_batch and before.lock is not controller.lock


def test_the_cost_of_scoring_longer_chains_counts() -> None:
    controller = ChainController(15)
    for _ in range(60):
        plan = controller.plan(1, ("good",))
        seconds = 1.0 if plan.length < 8 else 20.0  # as where a wide forward is slow
        controller.record(1, plan, plan.length, [plan.length], 0.01, seconds, bucket_size(plan.length + 1))
    assert controller.plan(1, ("good",)).length == 7


@pytest.mark.parametrize("num_rows", [1, 8])
def test_smaller_trees_than_the_first_are_tried(num_rows: int) -> None:
    """The first drafts are of `FIRST_LENGTH`; where a wide forward is slow and little is accepted, shorter ones pay."""
    controller = ChainController(15)
    for _ in range(40):
        plan = controller.plan(num_rows, ("good",))
        nodes = bucket_size(plan.length + 1)
        accepted = [min(plan.length, row % 2) for row in range(max(2, num_rows))]  # half of the first tokens
        controller.record(num_rows, plan, plan.length, accepted, 0.2, 1 + 0.1 * (num_rows * nodes - 1), nodes)
    assert controller.plan(num_rows, ("good",)).length == 1
    assert min(controller.base_s[num_rows]) == 2
