"""Compressors without weights that keep some of the tokens as they are: all, none, evenly, by chance, by a score.

What is kept keeps its position. Scores are relevance to the question, distinctness from the rest of the picture, or
spread (the kept ones as unlike each other as can be: DivPrune, arXiv 2503.02175).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.engine.gather import gather_rows
from mmspec.interfaces import NO_LIMIT, VisualTokens

STRETCH = 256
"""Tokens that are compared with all others at a time, so that memory does not grow with the square of their number."""


def take(visual: VisualTokens, index: Tensor, mask: Tensor) -> VisualTokens:
    """Some of the tokens: index, mask [B, K]. Their grids are grids no more."""
    positions = visual.position_ids
    spots = index if positions.dim() == 2 else index.expand(positions.shape[0], -1, -1)
    return VisualTokens(
        inputs_embeds=gather_rows(visual.inputs_embeds, index),
        hidden_states=gather_rows(visual.hidden_states, index),
        mask=mask,
        position_ids=positions.gather(-1, spots),
        saliency=None if visual.saliency is None else visual.saliency.gather(1, index),
        source_indices=index,
    )


def highest(scores: Tensor, mask: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """(index, mask) [B, K] of the `budget` tokens with the highest scores [B, M], in their own order."""
    count = min(budget, scores.shape[1])
    chosen = scores.masked_fill(~mask, float("-inf")).topk(count, dim=1).indices
    index = chosen.sort(dim=1).values
    return index, mask.gather(1, index)


class Identity:
    """Shows everything."""

    name, max_tokens = "identity", NO_LIMIT

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        """The tokens themselves."""
        shape = visual_tokens.mask.shape
        return replace(
            visual_tokens, source_indices=torch.arange(shape[1], device=visual_tokens.mask.device).expand(shape)
        )


class Drop:
    """Shows nothing: the drafter sees text alone."""

    name, max_tokens = "drop", 0

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        """No token."""
        none = torch.zeros(len(visual_tokens.mask), 0, dtype=torch.long, device=visual_tokens.mask.device)
        return take(visual_tokens, none, none.bool())


@dataclass(frozen=True)
class Stride:
    """Tokens at even distances of each row. Frames of a clip count as one long row."""

    max_tokens: int
    name: str = "stride"

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        """From the middle of each of `budget` equal stretches."""
        counts = visual_tokens.mask.sum(1, keepdim=True)
        kept = counts.clamp(max=max_tokens)
        step = torch.arange(min(max_tokens, visual_tokens.mask.shape[1]), device=counts.device)
        index = (2 * step + 1) * counts // (2 * kept).clamp(min=1)
        # A row begins with its tokens (`VisualTokens.mask`), so the n-th token stands at n.
        return take(visual_tokens, index.clamp(max=max(0, visual_tokens.mask.shape[1] - 1)), step < kept)


@dataclass(frozen=True)
class Chance:
    """Tokens drawn by chance, the same in every run (SpecVLM's pruning, arXiv 2509.11815)."""

    max_tokens: int
    name: str = "random"
    seed: int = 0

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        """`budget` of each row's tokens; a row's choice hangs on its number of tokens, not on its neighbours."""
        rng = torch.Generator().manual_seed(self.seed)
        scores = torch.rand(visual_tokens.mask.shape[1], generator=rng).to(visual_tokens.mask.device)
        return take(visual_tokens, *highest(scores.expand(visual_tokens.mask.shape), visual_tokens.mask, max_tokens))


Score = Callable[[VisualTokens, Tensor | None], Tensor]
"""(tokens, question) -> [B, M] float32, higher is kept."""


def relevance(visual: VisualTokens, query: Tensor | None) -> Tensor:
    """Cosine between the target's state at a token and the question's last state.

    Raises:
        ValueError: there is no question.
    """
    if query is None:
        raise ValueError("relevance needs the question's last state (query); got None.")
    return functional.cosine_similarity(visual.hidden_states.float(), query[:, None].float(), dim=-1)


def distinctness(visual: VisualTokens, query: Tensor | None) -> Tensor:
    """How much the vision tower attends to each, where the family can tell (all of LLaVA); else how far an embedding is
    from the mean of its row."""
    if visual.saliency is not None:
        return visual.saliency
    embeddings, on = visual.inputs_embeds.float(), visual.mask[..., None]
    mean = (embeddings * on).sum(1, keepdim=True) / on.sum(1, keepdim=True).clamp(min=1)
    return -functional.cosine_similarity(embeddings, mean, dim=-1)


@dataclass(frozen=True)
class Prune:
    """The tokens with the highest scores.

    Attributes:
        attends: goes by `VisualTokens.scores`, which are computed for those alone that say so.
    """

    max_tokens: int
    name: str
    score: Score
    attends: bool = False

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        """The best `budget` of each row."""
        return take(visual_tokens, *highest(self.score(visual_tokens, query), visual_tokens.mask, max_tokens))


@dataclass(frozen=True)
class Diverse:
    """The tokens that are least like each other: the one farthest from its nearest, then always the one farthest from
    all that are kept."""

    max_tokens: int
    name: str = "diverse"

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        """Greedily `budget` of each row, by cosine distance of embeddings."""
        batch, count = visual_tokens.mask.shape
        kept = min(max_tokens, count)
        if not kept:
            return take(
                visual_tokens, visual_tokens.mask.new_zeros(batch, 0, dtype=torch.long), visual_tokens.mask[:, :0]
            )
        unit = functional.normalize(visual_tokens.inputs_embeds.float(), dim=-1)
        # Before the first choice the distances are to the nearest of all, after it to what is kept.
        nearest = _nearest(unit, visual_tokens.mask).masked_fill(~visual_tokens.mask, float("-inf"))
        chosen: list[Tensor] = []
        for _ in range(kept):
            one = nearest.argmax(1, keepdim=True)
            apart = 1 - (unit @ gather_rows(unit, one).mT)[..., 0]
            nearest = nearest.minimum(apart) if chosen else apart.masked_fill(~visual_tokens.mask, float("-inf"))
            nearest.scatter_(1, one, float("-inf"))
            chosen.append(one)
        mask = torch.arange(kept, device=unit.device) < visual_tokens.mask.sum(1, keepdim=True)
        # What was chosen after a row's last token is no token of it: it goes to the end, and stays out.
        index = torch.cat(chosen, 1).masked_fill(~mask, count).sort(1).values
        return take(visual_tokens, index.clamp(max=count - 1), mask)


def _nearest(unit: Tensor, mask: Tensor) -> Tensor:
    """[B, M] cosine distance of rows [B, M, D] of length 1 to the nearest other one of their batch row; inf if none."""
    found = []
    for start in range(0, unit.shape[1], STRETCH):
        apart = 1 - unit[:, start : start + STRETCH] @ unit.mT
        apart.masked_fill_(~mask[:, None], float("inf")).diagonal(start, 1, 2).fill_(float("inf"))
        found.append(apart.amin(2))
    return torch.cat(found, 1)


__all__ = [
    "Chance",
    "Diverse",
    "Drop",
    "Identity",
    "Prune",
    "Stride",
    "distinctness",
    "highest",
    "relevance",
    "take",
]
