"""`RoundCostModel`: the measured seconds of rounds and drafts, and whether drafting pays, of one drafter on one model.

Measured in real rounds of the running process, shared by its calls; `TreeSizeController` decides by them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mmspec.control.ema import ema
from mmspec.forks import new_lock

DEFAULT_NODE_COST = {"cpu": 0.11, "other": 0.01}
"""Assumed cost of one more node by device, as a fraction of a one-node forward, until it is measured."""
MAX_NET_COST = 0.01
"""Largest fraction of the decoding time that unprofitable drafting may cost."""
MAX_BACKOFF = 512
"""Largest number of rounds of a call without a call of the drafter."""
TRIAL_SHARE = 0.02
"""Fraction of the time that drafts may lose which are tried again in each call, where those of earlier calls lost."""
MAX_DEBT, MAX_CREDIT = 3.0, 4.0
"""Rounds of plain decoding that trials may lose before they are earned, and that are saved up for them."""
STALL_ROUNDS = 2.0
"""A draft is not taken to last longer than so many rounds, or twice the mean loss: the machine may have stalled."""
MIN_CALIBRATION, MAX_CALIBRATION = 0.05, 1.5
"""Bounds of `RoundCostModel.calibration`."""
MIN_RESTORED_CALIBRATION = 0.5
"""Smallest calibration that a process takes over from another; below, drafts would hardly be tried."""
MAX_RESTORED_CALIBRATIONS = 4
"""Rounds that a calibration of another process counts for."""
COST_WEIGHT = 0.2
"""Weight of a new measurement in the running means of `RoundCostModel`."""


def cost_rows(num_rows: int, batch: int) -> int:
    """The number of rows under which costs of rounds with `num_rows` rows that have not ended are kept.

    It is the next power of two, at most the whole `batch`: there are few such numbers, and each has measurements soon.
    """
    return min(batch, 1 << max(0, num_rows - 1).bit_length())


def assumed_cost(num_nodes: int, device: str = "cpu") -> float:
    """Cost of a forward over `num_nodes` nodes that was not measured, relative to one node."""
    return 1 + DEFAULT_NODE_COST.get(device, DEFAULT_NODE_COST["other"]) * (num_nodes - 1)


@dataclass
class DraftNetCost:
    """Whether drafting saves time at one batch size, over all calls.

    The net cost of a draft is the time that it adds to a round, minus the time in which plain decoding would emit the
    accepted tokens.

    Attributes:
        mean_s: mean net cost of a draft in seconds; negative if drafting saves time.
        tokens_per_round: mean tokens that an active row emits in a round with a draft.
        round_s: mean seconds of a round with a draft.
        num_drafts: number of drafts counted.
        credit_s: seconds that trials may lose: earned in all rounds, spent by drafts that lose.
        rounds_since_plain: rounds since the last one-node round, over all calls.
        measured_sizes: tree sizes that were scored before. The first use of a size is slow (kernels are selected,
            memory is allocated) and not counted.
    """

    mean_s: float = 0.0
    tokens_per_round: float = 0.0
    round_s: float = 0.0
    num_drafts: int = 0
    credit_s: float = 0.0
    rounds_since_plain: int = 0
    measured_sizes: set[int] = field(default_factory=set)

    def add(self, net_cost_s: float, tokens: float, round_s: float) -> None:
        """Count one draft: arithmetic means of the first ten, then exponential ones with weight 0.1."""
        self.num_drafts += 1
        weight = max(1 / self.num_drafts, 0.1)
        self.mean_s += weight * (net_cost_s - self.mean_s)
        self.tokens_per_round += weight * (tokens - self.tokens_per_round)
        self.round_s += weight * (round_s - self.round_s)

    def earn(self, seconds: float, plain_s: float) -> None:
        """Count what a round earned for trials, or lost by one (negative)."""
        self.credit_s = min(MAX_CREDIT * plain_s, self.credit_s + seconds)

    def likely_s(self, draft_s: float, plain_s: float) -> float:
        """The seconds of a draft without what a stall of the machine may have added."""
        return min(draft_s, max(STALL_ROUNDS * plain_s, 2 * self.mean_s)) if plain_s else draft_s


@dataclass
class CallNetCost:
    """`DraftNetCost` as one call sees it: what earlier calls have found weighs as one draft, since texts differ.

    Attributes:
        mean_s: mean net cost of a draft.
        num_known: drafts that it is based on, the one of earlier calls included.
        num_drafts: drafts of the call that were counted.
        backoff: rounds until the drafter is called again.
    """

    mean_s: float = 0.0
    num_known: int = 0
    num_drafts: int = 0
    backoff: int = 0

    @classmethod
    def after(cls, earlier: DraftNetCost) -> CallNetCost:
        """At the start of a call."""
        return cls(earlier.mean_s, min(1, earlier.num_drafts))

    def add(self, net_cost_s: float) -> None:
        """Count one draft."""
        self.num_known, self.num_drafts = self.num_known + 1, self.num_drafts + 1
        self.mean_s += max(1 / self.num_known, 0.1) * (net_cost_s - self.mean_s)

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
        first_uses: {(whether it is of `score_s`, key)} of what was measured once. The first use of a size may be slow
            (kernels are selected, memory is allocated), so nothing that is worse than assumed follows from it.
    """

    device: str = "cpu"
    score_s: dict[tuple[int, int], float] = field(default_factory=dict)
    overhead_s: dict[tuple[int, int], float] = field(default_factory=dict)
    draft_net_cost: dict[int, DraftNetCost] = field(default_factory=dict)
    calibration: float = 1.0
    num_calibrations: int = 0
    first_uses: set[tuple[bool, tuple[int, int]]] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=new_lock, repr=False)

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
                set(self.first_uses),
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
                (batch, size): min(seconds, score_s[batch, 1] * assumed_cost(size, self.device))
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
            again = {size: measured[size] for size in measured if (True, (batch, size)) not in self.first_uses}
        if not measured:
            return 0.0
        found = self._forward_s(measured, num_nodes)
        return min(found, self._forward_s(again, num_nodes)) if 1 in again else found

    def _forward_s(self, measured: Mapping[int, float], num_nodes: int) -> float:
        """`forward_s` by the seconds of some sizes."""
        sizes = sorted(measured)
        if num_nodes in measured:  # a cheaper larger size shows that this size's mean still contains its slow first use
            return min(measured[size] for size in sizes if size >= num_nodes)
        nearest = max((size for size in sizes if size < num_nodes), default=sizes[0])
        if sizes[0] < nearest:  # the measured cost of a node is better than the assumed one
            node_s = (measured[nearest] - measured[sizes[0]]) / (nearest - sizes[0])
            return measured[nearest] + (num_nodes - nearest) * max(0.0, node_s)
        return measured[nearest] * assumed_cost(num_nodes, self.device) / assumed_cost(nearest, self.device)

    def round_s(self, batch: int, num_nodes: int) -> float:
        """Seconds of one round without its draft."""
        plain_s = self.overhead_s.get((batch, 1), 0.0)
        overhead_s = self.overhead_s.get((batch, num_nodes), plain_s)
        if (False, (batch, num_nodes)) in self.first_uses and (False, (batch, 1)) not in self.first_uses and plain_s:
            overhead_s = min(overhead_s, plain_s)
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
                net_cost.mean_s, net_cost.num_drafts, net_cost.credit_s = 0.0, 0, 0.0
            if failed and self.calibration < 1:
                self.calibration, self.num_calibrations = 1.0, 0

    def update(self, table: dict[Any, float], key: Any, seconds: float) -> None:
        """Add a measurement to `score_s` or `overhead_s`."""
        use = table is self.score_s, key
        with self.lock:
            if key not in table:
                self.first_uses.add(use)
            elif use in self.first_uses:
                self.first_uses.remove(use)
                table[key] = min(table[key], seconds)
                return
            table[key] = ema(table.get(key), seconds, COST_WEIGHT, restart_below=0.5)

    def relax_calibration(self, weight: float) -> None:
        """Let a calibration below 1 recover by so much."""
        with self.lock:
            self.calibration += weight * max(0.0, 1 - self.calibration)

    def calibrate(self, ratio: float) -> None:
        """Add the ratio of accepted to predicted tokens of one round."""
        with self.lock:
            self.num_calibrations += 1
            weight = max(1 / (self.num_calibrations + 2), 0.1)
            calibration = self.calibration + weight * (min(2.0, ratio) - self.calibration)
            self.calibration = min(MAX_CALIBRATION, max(MIN_CALIBRATION, calibration))

    def expect_more(self) -> None:
        """Let a low calibration recover, which is of texts whose drafts did not pay, for a text that may differ."""
        with self.lock:
            self.calibration = max(MIN_RESTORED_CALIBRATION, self.calibration)
            self.num_calibrations = min(MAX_RESTORED_CALIBRATIONS, self.num_calibrations)
