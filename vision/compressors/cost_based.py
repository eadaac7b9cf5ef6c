"""`elastic` without a trained gate: the number of visual tokens per prompt is chosen from measured costs.

Reading K visual tokens costs a drafter, over one generation,

    drafter_cost(K) = K * (prefill_token_s + rounds * draft_token_s)      rounds = max_new_tokens / tokens_per_round

seconds: each token is read once and lengthens the drafter's context in every round. Fewer tokens lower the accept
length tau, which costs additional rounds:

    lost_rounds(K) = ACCEPT_LENGTH_LOSS[K] * rounds * round_s

The choice is the K with the least sum, out of all tokens, 1/4, 1/16, 1/64 and none. prefill_token_s, draft_token_s,
round_s and tokens_per_round are measured in this process (`mmspec.economy.draft_cost`).

`ACCEPT_LENGTH_LOSS` follows the scenes model: 0% to 4% of tau with a fourth of the visual tokens, 0% to
5% with a sixteenth, 23% to 36% with none. Larger models carry more of the image in the hidden states of text tokens (in
SpecVLM's ablation, arXiv 2509.11815, keeping 1/2 and 1/20 differ by 4% in speed, in favour of 1/20), so the constants
are conservative for them. Without measurements, and where tensor shapes must not depend on timing
(`deterministic=True`), the choice is the largest K up to `DEFAULT_MAX_TOKENS`, or 1/64.

Tokens are selected by `saliency`. An eighth of an image selected so costs 2% of tau in descriptions and 4% in short
answers; `pool` costs 12% and 11%, `relevant` 10% and 11%. The choice affects speed only, never the output, and is a
deterministic function of its inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmspec.economy.draft_cost import DraftCosts
from mmspec.interfaces import NO_LIMIT, CompressionContext, Compressor, VisualTokens
from mmspec.vision.compressors.row_groups import concat_rows, select_rows
from mmspec.vision.compressors.select import Drop, Identity, TopScore, saliency

REDUCTION_FACTORS = (1, 4, 16, 64)
"""Candidate sizes: the number of visual tokens divided by these, rounded up; and 0."""
DEFAULT_MAX_TOKENS = 256
"""Largest number of visual tokens kept as long as no costs are known."""
ACCEPT_LENGTH_LOSS = (0.0, 0.02, 0.06, 0.2, 0.23)
"""Relative loss of tau at each candidate size, the last one for no tokens."""
DEFAULT_NEW_TOKENS = 128
"""Assumed length of a generation without `max_new_tokens`."""
_SALIENT = "salient"


@dataclass(frozen=True)
class Choice:
    """The compressor of one row: its name and its number of tokens."""

    name: str
    tokens: int

    def __str__(self) -> str:
        return f"{self.name}:{self.tokens}" if self.name == _SALIENT else self.name

    def build(self) -> Compressor:
        """The compressor object."""
        if self.name == _SALIENT:
            return TopScore(self.tokens, _SALIENT, saliency, attends=True)
        return Drop() if self.name == "drop" else Identity()


def choose_compressor(
    num_visual_tokens: int, max_new_tokens: int | None, costs: DraftCosts | None = None, exploration: int = 0
) -> Choice:
    """Choose the compressor of a prompt with `num_visual_tokens` visual tokens.

    Args:
        num_visual_tokens: Visual tokens of the prompt.
        max_new_tokens: Limit of the generation, or None.
        costs: Measured costs, or None.
        exploration: Steps to move from the best choice towards fewer tokens (negative: more), to measure other sizes.
    """
    if not num_visual_tokens:
        return Choice("identity", 0)
    sizes = [-(-num_visual_tokens // factor) for factor in REDUCTION_FACTORS] + [0]
    last = len(REDUCTION_FACTORS) - 1
    if costs is None:
        best = next((i for i, size in enumerate(sizes[:-1]) if size <= DEFAULT_MAX_TOKENS), last)
    else:
        best = min(
            range(len(sizes)), key=lambda i: expected_cost(sizes[i], ACCEPT_LENGTH_LOSS[i], max_new_tokens, costs)
        )
    if exploration and sizes[best]:  # a choice without tokens is not given up for a measurement
        best = min(max(best + exploration, 0), last)
    if not best:
        return Choice("identity", num_visual_tokens)
    return Choice(_SALIENT if sizes[best] else "drop", sizes[best])


def expected_cost(num_tokens: int, accept_length_loss: float, max_new_tokens: int | None, costs: DraftCosts) -> float:
    """Seconds per generation: the drafter's cost of `num_tokens` visual tokens and that of the lost accept length."""
    rounds = (DEFAULT_NEW_TOKENS if max_new_tokens is None else max_new_tokens) / costs.tokens_per_round
    return (
        num_tokens * (costs.prefill_token_s + rounds * costs.draft_token_s)
        + accept_length_loss * rounds * costs.round_s
    )


class CostBased:
    """Chooses a compressor for each row with `choose_compressor`. Stateless: costs come with the visual tokens."""

    name, max_tokens, attends = "elastic", NO_LIMIT, True

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        """Each row by its own choice; rows with the same choice are compressed together."""
        choices, sizes = self._choose(visual_tokens.context, visual_tokens.mask.sum(1))
        rows_by_choice: dict[str, list[int]] = {}
        for row, choice in enumerate(choices):
            rows_by_choice.setdefault(str(choice), []).append(row)
        if len(rows_by_choice) == 1:
            compressed = choices[0].build().compress(visual_tokens, query, min(max_tokens, choices[0].tokens))
            return replace(compressed, choices=tuple(map(str, choices)))
        parts = []
        for rows in rows_by_choice.values():
            choice = choices[rows[0]]
            row_query = None if query is None else query[torch.tensor(rows, device=query.device)]
            part = select_rows(visual_tokens, rows, max(sizes[row] for row in rows))
            parts.append(choice.build().compress(part, row_query, min(max_tokens, choice.tokens)))
        compressed = concat_rows(parts, list(rows_by_choice.values()))
        return replace(compressed, choices=tuple(map(str, choices)))

    def _choose(self, context: CompressionContext | None, counts: Tensor) -> tuple[list[Choice], list[int]]:
        """The choice and the number of visual tokens of each row. counts: [B] int64."""
        sizes = counts.tolist()  # synchronises with the device, once per prompt and not per round
        known = context or CompressionContext()
        choices = [choose_compressor(size, known.max_new_tokens, known.costs, known.exploration) for size in sizes]
        return choices, sizes
