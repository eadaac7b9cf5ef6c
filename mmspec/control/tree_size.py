"""Controller of the tree size of each round, so that speculative decoding is not slower than plain decoding.

Learns, from real rounds of the running process, the seconds of a forward over (B, N) nodes and of a draft. Weighs them
against the drafter's scores (probabilities that nodes are accepted), calibrated by how many tokens were accepted. If
drafting costs time on average, the drafter is called so rarely that it costs at most `MAX_NET_COST` of the time. No
separate timing pass, no effect on the output. Independent of models and drafters.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mmspec.control.ema import ema
from mmspec.engine.tree import BUCKETS, DraftTree

DEFAULT_NODE_COST = {"cpu": 0.11, "other": 0.01}
"""Assumed cost of one more node by device, as a fraction of a one-node forward, until it is measured."""
MIN_GAIN = 1.05
"""Factor by which the expected tokens of a larger tree must exceed those of decoding otherwise in the same time."""
MAX_NET_COST = 0.01
"""Largest fraction of the decoding time that unprofitable drafting may cost."""
MAX_BACKOFF = 512
"""Largest number of rounds without a call of the drafter."""
CALIBRATION_DECAY = 0.0005
"""Fraction by which `RoundCostModel.calibration` below 1 recovers in each round without a draft."""
MIN_CALIBRATION, MAX_CALIBRATION = 0.05, 1.5
"""Bounds of `RoundCostModel.calibration`."""
MIN_RESTORED_CALIBRATION = 0.5
"""Smallest calibration that a process takes over from another; below, drafts would hardly be tried."""
MAX_RESTORED_CALIBRATIONS = 4
"""Rounds that a calibration of another process counts for."""
REMEASURE_EVERY = 128
"""Rounds after which plain decoding is measured again, so that its cost is not overestimated for long."""
DEFAULT_TREE_SIZE = 8
"""Tree size with `deterministic=True`, and upper bound before anything is measured."""
DEVICES_WITH_SCORES = frozenset({"cpu"})
"""Types of devices on which a drafter's scores are read; on others that would synchronise the device."""
COST_WEIGHT = 0.2
"""Weight of a new measurement in the running means of `RoundCostModel`."""


@dataclass
class DraftNetCost:
    """Whether drafting saves time at one batch size, and how long the drafter is not called if it does not.

    The net cost of a draft is the time that it adds to a round, minus the time in which plain decoding would emit the
    accepted tokens.

    Attributes:
        mean_s: mean net cost of a draft in seconds; negative if drafting saves time.
        tokens_per_round: mean tokens that an active row emits in a round with a draft.
        round_s: mean seconds of a round with a draft.
        num_drafts: number of drafts counted.
        backoff: rounds until the drafter is called again.
        rounds_since_plain: rounds since the last one-node round, over all calls.
        measured_sizes: tree sizes that were scored before. The first use of a size is slow (kernels are selected,
            memory is allocated) and not counted.
    """

    mean_s: float = 0.0
    tokens_per_round: float = 0.0
    round_s: float = 0.0
    num_drafts: int = 0
    backoff: int = 0
    rounds_since_plain: int = 0
    measured_sizes: set[int] = field(default_factory=set)

    def add(self, net_cost_s: float, tokens: float, round_s: float) -> None:
        """Count one draft: arithmetic means of the first ten, then exponential ones with weight 0.1."""
        self.num_drafts += 1
        weight = max(1 / self.num_drafts, 0.1)
        self.mean_s += weight * (net_cost_s - self.mean_s)
        self.tokens_per_round += weight * (tokens - self.tokens_per_round)
        self.round_s += weight * (round_s - self.round_s)

    def back_off(self, plain_s: float) -> None:
        """Skip so many rounds that the mean net cost is at most `MAX_NET_COST` of their time; fewer after few drafts.

        Args:
            plain_s: seconds of a round of plain decoding.
        """
        self.backoff = min(MAX_BACKOFF, 2**self.num_drafts, int(self.mean_s / (MAX_NET_COST * plain_s)))


