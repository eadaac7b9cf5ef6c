"""How many nodes the next round may cost, so that speculation is never slower than plain decoding.

Learns from the real rounds of the running process what a forward over (B, N) nodes costs and what a draft costs;
weighs that against what the drafter says its nodes are worth, corrected by how much of that came true. No timing pass
is ever run for it, and nothing here can change a token. Knows nothing of models or drafters.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from mmspec.tree import BUCKETS, DraftTree

SLOPE = {"cpu": 0.11, "other": 0.01}
"""Guess, until measured, of what one more node adds to a forward, in forwards of one node."""
WORTH = 1.05
"""A tree must promise this many times the tokens per second of plain decoding."""
IDLE_SHARE = 0.01
"""Share of the time that may go into drafts while drafting does not pay."""
LONGEST_NAP = 64
"""Rounds after which a drafter that does not pay is asked again, at the latest."""
FIXED = 8
"""Nodes of every tree when shapes must not depend on timing and nobody says how many."""


@dataclass
class Costs:
    """Running means of measured seconds, shared by all calls on one model."""

    device: str = "cpu"
    score: dict[tuple[int, int], float] = field(default_factory=dict)
    draft: dict[int, float] = field(default_factory=dict)
    rest: dict[int, float] = field(default_factory=dict)
    trust: float = 1.0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Costs:
        return Costs(self.device, dict(self.score), dict(self.draft), dict(self.rest), self.trust)

    def of_score(self, batch: int, nodes: int) -> float:
        """Seconds of one forward: measured, or guessed from the nearest smaller size that was."""
        known = self.score.get((batch, nodes))
        if known is not None:
            return known
        below = [n for b, n in self.score if b == batch and n < nodes]
        nearest = max(below, default=1)
        slope = SLOPE.get(self.device, SLOPE["other"])
        scale = (1 + slope * (nodes - 1)) / (1 + slope * (nearest - 1))
        return self.score.get((batch, nearest), 0.0) * scale

    def learn(self, table: dict[Any, float], key: Any, seconds: float) -> None:
        """Mean that follows slow changes and shrugs off single outliers (machines are shared)."""
        with self.lock:
            old = table.get(key)
            table[key] = seconds if old is None else old + 0.2 * (min(seconds, 2 * old) - old)


class Budget:
    """The controller of one call. Ask it for a size, show it the draft, tell it how the round went."""

    def __init__(self, costs: Costs, batch: int, *, drafts: bool, most: int = 16, fixed: int | None = None) -> None:
        """
        Args:
            drafts: False for a drafter that never proposes. most: largest tree to consider, the root counted.
            fixed: size of every tree, chosen by nobody; None lets the costs decide.
        """
        self.costs, self.batch, self.drafts, self.fixed = costs, batch, drafts, fixed
        self.most = fixed or most
        self._nap = 0
        self._promised = 0.0

    @property
    def awake(self) -> bool:
        """Whether the drafter should be asked in the coming round."""
        return self.drafts and self._nap == 0

    def choose(self, tree: DraftTree, live: int) -> int:
        """Nodes of `tree` that are worth scoring for `live` rows; 1 means plain decoding."""
        self._promised = 0.0
        if self.fixed:
            return self.fixed
        if tree.nodes == 1:
            return self._rest()
        gains = self._gains(tree)
        plain = live / (self.costs.of_score(self.batch, 1) + self.costs.rest.get(1, 0.0) or 1e-9)
        best, best_rate = 1, plain * WORTH
        for nodes in (size for size in BUCKETS if 1 < size <= tree.nodes):
            gain = gains[nodes - 1] * self.costs.trust
            seconds = self.costs.of_score(self.batch, nodes) + self.costs.rest.get(nodes, self.costs.rest.get(1, 0.0))
            seconds += self.costs.draft.get(nodes, 0.0)
            if (rate := (live + gain) / (seconds or 1e-9)) > best_rate:
                best, best_rate = nodes, rate
        if best == 1:
            return self._rest()
        self._promised = gains[best - 1]
        return best

    def skip(self) -> None:
        """A round went by without asking the drafter."""
        if not self.drafts:
            return
        self._nap = max(0, self._nap - 1)
        self.costs.trust += 0.002 * (1 - self.costs.trust)  # doubts fade, so that it is tried again now and then

    def record(self, nodes: int, *, draft_s: float, score_s: float, rest_s: float, gained: int) -> None:
        """Tell what a round cost, and how many tokens it emitted beyond one per live row."""
        if not self.drafts:
            return
        costs = self.costs
        costs.learn(costs.score, (self.batch, nodes), score_s)
        costs.learn(costs.rest, nodes, rest_s)
        if draft_s:
            costs.learn(costs.draft, nodes, draft_s)
        if self._promised > 0:
            kept = min(2.0, gained / self._promised)
            costs.trust += 0.05 * (kept - costs.trust)
            costs.trust = min(1.5, max(0.05, costs.trust))

    def _rest(self) -> int:
        """Nothing to gain now: let the drafter sleep so long that asking stays within its share of the time."""
        step = self.costs.of_score(self.batch, 1)
        spent = self.costs.draft.get(1, 0.0)
        self._nap = min(LONGEST_NAP, int(spent / (IDLE_SHARE * step))) if step else 0
        return 1

    def _gains(self, tree: DraftTree) -> list[float]:
        """[N] expected tokens beyond one per row if the first n + 1 nodes were scored, summed over rows."""
        if tree.scores is None or tree.scores.device.type != "cpu":
            return [0.3 * self.batch * node for node in range(tree.nodes)]  # `trust` corrects it
        scores = torch.where(tree.valid, tree.scores, 0.0)
        scores[:, 0] = 0.0
        return scores.sum(0).cumsum(0).tolist()
