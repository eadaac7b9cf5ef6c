"""How many nodes the next round may cost, so that speculation is never slower than plain decoding.

Learns from the real rounds of the running process what a forward over (B, N) nodes costs and what a draft costs;
weighs that against what the drafter says its nodes are worth, corrected by how much of that came true. When asking the
drafter has been a loss, it is asked only so often that the loss stays within a hundredth of the time. No timing pass is
ever run for it, and nothing here can change a token. Knows nothing of models or drafters.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mmspec.control.draft_cost import ema
from mmspec.engine.tree import BUCKETS, DraftTree

DEFAULT_NODE_COST = {"cpu": 0.11, "other": 0.01}
"""Guess, until measured, of what one more node adds to a forward, in forwards of one node."""
MIN_GAIN = 1.05
"""A larger tree must promise this many times what its seconds could bring otherwise."""
MAX_OVERHEAD = 0.01
"""Share of the time that may be lost by asking a drafter that does not pay."""
MAX_BACKOFF = 512
"""Rounds after which a drafter that does not pay is asked again, at the latest."""
CALIBRATION_DECAY = 0.0005
"""Share of the doubt in a drafter that goes away in each round in which it is not asked."""
REMEASURE_EVERY = 128
"""Rounds after which plain decoding is measured again, that nobody thinks it dearer than it is."""
DEFAULT_TREE_SIZE = 8
"""Nodes of every tree when shapes must not depend on timing and nobody says how many, and of a process's first."""


@dataclass
class DraftOverhead:
    """What asking the drafter has cost at one batch size: mean seconds lost per time asked; below 0 it paid.

    `tokens`, `seconds`: means of what a live row emits, and of what a round takes, when the drafter is asked.
    """

    mean_s: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    num_drafts: int = 0
    backoff: int = 0
    """Rounds to go until it is asked again."""
    rounds_since_plain: int = 0
    """Rounds since plain decoding was measured, of all calls."""
    measured_sizes: set[int] = field(default_factory=set)
    """Sizes of trees that were scored before. First uses are dear: kernels are tried, memory is asked for."""

    def add(self, lost_s: float, tokens: float, seconds: float) -> None:
        """Count one more time: plain means at first, later such as forget."""
        self.num_drafts += 1
        share = max(1 / self.num_drafts, 0.1)
        self.mean_s += share * (lost_s - self.mean_s)
        self.tokens += share * (tokens - self.tokens)
        self.seconds += share * (seconds - self.seconds)

    def back_off(self, plain_s: float) -> None:
        """So long that little is lost on the whole; at first, on little evidence, not for long."""
        self.backoff = min(MAX_BACKOFF, 2**self.num_drafts, int(self.mean_s / (MAX_OVERHEAD * plain_s)))


@dataclass
class CostModel:
    """Running means of measured seconds, shared by all calls with one drafter on one model."""

    device: str = "cpu"
    score_s: dict[tuple[int, int], float] = field(default_factory=dict)
    """(B, N) -> seconds of the target's forward."""
    overhead_s: dict[tuple[int, int], float] = field(default_factory=dict)
    draft_overhead: dict[int, DraftOverhead] = field(default_factory=dict)
    """B -> what asking the drafter has cost."""
    calibration: float = 1.0
    """How many of the promised tokens came."""
    num_calibrations: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> CostModel:
        with self.lock:
            losses = {
                batch: replace(loss, measured_sizes=set(loss.measured_sizes))
                for batch, loss in self.draft_overhead.items()
            }
            tables = dict(self.score_s), dict(self.overhead_s)
            return CostModel(self.device, *tables, losses, self.calibration, self.num_calibrations)

    def forward_s(self, batch: int, nodes: int) -> float:
        """Seconds of one forward: measured, or guessed from the nearest size that was, a smaller one if there is."""
        with self.lock:  # other threads may learn
            known = {n: seconds for (b, n), seconds in self.score_s.items() if b == batch}
        if not known:
            return 0.0
        sizes = sorted(known)
        if nodes in known:  # and no larger one is cheaper: then that was a dear first use, and its mean is not yet
            return min(known[n] for n in sizes if n >= nodes)
        nearest = max((n for n in sizes if n < nodes), default=sizes[0])
        if sizes[0] < nearest:  # what was measured says better than a guess what a node adds
            each = (known[nearest] - known[sizes[0]]) / (nearest - sizes[0])
            return known[nearest] + (nodes - nearest) * max(0.0, each)
        slope = DEFAULT_NODE_COST.get(self.device, DEFAULT_NODE_COST["other"])
        return known[nearest] * (1 + slope * (nodes - 1)) / (1 + slope * (nearest - 1))

    def round_s(self, batch: int, nodes: int) -> float:
        """Seconds of one round without its draft."""
        return self.forward_s(batch, nodes) + self.overhead_s.get((batch, nodes), self.overhead_s.get((batch, 1), 0.0))

    def update(self, table: dict[Any, float], key: Any, seconds: float) -> None:
        """Take in one more measurement."""
        with self.lock:
            table[key] = ema(table.get(key), seconds, 0.2)

    def calibrate(self, kept: float) -> None:
        """Take in which part of a promise came true."""
        with self.lock:
            self.num_calibrations += 1
            self.calibration += max(1 / (self.num_calibrations + 2), 0.1) * (min(2.0, kept) - self.calibration)
            self.calibration = min(1.5, max(0.05, self.calibration))


