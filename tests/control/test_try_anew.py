"""Decisions by measured rounds: no cold run and no stall outlives its cause, and each call tries drafts anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mmspec.app.caption import batch_size
from mmspec.app.caption.batch_size import AUTO_BATCH_SIZE, BatchSizer
from mmspec.control.arbiter import DraftArbiter
from mmspec.control.chain import ChainController, ChainPlan
from mmspec.control.depth import DepthController
from mmspec.control.round_cost import RoundCostModel
from mmspec.control.tree_size import TreeSizeController
from mmspec.engine.tree import DraftTree

Delay = Callable[[int], float]
"""Seconds that are added to the n-th round, from 0."""
DELAYS: dict[str, Delay] = {
    "none": lambda number: 0.0,
    "slow first run": lambda number: 50.0 if number == 0 else 0.0,
    "slow first runs": lambda number: 5.0 if number < 3 else 0.0,
    "a stall": lambda number: 100.0 if number == 3 else 0.0,
    "later stalls": lambda number: 100.0 if number in (11, 40) else 0.0,
}


def tree(score: float, nodes: int = 8) -> DraftTree:
    scores = torch.tensor([[score**number for number in range(nodes)]])
    parents = torch.tensor([[number - 1 for number in range(nodes)]])
    return DraftTree(torch.zeros_like(parents), parents, torch.ones(1, nodes, dtype=torch.bool), scores)


def decode(
    costs: RoundCostModel, rounds: int, acceptance: float, draft_s: float = 0.1, delay: Delay = DELAYS["none"]
) -> tuple[list[bool], float]:
    """One call: whether each round had a draft that was scored, and seconds over those of plain decoding."""
    controller, drafted, total_s, tokens = TreeSizeController(costs, 1, drafts=True), list[bool](), 0.0, 0.0
    for number in range(rounds):
        nodes, seconds = 1, 0.0
        if controller.should_draft:
            nodes, seconds = controller.choose_size(tree(0.8), 1), draft_s
        else:
            controller.skip_draft()
        gain = sum(acceptance**depth for depth in range(1, nodes))
        score_s = 1 + 0.1 * (nodes - 1)
        times = [seconds, score_s] if number % 2 else [seconds, score_s + delay(number)]
        if number % 2 and seconds:
            times[0] += delay(number)
        controller.record(nodes, draft_s=times[0], score_s=times[1], overhead_s=0.0, num_accepted=gain)
        drafted.append(nodes > 1)
        total_s, tokens = total_s + seconds + score_s, tokens + 1 + gain
    return drafted, total_s / tokens


def test_the_same_picture_drafts_as_before_after_short_follow_ups() -> None:
    costs = RoundCostModel()
    before, _ = decode(costs, 28, acceptance=0.8)
    for _ in range(5):
        decode(costs, 10, acceptance=0.0)
    after, _ = decode(costs, 28, acceptance=0.8)
    assert sum(before) >= 20 and sum(after) >= sum(before) - 3


@pytest.mark.parametrize("rounds", [4, 10, 40, 200])
@pytest.mark.parametrize("draft_s", [0.02, 0.3, 1.0, 4.0])
def test_trials_of_each_call_stay_cheap(rounds: int, draft_s: float) -> None:
    """Drafts that never pay: over any 300 rounds they lose no more than 3%, besides what the first ones cost."""
    costs = RoundCostModel()
    for _ in range(300 // rounds + 1):
        decode(costs, rounds, 0.0, draft_s)
    seconds = [decode(costs, rounds, 0.0, draft_s)[1] for _ in range(600 // rounds)]
    window = max(1, 300 // rounds)
    worst = max(sum(seconds[start : start + window]) / window for start in range(len(seconds) - window + 1))
    assert worst <= 1.03 + (draft_s / 300 if draft_s > 1 else 0.0)


@pytest.mark.parametrize("delay", DELAYS)
def test_slow_rounds_do_not_end_drafts_that_pay(delay: str) -> None:
    costs = RoundCostModel()
    decode(costs, 60, 0.8, delay=DELAYS[delay])
    assert sum(decode(costs, 30, 0.8)[0]) >= 24
    decode(costs, 60, 0.8, delay=DELAYS[delay])
    assert sum(decode(costs, 30, 0.8)[0]) >= 24, "also where something was known"


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("arm", [0, 1])
def test_an_arm_is_not_judged_by_slow_rounds(arm: int, delay: str) -> None:
    """The arm that is 3% faster than the other drafts most rounds, whichever was slow at first or stalled."""
    arbiter, chosen, runs = DraftArbiter(2), list[int](), [0, 0]
    for _ in range(30):
        call = arbiter.start(1)
        for _ in range(40):
            now = arbiter.choose(call, [True, True])
            chosen.append(now)
            seconds = (1.0, 0.97)[now] + (DELAYS[delay](runs[now]) if now == arm else 0.0)
            runs[now] += 1
            arbiter.record(call, now, 2.0, seconds, [True, True])
    assert chosen[-400:].count(1) >= 300


@pytest.mark.parametrize("delay", DELAYS)
def test_depth_and_length_are_not_judged_by_slow_rounds(delay: str) -> None:
    depth, levels = DepthController(6), list[int]()
    chain, lengths, number = ChainController(8), list[int](), 0
    for number in range(160):
        levels.append(depth.choose(1))
        added = DELAYS[delay](number)
        depth.record(1, levels[-1], [levels[-1]], (0.1 + added) if levels[-1] > 1 else 0.0, 1.0 + added)
        plan = chain.plan(1, ["4 bits"])
        lengths.append(plan.length)
        chain.record(1, ChainPlan("4 bits", plan.length), plan.length, [plan.length], 0.1 + added, 1.0 + added, 8)
    assert sum(levels[100:]) / 60 > 5 and sum(lengths[100:]) / 60 > 6


@pytest.mark.parametrize("slow", [range(0), range(1), range(2, 3), range(3, 4), range(1, 2)])
def test_a_batch_size_is_not_judged_by_a_stall(slow: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the rows take 10% longer; the first batch of all is slow, and another may stall."""
    now, sizer = [0.0], BatchSizer(AUTO_BATCH_SIZE)
    monkeypatch.setattr(batch_size.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(batch_size, "used_memory_share", lambda: 0.0)
    for number in range(20):
        with sizer.measure(sizer.size):
            now[0] += 1 + 0.1 * sizer.size / 4 + 50.0 * (number in slow)
    assert sizer.size == 64
