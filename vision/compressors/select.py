"""Compressors without weights that keep a subset of the visual tokens unchanged: all, none, evenly, by score.

Kept tokens keep their position ids.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.engine.gather import gather_rows
from mmspec.interfaces import NO_LIMIT, VisualTokens


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
class Relevant:
    """Keeps the tokens whose hidden states are most similar to the last hidden state of the prompt, by their cosine."""

    max_tokens: int
    name: str = "relevant"

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        """The `max_tokens` most similar tokens of each row.

        Raises:
            ValueError: `query` is None.
        """
        if query is None:
            raise ValueError("the compressor relevant needs the last hidden state of the prompt (query); got None.")
        scores = functional.cosine_similarity(visual_tokens.hidden_states.float(), query[:, None].float(), dim=-1)
        index, mask = top_score_indices(scores, visual_tokens.mask, max_tokens)
        return gather_tokens(visual_tokens, index, mask)
