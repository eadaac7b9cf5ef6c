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

from mmspec.control.draft_cost import follow
from mmspec.engine.tree import BUCKETS, DraftTree

SLOPE = {"cpu": 0.11, "other": 0.01}
"""Guess, until measured, of what one more node adds to a forward, in forwards of one node."""
WORTH = 1.05
"""A larger tree must promise this many times what its seconds could bring otherwise."""
IDLE_SHARE = 0.01
"""Share of the time that may be lost by asking a drafter that does not pay."""
LONGEST_NAP = 512
"""Rounds after which a drafter that does not pay is asked again, at the latest."""
FADE = 0.0005
"""Share of the doubt in a drafter that goes away in each round in which it is not asked."""
FRESH = 128
"""Rounds after which plain decoding is measured again, that nobody thinks it dearer than it is."""
FIXED = 8
"""Nodes of every tree when shapes must not depend on timing and nobody says how many, and of a process's first."""


@dataclass
class Loss:
    """What asking the drafter has cost at one batch size: mean seconds lost per time asked; below 0 it paid.

    `tokens`, `seconds`: means of what a live row emits, and of what a round takes, when the drafter is asked.
    """

    mean: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    asked: int = 0
    nap: int = 0
    """Rounds to go until it is asked again."""
    since: int = 0
    """Rounds since plain decoding was measured, of all calls."""
    warm: set[int] = field(default_factory=set)
    """Sizes of trees that were scored before. First uses are dear: kernels are tried, memory is asked for."""

    def add(self, lost: float, tokens: float, seconds: float) -> None:
        """Count one more time: plain means at first, later such as forget."""
        self.asked += 1
        share = max(1 / self.asked, 0.1)
        self.mean += share * (lost - self.mean)
        self.tokens += share * (tokens - self.tokens)
        self.seconds += share * (seconds - self.seconds)

    def sleep(self, plain_s: float) -> None:
        """So long that little is lost on the whole; at first, on little evidence, not for long."""
        self.nap = min(LONGEST_NAP, 2**self.asked, int(self.mean / (IDLE_SHARE * plain_s)))


