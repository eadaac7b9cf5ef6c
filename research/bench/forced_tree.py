"""Rows in which the tree size controller declined to draft, and what drafting in every round would have cost.

Without `--nodes` the controller drafts only where that pays, so tau of such a row says nothing about the drafter. A
short probe with a fixed tree size does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mmspec.app.modeling.load import clone
from mmspec.metrics.stats import Stats
from research.bench.drafter_specs import patch_model
from research.bench.measure import Contestant, disable_eos, run_once
from research.bench.rows import ResultRow

if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin

PROBE_TREE_SIZE = 16
"""Nodes of the forced tree, the root included."""
PROBE_REQUESTS = 2
MIN_DRAFTED_SHARE = 0.5
"""A row counts as not used below this share of the rounds in which the drafter has something to offer."""


@dataclass(frozen=True)
class ForcedTree:
    """A drafter with trees of one size in every round.

    Attributes:
        tree_size: nodes of each tree.
        tau: tokens per forward of a row.
        speedup_own: decode speed over the loop without drafts, on the same requests.
        drafted_share: share of the rounds that scored at least one draft token.
    """

    tree_size: int
    tau: float
    speedup_own: float
    drafted_share: float


def probe_forced_tree(
    own: Contestant,
    name: str,
    processor: ProcessorMixin,
    requests: Sequence[Mapping[str, Any]],
    new_tokens: int,
    temperature: float,
    seed: int,
    *,
    model: PreTrainedModel,
    stop_at_eos: bool,
) -> ForcedTree:
    """Decode a few requests with a fresh drafter and a fixed tree size, in turn with the loop without drafts.

    Args:
        own: the loop without drafts; its runs stay as they are.
        requests: the first one warms up; a drafter that learns from call to call is built anew, so it knows no answer.
        model: the unpatched target.
    """
    target = clone(model) if stop_at_eos else disable_eos(clone(model))
    forced = Contestant(name, patch_model(target, name, processor, PROBE_TREE_SIZE))
    total, own_s, forced_s = Stats(), 0.0, 0.0
    for index, inputs in enumerate(requests[: PROBE_REQUESTS + 1]):
        base = run_once(own, inputs, new_tokens, temperature, seed + index)
        run = run_once(forced, inputs, new_tokens, temperature, seed + index)
        if index and run.stats is not None:
            total.add(run.stats)
            own_s += base.decode_s
            forced_s += run.decode_s
    speedup = own_s / forced_s if forced_s else 1.0
    return ForcedTree(PROBE_TREE_SIZE, round(total.tau, 3), round(speedup, 4), round(drafted_share(total) or 0.0, 4))


def drafted_share(stats: Stats) -> float | None:
    """Share of the rounds that scored at least one draft token; None if there was no round."""
    return stats.drafted_rounds / stats.rounds if stats.rounds else None


def is_probe_needed(row: Mapping[str, Any]) -> bool:
    """Whether the controller drafted in so few rounds that a forced tree must show if the drafter was used."""
    share = row["drafted_share"]
    return row["drafter"] != "none" and share is not None and share < MIN_DRAFTED_SHARE


def add_forced_tree(row: ResultRow, forced: ForcedTree | None) -> None:
    """Write `forced_tree` and `not_used` into a row; `forced` is None where no probe was needed."""
    row["forced_tree"] = None if forced is None else asdict(forced)
    row["not_used"] = forced is not None and row["drafted_share"] < MIN_DRAFTED_SHARE * forced.drafted_share


def format_not_used(row: Mapping[str, Any]) -> str:
    """Why the speed of a row is that of plain decoding; empty if its drafter was used."""
    if not row.get("not_used"):
        return ""
    forced = row["forced_tree"]
    loss = 1 - forced["speedup_own"]
    estimate = f"estimated {'loss' if loss >= 0 else 'gain'} {abs(loss):.0%}"
    return (
        f"not used: drafting did not pay here ({row['drafted_share']:.0%} of rounds drafted, {estimate}); "
        f"tau {forced['tau']:.2f} with trees of {forced['tree_size']} nodes in every round"
    )
