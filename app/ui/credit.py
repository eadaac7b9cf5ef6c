"""Where the speed of an answer comes from: total = own loop x drafts. Independent of gradio.

The decode loop of mmspec is faster than that of transformers before anything is drafted. Both factors are measured: the
loop without drafts decodes the start of the same answer. Where nothing was drafted, all of it is the loop's.

Both are ratios of tokens per second from the first token on. What a lane saves of the prompt, where it was computed in
an earlier turn, comes before that: it is no factor, and is credited apart, beside the first token of the baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmspec.app.ui.comparison import AnswerLane
    from mmspec.app.ui.rounds import Round

PLAIN_GENERATE, LOOP = "plain generate", "mmspec without drafts"
BASELINES = (PLAIN_GENERATE, LOOP)
"""What answers may be compared with, the default first."""
NO_DRAFTS = "none"
"""Name of the drafter that proposes nothing."""
SHORT_ROUNDS = 32
"""Rounds below which drafts that did not pay are put down to the length of the answer."""


@dataclass(frozen=True)
class Credit:
    """Factors of the speed-up of a lane.

    Attributes:
        total: tokens per second over those of the baseline; None if it is not measured.
        loop: that of mmspec's loop without drafts; None if it is not measured, and for an answer of transformers.
        drafts: `total` divided by `loop`.
        num_drafted: rounds with at least one draft token.
        num_rounds: forwards of the model after that of the prompt.
        reason: why nothing was drafted; empty where something was.
        num_reused: tokens of the prompt, visual ones included, that an earlier turn had computed.
    """

    total: float | None
    loop: float | None = None
    drafts: float | None = None
    num_drafted: int = 0
    num_rounds: int = 0
    reason: str = ""
    num_reused: int = 0

    @property
    def sentence(self) -> str:
        """The split in words; empty where it is not known."""
        rounds = f"{self.num_drafted} of {self.num_rounds} rounds"
        if self.reason:
            share = "all of it is mmspec's own loop" if self.loop is not None else "no part of it is mmspec's"
            return f"Nothing was drafted ({rounds}: {self.reason}); {share}."
        if self.loop is None or self.drafts is None:
            return ""
        return f"{self.loop:.2f}x own loop \u00d7 {self.drafts:.2f}x drafts ({rounds} drafted)."


def split_speedup(lane: AnswerLane, total: float | None, loop: float | None) -> Credit:
    """The credit of a lane of mmspec.

    Args:
        lane: whose call has ended.
        total: its speed-up.
        loop: the speed-up of the loop without drafts; None if it was not measured.
    """
    stats = lane.stats
    reason = "" if stats.drafted_rounds else explain_no_drafts(lane, lane.rounds)
    if stats.fallback_calls:
        loop = None
    elif reason:
        loop = total
    drafts = total / loop if total and loop else None
    return Credit(total, loop, drafts, stats.drafted_rounds, stats.rounds, reason, stats.reused_positions)


def explain_no_drafts(lane: AnswerLane, rounds: Sequence[Round]) -> str:
    """Why no round of a call had a draft, in words for a visitor."""
    if lane.stats.fallback_calls:
        return f"transformers answered alone, {lane.stats.fallback_reason}"
    if lane.resolved_drafter == NO_DRAFTS:
        return "this lane has no drafter"
    if not lane.stats.rounds:
        return "one forward gave the whole answer"
    if any((item.num_proposed or 0) > 1 for item in rounds):
        return "no proposal was expected to pay its cost"
    if any(item.num_proposed is not None for item in rounds):
        return "the drafter had nothing to propose"
    if lane.stats.rounds < SHORT_ROUNDS:
        return "too short for a draft to pay"
    return "recent drafts did not pay"
