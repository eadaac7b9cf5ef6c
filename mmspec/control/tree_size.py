"""Controller of the tree size of each round, so that speculative decoding is not slower than plain decoding.

Learns, from real rounds of the running process, the seconds of a forward over (B, N) nodes and of a draft. Weighs them
against the drafter's scores (probabilities that nodes are accepted), calibrated by how many tokens were accepted. If
drafting costs time on average, the drafter is called so rarely that it costs at most `MAX_NET_COST` of the time. A
new call tries anew, as long as such trials lose `TRIAL_SHARE` of the time. No separate timing pass, no effect on the
output. Independent of models and drafters.
"""

from __future__ import annotations

import math

import torch

from mmspec.control.round_cost import (
    MAX_DEBT,
    TRIAL_SHARE,
    CallNetCost,
    DraftNetCost,
    RoundCostModel,
    cost_rows,
)
from mmspec.engine.tree import BUCKETS, DraftTree

MIN_GAIN = 1.05
"""Factor by which the expected tokens of a larger tree must exceed those of decoding otherwise in the same time."""
CALIBRATION_DECAY = 0.0005
"""Fraction by which `RoundCostModel.calibration` below 1 recovers in each round without a draft."""
REMEASURE_EVERY = 128
"""Rounds after which plain decoding is measured again, so that its cost is not overestimated for long."""
REMEASURE_FIRST = 8
"""The same while it was measured once: that may have been slow."""
DEFAULT_TREE_SIZE = 8
"""Tree size with `deterministic=True`, and upper bound before anything is measured."""
DEVICES_WITH_SCORES = frozenset({"cpu"})
"""Types of devices on which a drafter's scores are read; on others that would synchronise the device."""


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
            batch: B; `follow_rows` lowers it as rows end.
            drafts: False for a drafter that never proposes.
            max_tree_size: largest tree to consider, root included.
            fixed_tree_size: size of every tree; None to choose by costs.
        """
        self.costs = costs
        self.batch = self._most_rows = batch
        self.drafts = drafts
        self.fixed_tree_size = fixed_tree_size
        self.max_tree_size = fixed_tree_size or max_tree_size
        self._net_cost = costs.draft_net_cost.setdefault(batch, DraftNetCost()) if drafts else DraftNetCost()
        self._call = CallNetCost.after(self._net_cost)
        self._calls = {batch: self._call}
        if self._call.mean_s > 0:
            costs.expect_more()
        self._expected_gain = 0.0  # tokens beyond one per row that the chosen tree is expected to bring, uncalibrated
        self._num_active = 0  # rows that were drafted for in this round

    def follow_rows(self, num_rows: int) -> None:
        """From the coming round on only `num_rows` rows of the batch are scored: it costs what a smaller batch does."""
        batch = cost_rows(num_rows, self._most_rows)
        if batch != self.batch:
            self.batch = batch
            if self.drafts:
                self._net_cost = self.costs.draft_net_cost.setdefault(batch, DraftNetCost())
                self._call = self._calls.setdefault(batch, CallNetCost.after(self._net_cost))

    @property
    def should_draft(self) -> bool:
        """Whether the drafter is called in the coming round: where drafts have lost, if there is time for a trial."""
        if not self.drafts or self.fixed_tree_size is not None:
            return self.drafts
        may_lose = self._net_cost.credit_s > -MAX_DEBT * self.costs.round_s(self.batch, 1)
        return self._call.backoff == 0 and (self._call.mean_s <= 0 or may_lose or not self._net_cost.num_drafts)

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
        self._call.backoff = max(0, self._call.backoff - 1)
        self.costs.relax_calibration(CALIBRATION_DECAY)  # so that larger trees are tried again from time to time

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
        is_known = (True, (self.batch, 1)) not in costs.first_uses
        if net_cost.rounds_since_plain > (REMEASURE_EVERY if is_known else REMEASURE_FIRST):
            self._call.backoff = max(self._call.backoff, 1)
        if self._expected_gain > 0:
            costs.calibrate(num_accepted / self._expected_gain)
        plain_s = costs.round_s(self.batch, 1)
        net_cost.earn(TRIAL_SHARE * min(draft_s + score_s + overhead_s, 2 * plain_s), plain_s)
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
        net_cost_s = net_cost.likely_s(draft_s, plain_s) - gain * plain_s
        if num_nodes > 1:
            net_cost_s += self.costs.round_s(self.batch, num_nodes) - plain_s
        net_cost.add(net_cost_s, 1 + gain, round_s)
        net_cost.earn(-net_cost_s, plain_s)
        self._call.add(net_cost_s)
        if net_cost_s > 0 and self._call.mean_s > 0 and plain_s:
            self._call.back_off(plain_s)

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
