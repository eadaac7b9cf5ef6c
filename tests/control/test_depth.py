"""The depth controller and the moving average that the controllers share."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

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
