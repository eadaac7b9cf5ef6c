"""Compressors without weights that keep a subset of the visual tokens unchanged: all, none, evenly, random, by score.

Kept tokens keep their position ids. `TopScore` ranks tokens by similarity to the query or by saliency; `Diverse` keeps
tokens that differ from each other (DivPrune, arXiv 2503.02175).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.engine.gather import gather_rows
from mmspec.interfaces import NO_LIMIT, VisualTokens

CHUNK_SIZE = 256
"""Tokens whose distances to all others are computed at a time; bounds memory to linear in the number of tokens."""


def gather_tokens(visual_tokens: VisualTokens, index: Tensor, mask: Tensor) -> VisualTokens:
    """A subset of the tokens; the grids are dropped.

    Args:
        visual_tokens: M tokens per row.
        index: [B, K] int64 indices into M.
        mask: [B, K] bool, True where `index` is a token.
    """
    positions = visual_tokens.position_ids
    position_index = index if positions.dim() == 2 else index.expand(positions.shape[0], -1, -1)
    return VisualTokens(
        inputs_embeds=gather_rows(visual_tokens.inputs_embeds, index),
        hidden_states=gather_rows(visual_tokens.hidden_states, index),
        mask=mask,
        position_ids=positions.gather(-1, position_index),
        saliency=None if visual_tokens.saliency is None else visual_tokens.saliency.gather(1, index),
        source_indices=index,
    )


def top_score_indices(scores: Tensor, mask: Tensor, max_tokens: int) -> tuple[Tensor, Tensor]:
    """The tokens with the highest scores, in their original order.

    Args:
        scores: [B, M] float.
        mask: [B, M] bool.
        max_tokens: Limit per row.

    Returns:
        index [B, K] int64 and mask [B, K] bool, as `gather_tokens` takes them.
    """
    count = min(max_tokens, scores.shape[1])
    top = scores.masked_fill(~mask, float("-inf")).topk(count, dim=1).indices
    index = top.sort(dim=1).values
    return index, mask.gather(1, index)


class Identity:
    """Keeps all tokens."""

    name, max_tokens = "identity", NO_LIMIT

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        """The tokens unchanged."""
        shape = visual_tokens.mask.shape
        return replace(
            visual_tokens, source_indices=torch.arange(shape[1], device=visual_tokens.mask.device).expand(shape)
        )


class Drop:
    """Keeps no token: the drafter reads the text only."""

    name, max_tokens = "drop", 0

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        """No tokens, K = 0."""
        empty = torch.zeros(len(visual_tokens.mask), 0, dtype=torch.long, device=visual_tokens.mask.device)
        return gather_tokens(visual_tokens, empty, empty.bool())


@dataclass(frozen=True)
class Stride:
    """Keeps evenly spaced tokens of each row. The frames of a video form one sequence."""

    max_tokens: int
    name: str = "stride"

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        """The middle token of each of `max_tokens` intervals of equal length."""
        counts = visual_tokens.mask.sum(1, keepdim=True)
        num_kept = counts.clamp(max=max_tokens)
        step = torch.arange(min(max_tokens, visual_tokens.mask.shape[1]), device=counts.device)
        index = (2 * step + 1) * counts // (2 * num_kept).clamp(min=1)
        # Rows are padded on the right (`VisualTokens.mask`), so the n-th token is at index n.
        return gather_tokens(visual_tokens, index.clamp(max=max(0, visual_tokens.mask.shape[1] - 1)), step < num_kept)


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


ScoreFunction = Callable[[VisualTokens, Tensor | None], Tensor]
"""(visual_tokens, query [B, D] or None) -> scores [B, M] float32; the highest are kept."""


def query_similarity(visual_tokens: VisualTokens, query: Tensor | None) -> Tensor:
    """[B, M] cosine similarity of each token's hidden state and the last hidden state of the prompt.

    Raises:
        ValueError: `query` is None.
    """
    if query is None:
        raise ValueError("query_similarity needs the last hidden state of the prompt (query); got None.")
    return functional.cosine_similarity(visual_tokens.hidden_states.float(), query[:, None].float(), dim=-1)


def saliency(visual_tokens: VisualTokens, query: Tensor | None) -> Tensor:
    """[B, M] attention that each token receives in the vision tower, where available (all LLaVA families).

    Otherwise the negative cosine similarity of each embedding and the mean embedding of its row.
    """
    if visual_tokens.saliency is not None:
        return visual_tokens.saliency
    embeddings = visual_tokens.inputs_embeds.float()
    mask = visual_tokens.mask[..., None]
    mean = (embeddings * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return -functional.cosine_similarity(embeddings, mean, dim=-1)


@dataclass(frozen=True)
class TopScore:
    """Keeps the tokens with the highest scores.

    Attributes:
        max_tokens: Limit per row.
        name: Name in messages and statistics.
        score: The score of each token.
        attends: Whether `VisualTokens.saliency` is used; it is computed only for compressors that set this.
    """

    max_tokens: int
    name: str
    score: ScoreFunction
    attends: bool = False

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        """The `max_tokens` tokens of each row with the highest scores."""
        index, mask = top_score_indices(self.score(visual_tokens, query), visual_tokens.mask, max_tokens)
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
