"""Compressors that are baselines: `random:N`, and `diverse:N` (DivPrune, arXiv 2503.02175); by name once imported."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.engine.gather import gather_rows
from mmspec.interfaces import VisualTokens
from mmspec.vision.compressors.select import gather_tokens, top_score_indices
from mmspec.vision.registry import UNTRAINED

CHUNK_SIZE = 256
"""Tokens whose distances to all others are computed at a time; bounds memory to linear in the number of tokens."""


@dataclass(frozen=True)
class Random:
    """Keeps random tokens, the same in every run (SpecVLM's pruning baseline, arXiv 2509.11815)."""

    max_tokens: int
    name: str = "random"
    seed: int = 0

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        """Up to `max_tokens` of each row; the choice depends on the row's number of tokens, not on other rows."""
        rng = torch.Generator().manual_seed(self.seed)
        scores = torch.rand(visual_tokens.mask.shape[1], generator=rng).to(visual_tokens.mask.device)
        index, mask = top_score_indices(scores.expand(visual_tokens.mask.shape), visual_tokens.mask, max_tokens)
        return gather_tokens(visual_tokens, index, mask)


@dataclass(frozen=True)
class Diverse:
    """Keeps tokens that differ from each other (DivPrune): greedy max-min selection by cosine distance.

    The first token is the one with the largest distance to its nearest neighbour, each further one has the largest
    distance to the nearest token selected so far.
    """

    max_tokens: int
    name: str = "diverse"

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        """Up to `max_tokens` of each row, by cosine distance of `inputs_embeds`."""
        batch, count = visual_tokens.mask.shape
        num_kept = min(max_tokens, count)
        if not num_kept:
            empty = visual_tokens.mask.new_zeros(batch, 0, dtype=torch.long)
            return gather_tokens(visual_tokens, empty, visual_tokens.mask[:, :0])
        unit = functional.normalize(visual_tokens.inputs_embeds.float(), dim=-1)
        # Before the first selection: the distance to the nearest of all tokens; after it, of the selected ones.
        nearest = _nearest_distance(unit, visual_tokens.mask).masked_fill(~visual_tokens.mask, float("-inf"))
        selected: list[Tensor] = []
        for _ in range(num_kept):
            best = nearest.argmax(1, keepdim=True)
            distance = 1 - (unit @ gather_rows(unit, best).mT)[..., 0]
            nearest = (
                nearest.minimum(distance) if selected else distance.masked_fill(~visual_tokens.mask, float("-inf"))
            )
            nearest.scatter_(1, best, float("-inf"))
            selected.append(best)
        mask = torch.arange(num_kept, device=unit.device) < visual_tokens.mask.sum(1, keepdim=True)
        # Selections beyond a row's number of tokens are no tokens: sort them to the end, where the mask is False.
        index = torch.cat(selected, 1).masked_fill(~mask, count).sort(1).values
        return gather_tokens(visual_tokens, index.clamp(max=count - 1), mask)


def _nearest_distance(unit: Tensor, mask: Tensor) -> Tensor:
    """[B, M] cosine distance of each unit vector [B, M, D] to the nearest other one of its row; inf if none."""
    parts = []
    for start in range(0, unit.shape[1], CHUNK_SIZE):
        distance = 1 - unit[:, start : start + CHUNK_SIZE] @ unit.mT
        distance.masked_fill_(~mask[:, None], float("inf")).diagonal(start, 1, 2).fill_(float("inf"))
        parts.append(distance.amin(2))
    return torch.cat(parts, 1)


UNTRAINED.update({"random": Random, "diverse": Diverse})