@dataclass
class Costs:
    """Running means of measured seconds, shared by all calls with one drafter on one model."""

    device: str = "cpu"
    score: dict[tuple[int, int], float] = field(default_factory=dict)
    """(B, N) -> seconds of the target's forward."""
    rest: dict[tuple[int, int], float] = field(default_factory=dict)
    losses: dict[int, Loss] = field(default_factory=dict)
    """B -> what asking the drafter has cost."""
    trust: float = 1.0
    """How many of the promised tokens came."""
    trials: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Costs:
        with self.lock:
            losses = {batch: replace(loss, warm=set(loss.warm)) for batch, loss in self.losses.items()}
            tables = dict(self.score), dict(self.rest)
            return Costs(self.device, *tables, losses, self.trust, self.trials)

    def of_score(self, batch: int, nodes: int) -> float:
        """Seconds of one forward: measured, or guessed from the nearest size that was, a smaller one if there is."""
        with self.lock:  # other threads may learn
            known = {n: seconds for (b, n), seconds in self.score.items() if b == batch}
        if not known:
            return 0.0
        sizes = sorted(known)
        if nodes in known:  # and no larger one is cheaper: then that was a dear first use, and its mean is not yet
            return min(known[n] for n in sizes if n >= nodes)
        nearest = max((n for n in sizes if n < nodes), default=sizes[0])
        if sizes[0] < nearest:  # what was measured says better than a guess what a node adds
            each = (known[nearest] - known[sizes[0]]) / (nearest - sizes[0])
            return known[nearest] + (nodes - nearest) * max(0.0, each)
        slope = SLOPE.get(self.device, SLOPE["other"])
        return known[nearest] * (1 + slope * (nodes - 1)) / (1 + slope * (nearest - 1))

    def of_round(self, batch: int, nodes: int) -> float:
        """Seconds of one round without its draft."""
        return self.of_score(batch, nodes) + self.rest.get((batch, nodes), self.rest.get((batch, 1), 0.0))

    def learn(self, table: dict[Any, float], key: Any, seconds: float) -> None:
        """Take in one more measurement."""
        with self.lock:
            table[key] = follow(table.get(key), seconds, 0.2)

    def believe(self, kept: float) -> None:
        """Take in which part of a promise came true."""
        with self.lock:
            self.trials += 1
            self.trust += max(1 / (self.trials + 2), 0.1) * (min(2.0, kept) - self.trust)
            self.trust = min(1.5, max(0.05, self.trust))


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
        self._loss = costs.losses.setdefault(batch, Loss()) if drafts else Loss()
        self._promised = 0.0
        self._live = 0  # rows that were drafted for in this round

    @property
    def awake(self) -> bool:
        """Whether the drafter should be asked in the coming round."""
        return self.drafts and (self._loss.nap == 0 or self.fixed is not None)

    def choose(self, tree: DraftTree, live: int, room: float = math.inf) -> int:
        """Nodes of `tree` that are worth scoring for `live` rows; 1 means plain decoding.

        What the draft has cost is spent either way. More nodes take more seconds, and a second is worth what it brings
        in all rounds: so the best size is that with the most tokens beyond those that its seconds would bring anyway.
        (That maximises tokens per second in the long run; the best rate of each single round would not.)

        Args:
            room: tokens beyond one each that these rows may emit at all.
        """
        self._promised = 0.0
        if self.fixed:
            return self.fixed
        self._live = live
        if tree.nodes == 1:
            return 1
        costs, gains = self.costs, self._gains(tree, live)
        plain = costs.of_round(self.batch, 1)
        rate = WORTH * live * self._rate(plain)
        best, best_value = 1, 0.0
        most = tree.nodes if plain else min(tree.nodes, FIXED)  # nothing was measured yet: begin with a middling one
        for nodes in (size for size in BUCKETS if 1 < size <= most):
            value = min(gains[nodes - 1] * costs.trust, room) - rate * (costs.of_round(self.batch, nodes) - plain)
            if value > best_value:
                best, best_value = nodes, value
        self._promised = min(gains[best - 1], room)
        return best

    def skip(self) -> None:
        """A round goes by without asking the drafter."""
        if not self.drafts:
            return
        self._loss.nap = max(0, self._loss.nap - 1)
        with self.costs.lock:  # doubts fade, so that larger trees are tried again now and then
            self.costs.trust += FADE * max(0.0, 1 - self.costs.trust)

    def record(self, nodes: int, *, draft_s: float, score_s: float, rest_s: float, gained: int) -> None:
        """Tell what a round cost, and how many tokens it emitted beyond one per live row."""
        if not self.drafts:
            return
        costs = self.costs
        costs.learn(costs.score, (self.batch, nodes), score_s)
        costs.learn(costs.rest, (self.batch, nodes), rest_s)
        self._loss.since = 0 if nodes == 1 else self._loss.since + 1
        if self._loss.since > FRESH:
            self._loss.nap = max(self._loss.nap, 1)
        if self._promised > 0:
            costs.believe(gained / self._promised)
        if self._live:
            self._weigh(nodes, draft_s, draft_s + score_s + rest_s, gained / self._live)
        self._promised, self._live = 0.0, 0

    def _rate(self, plain: float) -> float:
        """Tokens per second and live row: of plain decoding, or of rounds with drafts where these are faster."""
        decoding = 1 / plain if plain else 0.0
        return max(decoding, self._loss.tokens / self._loss.seconds) if self._loss.seconds else decoding

    def _weigh(self, nodes: int, draft_s: float, round_s: float, gained: float) -> None:
        """After the drafter was asked: if that is a loss on the whole, let it sleep so long that little is lost.

        `gained` counts tokens per live row. Means of the costs are taken, not this round's: single rounds are noisy.
        """
        if nodes not in self._loss.warm:
            self._loss.warm.add(nodes)
            return
        plain = self.costs.of_round(self.batch, 1)
        lost = draft_s - gained * plain
        if nodes > 1:
            lost += self.costs.of_round(self.batch, nodes) - plain
        self._loss.add(lost, 1 + gained, round_s)
        if lost > 0 and self._loss.mean > 0 and plain:
            self._loss.sleep(plain)

    def _gains(self, tree: DraftTree, live: int) -> list[float]:
        """[N] expected tokens beyond one per row if the first n + 1 nodes were scored, summed over rows."""
        if tree.scores is None or tree.scores.device.type != "cpu":
            return [0.3 * live * node for node in range(tree.nodes)]  # `trust` corrects it
        scores = torch.where(tree.valid, tree.scores, 0.0)
        scores[:, 0] = 0.0
        return scores.sum(0).cumsum(0).tolist()