class TreeSizeController:
    """The controller of one call. Ask it for a size, show it the draft, tell it how the round went."""

    def __init__(
        self, costs: CostModel, batch: int, *, drafts: bool, max_tree_size: int = 16, fixed_tree_size: int | None = None
    ) -> None:
        """
        Args:
            drafts: False for a drafter that never proposes. most: largest tree to consider, the root counted.
            fixed: size of every tree, chosen by nobody; None lets the costs decide.
        """
        self.costs, self.batch, self.drafts, self.fixed_tree_size = costs, batch, drafts, fixed_tree_size
        self.max_tree_size = fixed_tree_size or max_tree_size
        self._overhead = costs.draft_overhead.setdefault(batch, DraftOverhead()) if drafts else DraftOverhead()
        self._expected_gain = 0.0
        self._num_active = 0  # rows that were drafted for in this round

    @property
    def should_draft(self) -> bool:
        """Whether the drafter should be asked in the coming round."""
        return self.drafts and (self._overhead.backoff == 0 or self.fixed_tree_size is not None)

    def choose_size(self, tree: DraftTree, num_active: int, max_gain: float = math.inf) -> int:
        """Nodes of `tree` that are worth scoring for `live` rows; 1 means plain decoding.

        What the draft has cost is spent either way. More nodes take more seconds, and a second is worth what it brings
        in all rounds: so the best size is that with the most tokens beyond those that its seconds would bring anyway.
        (That maximises tokens per second in the long run; the best rate of each single round would not.)

        Args:
            room: tokens beyond one each that these rows may emit at all.
        """
        self._expected_gain = 0.0
        if self.fixed_tree_size:
            return self.fixed_tree_size
        self._num_active = num_active
        if tree.num_nodes == 1:
            return 1
        costs, gains = self.costs, self._expected_gains(tree, num_active)
        plain = costs.round_s(self.batch, 1)
        rate = MIN_GAIN * num_active * self._rate(plain)
        best, best_value = 1, 0.0
        most = (
            tree.num_nodes if plain else min(tree.num_nodes, DEFAULT_TREE_SIZE)
        )  # nothing was measured yet: begin with a middling one
        for nodes in (size for size in BUCKETS if 1 < size <= most):
            value = min(gains[nodes - 1] * costs.calibration, max_gain) - rate * (
                costs.round_s(self.batch, nodes) - plain
            )
            if value > best_value:
                best, best_value = nodes, value
        self._expected_gain = min(gains[best - 1], max_gain)
        return best

    def skip_draft(self) -> None:
        """A round goes by without asking the drafter."""
        if not self.drafts:
            return
        self._overhead.backoff = max(0, self._overhead.backoff - 1)
        with self.costs.lock:  # doubts fade, so that larger trees are tried again now and then
            self.costs.calibration += CALIBRATION_DECAY * max(0.0, 1 - self.costs.calibration)

    def record(self, num_nodes: int, *, draft_s: float, score_s: float, overhead_s: float, num_accepted: int) -> None:
        """Tell what a round cost, and how many tokens it emitted beyond one per live row."""
        if not self.drafts:
            return
        costs = self.costs
        costs.update(costs.score_s, (self.batch, num_nodes), score_s)
        costs.update(costs.overhead_s, (self.batch, num_nodes), overhead_s)
        self._overhead.rounds_since_plain = 0 if num_nodes == 1 else self._overhead.rounds_since_plain + 1
        if self._overhead.rounds_since_plain > REMEASURE_EVERY:
            self._overhead.backoff = max(self._overhead.backoff, 1)
        if self._expected_gain > 0:
            costs.calibrate(num_accepted / self._expected_gain)
        if self._num_active:
            self._update_overhead(num_nodes, draft_s, draft_s + score_s + overhead_s, num_accepted / self._num_active)
        self._expected_gain, self._num_active = 0.0, 0

    def _rate(self, plain: float) -> float:
        """Tokens per second and live row: of plain decoding, or of rounds with drafts where these are faster."""
        decoding = 1 / plain if plain else 0.0
        return max(decoding, self._overhead.tokens / self._overhead.seconds) if self._overhead.seconds else decoding

    def _update_overhead(self, nodes: int, draft_s: float, round_s: float, gained: float) -> None:
        """After the drafter was asked: if that is a loss on the whole, let it sleep so long that little is lost.

        `gained` counts tokens per live row. Means of the costs are taken, not this round's: single rounds are noisy.
        """
        if nodes not in self._overhead.measured_sizes:
            self._overhead.measured_sizes.add(nodes)
            return
        plain = self.costs.round_s(self.batch, 1)
        lost = draft_s - gained * plain
        if nodes > 1:
            lost += self.costs.round_s(self.batch, nodes) - plain
        self._overhead.add(lost, 1 + gained, round_s)
        if lost > 0 and self._overhead.mean_s > 0 and plain:
            self._overhead.back_off(plain)

    def _expected_gains(self, tree: DraftTree, live: int) -> list[float]:
        """[N] expected tokens beyond one per row if the first n + 1 nodes were scored, summed over rows."""
        if tree.scores is None or tree.scores.device.type != "cpu":
            return [0.3 * live * node for node in range(tree.num_nodes)]  # `trust` corrects it
        scores = torch.where(tree.valid, tree.scores, 0.0)
        scores[:, 0] = 0.0
        return scores.sum(0).cumsum(0).tolist()