@dataclass
class RoundCostModel:
    """Running means of measured costs, shared by all calls with one drafter on one model.

    Attributes:
        device: "cpu" or "other", selects the assumed node cost.
        score_s: {(B, N): seconds of the target's forward}.
        overhead_s: {(B, N): seconds of a round outside draft and forward}.
        draft_net_cost: {B: net cost of drafting}.
        calibration: ratio of accepted tokens to those that the drafter's scores predicted.
        num_calibrations: rounds that `calibration` is based on.
    """

    device: str = "cpu"
    score_s: dict[tuple[int, int], float] = field(default_factory=dict)
    overhead_s: dict[tuple[int, int], float] = field(default_factory=dict)
    draft_net_cost: dict[int, DraftNetCost] = field(default_factory=dict)
    calibration: float = 1.0
    num_calibrations: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> RoundCostModel:
        with self.lock:
            net_costs = {
                batch: replace(net_cost, measured_sizes=set(net_cost.measured_sizes))
                for batch, net_cost in self.draft_net_cost.items()
            }
            return type(self)(
                self.device,
                dict(self.score_s),
                dict(self.overhead_s),
                net_costs,
                self.calibration,
                self.num_calibrations,
            )

    def snapshot(self) -> dict[str, Any]:
        """The measurements, ready for JSON."""
        with self.lock:
            net_costs = {
                str(batch): [one.mean_s, one.tokens_per_round, one.round_s, one.num_drafts]
                for batch, one in self.draft_net_cost.items()
                if one.num_drafts and one.mean_s < 0
            }
            return {
                "score_s": [[*key, seconds] for key, seconds in self.score_s.items()],
                "overhead_s": [[*key, seconds] for key, seconds in self.overhead_s.items()],
                "savings": {batch: [-one[0], *one[1:]] for batch, one in net_costs.items()},
                "calibration": self.calibration,
                "num_calibrations": self.num_calibrations,
            }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Take over the measurements of another process.

        Where drafting did not pay it is tried again, since that may have been another load of the machine, or other
        texts: the back-off starts anew, no tree costs more than is assumed of one that was never measured, and a low
        calibration is raised and soon replaced. The first use of a tree size is slow in every process, so no size
        counts as measured.
        """
        score_s = {(int(batch), int(size)): float(seconds) for batch, size, seconds in snapshot["score_s"]}
        overhead_s = {(int(batch), int(size)): float(seconds) for batch, size, seconds in snapshot["overhead_s"]}
        with self.lock:
            self.score_s = {
                (batch, size): min(seconds, score_s[batch, 1] * self._assumed_cost(size))
                for (batch, size), seconds in score_s.items()
                if (batch, 1) in score_s
            }
            self.overhead_s = {key: seconds for key, seconds in overhead_s.items() if key[1] == 1}
            self.draft_net_cost = {
                int(batch): DraftNetCost(-float(saved_s), float(tokens), float(round_s), int(num_drafts))
                for batch, (saved_s, tokens, round_s, num_drafts) in snapshot["savings"].items()
            }
            self.calibration = min(MAX_CALIBRATION, max(MIN_RESTORED_CALIBRATION, float(snapshot["calibration"])))
            self.num_calibrations = min(MAX_RESTORED_CALIBRATIONS, int(snapshot["num_calibrations"]))

    def forward_s(self, batch: int, num_nodes: int) -> float:
        """Seconds of one forward over `num_nodes` nodes per row; 0 if nothing was measured at this batch size.

        Sizes that were not measured are extrapolated from the nearest smaller measured size, else from the smallest.
        """
        with self.lock:  # other threads may add sizes
            measured = {size: seconds for (rows, size), seconds in self.score_s.items() if rows == batch}
        if not measured:
            return 0.0
        sizes = sorted(measured)
        if num_nodes in measured:  # a cheaper larger size shows that this size's mean still contains its slow first use
            return min(measured[size] for size in sizes if size >= num_nodes)
        nearest = max((size for size in sizes if size < num_nodes), default=sizes[0])
        if sizes[0] < nearest:  # the measured cost of a node is better than the assumed one
            node_s = (measured[nearest] - measured[sizes[0]]) / (nearest - sizes[0])
            return measured[nearest] + (num_nodes - nearest) * max(0.0, node_s)
        return measured[nearest] * self._assumed_cost(num_nodes) / self._assumed_cost(nearest)

    def _assumed_cost(self, num_nodes: int) -> float:
        """Cost of a forward over `num_nodes` nodes that was not measured, relative to one node."""
        return 1 + DEFAULT_NODE_COST.get(self.device, DEFAULT_NODE_COST["other"]) * (num_nodes - 1)

    def round_s(self, batch: int, num_nodes: int) -> float:
        """Seconds of one round without its draft."""
        overhead_s = self.overhead_s.get((batch, num_nodes), self.overhead_s.get((batch, 1), 0.0))
        return self.forward_s(batch, num_nodes) + overhead_s

    def saved_s(self, batch: int, num_drafts: int) -> float | None:
        """Seconds that so many drafts saved at a batch size, by their mean; None before any was measured."""
        with self.lock:
            net_cost = self.draft_net_cost.get(batch)
            return None if net_cost is None or not net_cost.num_drafts else -net_cost.mean_s * num_drafts

    def retry(self) -> None:
        """Try drafts again soon at the batch sizes where they did not pay: the drafter has become better."""
        with self.lock:
            failed = [net_cost for net_cost in self.draft_net_cost.values() if net_cost.mean_s > 0]
            for net_cost in failed:
                net_cost.backoff = net_cost.num_drafts = 0
            if failed and self.calibration < 1:
                self.calibration, self.num_calibrations = 1.0, 0

    def update(self, table: dict[Any, float], key: Any, seconds: float) -> None:
        """Add a measurement to `score_s` or `overhead_s`."""
        with self.lock:
            table[key] = ema(table.get(key), seconds, COST_WEIGHT, restart_below=0.5)

    def calibrate(self, ratio: float) -> None:
        """Add the ratio of accepted to predicted tokens of one round."""
        with self.lock:
            self.num_calibrations += 1
            weight = max(1 / (self.num_calibrations + 2), 0.1)
            calibration = self.calibration + weight * (min(2.0, ratio) - self.calibration)
            self.calibration = min(MAX_CALIBRATION, max(MIN_CALIBRATION, calibration))


class TreeSizeController:
    """Controller of one call. Per round: `should_draft`, then `choose_size` or `skip_draft`, then `record`."""

    def __init__(
        self,
        costs: RoundCostModel,
        batch: int,
        *,
        drafts: bool,
        max_tree_size: int = 16,
        fixed_tree_size: int | None = None,
    ) -> None:
        """
        Args:
            costs: measurements of this drafter on this model.
            batch: B.
            drafts: False for a drafter that never proposes.
            max_tree_size: largest tree to consider, root included.
            fixed_tree_size: size of every tree; None to choose by costs.
        """
        self.costs = costs
        self.batch = batch
        self.drafts = drafts
        self.fixed_tree_size = fixed_tree_size
        self.max_tree_size = fixed_tree_size or max_tree_size
        self._net_cost = costs.draft_net_cost.setdefault(batch, DraftNetCost()) if drafts else DraftNetCost()
        self._expected_gain = 0.0  # tokens beyond one per row that the chosen tree is expected to bring, uncalibrated
        self._num_active = 0  # rows that were drafted for in this round

    @property
    def should_draft(self) -> bool:
        """Whether the drafter is called in the coming round."""
        return self.drafts and (self._net_cost.backoff == 0 or self.fixed_tree_size is not None)

    def choose_size(self, tree: DraftTree, num_active: int, max_gain: float = math.inf) -> int:
        """Number of nodes of `tree` worth scoring; 1 is plain decoding.

        The draft's own cost is spent either way. Maximises tokens per second in the long run: a size is worth its
        expected tokens minus those that its additional seconds would bring otherwise (`_rate`). The best rate of each
        single round would not maximise it.

        Args:
            tree: the draft.
            num_active: rows that are still being decoded.
            max_gain: upper bound of the tokens beyond one each that these rows may still emit.
        """
        self._expected_gain = 0.0
        if self.fixed_tree_size:
            return self.fixed_tree_size
        self._num_active = num_active
        return 1 if tree.num_nodes == 1 else self._best_size(self._expected_gains(tree, num_active), max_gain)

    def choose_size_in_advance(self, device: torch.device, num_active: int, max_gain: float = math.inf) -> int | None:
        """`choose_size` before the draft; None where it depends on the draft, whose scores are read on a CPU only.

        Args:
            device: of the draft.
            num_active: as in `choose_size`.
            max_gain: as in `choose_size`.
        """
        self._expected_gain = 0.0
        if self.fixed_tree_size:
            return self.fixed_tree_size
        if device.type in DEVICES_WITH_SCORES:
            return None
        self._num_active = num_active
        return self._best_size(_assumed_gains(self.max_tree_size, num_active), max_gain)

    def _best_size(self, gains: list[float], max_gain: float) -> int:
        """Number of nodes for the most tokens per second in the long run.

        Args:
            gains: [N] of `_expected_gains`.
            max_gain: their upper bound.
        """
        costs, num_active, num_nodes = self.costs, self._num_active, len(gains)
        plain_s = costs.round_s(self.batch, 1)
        rate = MIN_GAIN * num_active * self._rate(plain_s)
        # Before anything is measured, begin with a tree of moderate size.
        limit = num_nodes if plain_s else min(num_nodes, DEFAULT_TREE_SIZE)
        best, best_value = 1, 0.0
        for size in (size for size in BUCKETS if 1 < size <= limit):
            gain = min(gains[size - 1] * costs.calibration, max_gain)
            value = gain - rate * (costs.round_s(self.batch, size) - plain_s)
            if value > best_value:
                best, best_value = size, value
        self._expected_gain = min(gains[best - 1], max_gain)
        return best

    def skip_draft(self) -> None:
        """Count a round without a call of the drafter."""
        if not self.drafts:
            return
        self._net_cost.backoff = max(0, self._net_cost.backoff - 1)
        with self.costs.lock:  # recovers slowly, so that larger trees are tried again from time to time
            self.costs.calibration += CALIBRATION_DECAY * max(0.0, 1 - self.costs.calibration)

    def record(self, num_nodes: int, *, draft_s: float, score_s: float, overhead_s: float, num_accepted: int) -> None:
        """Add the measurements of one round.

        Args:
            num_nodes: size of the scored tree.
            draft_s: seconds of the draft.
            score_s: seconds of the target's forward.
            overhead_s: seconds of everything else.
            num_accepted: tokens emitted beyond one per active row.
        """
        if not self.drafts:
            return
        costs = self.costs
        net_cost = self._net_cost
        costs.update(costs.score_s, (self.batch, num_nodes), score_s)
        costs.update(costs.overhead_s, (self.batch, num_nodes), overhead_s)
        net_cost.rounds_since_plain = 0 if num_nodes == 1 else net_cost.rounds_since_plain + 1
        if net_cost.rounds_since_plain > REMEASURE_EVERY:
            net_cost.backoff = max(net_cost.backoff, 1)
        if self._expected_gain > 0:
            costs.calibrate(num_accepted / self._expected_gain)
        if self._num_active:
            round_s = draft_s + score_s + overhead_s
            self._update_net_cost(num_nodes, draft_s, round_s, num_accepted / self._num_active)
        self._expected_gain = 0.0
        self._num_active = 0

    def _rate(self, plain_s: float) -> float:
        """Tokens per second and active row: of plain decoding, or of rounds with drafts where these are faster."""
        plain_rate = 1 / plain_s if plain_s else 0.0
        if not self._net_cost.round_s:
            return plain_rate
        return max(plain_rate, self._net_cost.tokens_per_round / self._net_cost.round_s)

    def _update_net_cost(self, num_nodes: int, draft_s: float, round_s: float, gain: float) -> None:
        """After a draft: back off if drafting costs time on average.

        Uses mean costs, not those of this round: single rounds are noisy.

        Args:
            num_nodes: size of the scored tree.
            draft_s: seconds of the draft.
            round_s: seconds of the whole round.
            gain: tokens beyond one per active row.
        """
        net_cost = self._net_cost
        if num_nodes not in net_cost.measured_sizes:
            net_cost.measured_sizes.add(num_nodes)
            return
        plain_s = self.costs.round_s(self.batch, 1)
        net_cost_s = draft_s - gain * plain_s
        if num_nodes > 1:
            net_cost_s += self.costs.round_s(self.batch, num_nodes) - plain_s
        net_cost.add(net_cost_s, 1 + gain, round_s)
        if net_cost_s > 0 and net_cost.mean_s > 0 and plain_s:
            net_cost.back_off(plain_s)

    def _expected_gains(self, tree: DraftTree, num_active: int) -> list[float]:
        """[N] expected tokens beyond one per row if the first n + 1 nodes are scored, summed over rows."""
        if tree.scores is None or tree.scores.device.type not in DEVICES_WITH_SCORES:
            return _assumed_gains(tree.num_nodes, num_active)
        scores = torch.where(tree.node_mask, tree.scores, 0.0)
        scores[:, 0] = 0.0
        return scores.sum(0).cumsum(0).tolist()


def _assumed_gains(num_nodes: int, num_active: int) -> list[float]:
    """[N] `_expected_gains` of a tree whose scores are not read; `RoundCostModel.calibration` corrects them."""
    return [0.3 * num_active * node for node in range(num_nodes)]
