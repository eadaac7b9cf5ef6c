"""How much a drafter is shown by what looking costs here: for each prompt one of a few ways, without weights.

Showing a drafter K visual tokens costs it, over one answer,

    look(K) = K * (read_s + rounds * draft_s)            rounds = answer / gained

seconds: each token is read once, and lengthens the drafting of every round. Showing it fewer costs rounds:

    miss(K) = MISSED[K] * rounds * round_s

and the way is the one with the least look(K) + miss(K), of all tokens, a fourth, a sixteenth, a sixty-fourth, none.
read_s, draft_s, round_s and gained are measured in this process (`mmspec.control.draft_cost`); answer is how many new tokens there
may be. What is missed is about what the scenes model misses (docs/results): with a fourth of its visual tokens 0% to
4% of tau, with a sixteenth 0% to 5%, with none 23% to 36%. Larger models say more of a picture in the states of their
words (in SpecVLM's ablation, arXiv 2509.11815, keeping half and keeping a twentieth differ by 4% in speed, and the
twentieth is ahead), so it is rather too careful. Before anything is measured, and where shapes must not hang on timing
(`deterministic=True`), it is the one with the most tokens up to FEW, or the sixty-fourth.

Which tokens: those that the vision tower attends to (`salient`). An eighth of a picture chosen so costs 2% of tau in
descriptions and 4% in short answers, where `pool` costs 12% and 11%, `relevant` 10% and 11%. Only speed hangs on it,
never the text. The same numbers always give the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmspec.control.draft_cost import DraftCosts
from mmspec.interfaces import NO_LIMIT, CompressionContext, Compressor, VisualTokens
from mmspec.vision.compressors.row_groups import some, together
from mmspec.vision.compressors.select import Drop, Identity, Prune, distinctness

SHARES = (1, 4, 16, 64)
"""A drafter is shown all tokens, or one of so many."""
FEW = 256
"""Visual tokens that are shown without a thought before costs are known."""
MISSED = (0.0, 0.02, 0.06, 0.2, 0.23)
"""What a drafter that is shown so much, or at last nothing, loses of its tau."""
SALIENT = "salient"
LONG = 128
"""Tokens of an answer of which nobody said how long it may be."""


@dataclass(frozen=True)
class Way:
    """A compressor by name, and how many tokens it is to keep."""

    name: str
    tokens: int

    def __str__(self) -> str:
        return f"{self.name}:{self.tokens}" if self.name == SALIENT else self.name

    def made(self) -> Compressor:
        """The compressor itself."""
        if self.name == SALIENT:
            return Prune(self.tokens, SALIENT, distinctness, attends=True)
        return Drop() if self.name == "drop" else Identity()


def choose(visual: int, answer: int | None, rates: DraftCosts | None = None, lean: int = 0) -> Way:
    """What to show of a prompt with so many visual tokens.

    Args:
        answer: new tokens at most, or None. rates: what is measured. lean: ways to go on towards fewer tokens.
    """
    if not visual:
        return Way("identity", 0)
    sizes = [-(-visual // share) for share in SHARES] + [0]
    if rates is None:
        best = next((place for place, size in enumerate(sizes[:-1]) if size <= FEW), len(SHARES) - 1)
    else:
        best = min(range(len(sizes)), key=lambda place: cost(sizes[place], MISSED[place], answer, rates))
    if lean and sizes[best]:  # what shows nothing is not left for the sake of a measurement
        best = min(max(best + lean, 0), len(SHARES) - 1)
    if not best:
        return Way("identity", visual)
    return Way(SALIENT if sizes[best] else "drop", sizes[best])


def cost(tokens: int, missed: float, answer: int | None, rates: DraftCosts) -> float:
    """Seconds over one answer that so many visual tokens cost a drafter, and that it misses for want of the others."""
    rounds = (LONG if answer is None else answer) / rates.tokens_per_round
    return tokens * (rates.prefill_token_s + rounds * rates.draft_token_s) + missed * rounds * rates.round_s


class Measured:
    """Chooses for each row by `choose`. Keeps nothing between calls: what was measured comes with the tokens."""

    max_tokens, attends = NO_LIMIT, True

    def __init__(self, name: str = "measured") -> None:
        self.name = name  # "elastic" where it stands in for a gate that was not trained

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        """Each row its own way."""
        rows: dict[str, list[int]] = {}
        ways, sizes = self._ways(visual_tokens.context, visual_tokens.mask.sum(1))
        for row, way in enumerate(ways):
            rows.setdefault(str(way), []).append(row)
        if len(rows) == 1:
            few = ways[0].made().compress(visual_tokens, query, min(max_tokens, ways[0].tokens))
            return replace(few, choices=tuple(map(str, ways)))
        parts = []
        for mine in rows.values():
            way = ways[mine[0]]
            asked = None if query is None else query[torch.tensor(mine, device=query.device)]
            part = some(visual_tokens, mine, max(sizes[row] for row in mine))
            parts.append(way.made().compress(part, asked, min(max_tokens, way.tokens)))
        few = together(parts, list(rows.values()))
        return replace(few, choices=tuple(map(str, ways)))

    def _ways(self, outlook: CompressionContext | None, counts: Tensor) -> tuple[list[Way], list[int]]:
        """Of each row its way and its number of tokens. counts: [B]."""
        sizes, known = counts.tolist(), outlook or CompressionContext()  # once per prompt, not per round
        return [choose(size, known.max_new_tokens, known.costs, known.exploration) for size in sizes], sizes


__all__ = ["FEW", "LONG", "MISSED", "SHARES", "Measured", "Way", "choose", "cost"]
