"""The depth controller and the moving average that the controllers share."""

from __future__ import annotations

import copy
import json
import math
import random
from dataclasses import dataclass
from statistics import median

import pytest

from mmspec.control.depth import DepthController
from mmspec.control.draft_cost import HeadCostModel
from mmspec.control.ema import ema


@dataclass
class FixedDepth(DepthController):
    """A controller with an attribute of its own."""

    levels: int = 2

    def choose(self, batch: int) -> int:
        """Always the same."""
        return self.levels


def test_ema_starts_with_the_first_value() -> None:
    assert ema(None, 3.0, 0.1) == 3.0 and ema(0.0, 3.0, 0.1) == 3.0 and ema(0.0, 4, 0.1) == 4.0


def test_ema_clips_outliers_unless_disabled() -> None:
    assert ema(1.0, 100.0, 0.1) == pytest.approx(1.1)
    assert ema(1.0, 101.0, 0.1, clip_above=math.inf) == pytest.approx(11.0)


def test_ema_restarts_below_a_fraction_of_the_mean() -> None:
    assert ema(1.0, 0.4, 0.1, restart_below=0.5) == 0.4
    assert ema(1.0, 0.4, 0.1) == pytest.approx(0.94)
    assert ema(1.0, 0.6, 0.1, restart_below=0.5) == pytest.approx(0.96)


def test_a_deep_copy_keeps_class_attributes_and_measurements() -> None:
    controller = FixedDepth(6, tokens_per_level=2, levels=3)
    controller.record(1, 3, [1], level_s=0.5, base_s=1.0)
    twin = copy.deepcopy(controller)
    assert type(twin) is FixedDepth and twin.levels == 3 and twin.choose(1) == 3
    assert twin.by_batch == controller.by_batch and twin.by_batch[1] is not controller.by_batch[1]
    assert twin.lock is not controller.lock
    twin.record(1, 3, [0], level_s=0.1, base_s=1.0)
    assert controller.by_batch[1].level_s == 0.5, "the copy learns for itself"


def test_a_snapshot_of_draft_costs_is_independent() -> None:
    costs = HeadCostModel()
    for length in (1000, 1000, 500):
        costs.record_prefill(1, length, length / 1000)
    costs.record_round(1, 0.1, 2.0)
    twin = costs.snapshot()
    assert twin.costs(1) == costs.costs(1) is not None
    twin.record_round(1, 0.2, 2.0)
    assert costs.by_batch[1].round_s == 0.1
    assert copy.deepcopy(costs).costs(1) is None, "a deep copy may run on another device"


@pytest.mark.parametrize(("acceptance", "level_s", "best"), [(0.9, 0.0005, 6), (0.3, 0.003, 1), (0.6, 0.001, 3)])
def test_levels_of_whole_rounds_cost_what_longer_rounds_take_longer(
    acceptance: float, level_s: float, best: int
) -> None:
    """Neither the draft nor its levels are timed; rounds take 10 ms and `level_s` per further level, and some noise."""
    rng = random.Random(0)
    controller = DepthController(6)
    chosen = []
    for _ in range(400):
        levels = controller.choose(1)
        accepted = next((depth for depth in range(levels) if rng.random() > acceptance), levels)
        round_s = (0.01 + (levels - 1) * level_s) * rng.uniform(0.98, 1.02)
        controller.record_whole(1, levels, 8, [accepted], round_s)
        chosen.append(levels)
    assert set(chosen[:11]) == {6, 3}, "all levels, then half of them"
    assert abs(median(chosen[200:]) - best) <= 1 and len(set(chosen[200:])) > 1, "probes go on"
    assert controller.by_batch[1].level_s == pytest.approx(level_s, rel=0.5)
    twin = DepthController(6)
    twin.restore(json.loads(json.dumps(controller.snapshot())))
    assert twin.by_batch[1].level_s == controller.by_batch[1].level_s and not twin.by_batch[1].whole_s


def test_rounds_of_other_trees_are_not_compared() -> None:
    controller = DepthController(4)
    for _ in range(4):
        controller.record_whole(1, 4, 16, [2], 0.03)
        controller.record_whole(1, 2, 8, [2], 0.01)
    assert controller.by_batch[1].level_s == 0.0
    for _ in range(4):
        assert controller.by_batch[1].level_s == 0.0, "of few rounds"
        controller.record_whole(1, 2, 16, [2], 0.02)
    assert controller.by_batch[1].level_s == pytest.approx(0.005)
