"""FLASH's compressor (arXiv 2505.12728, section 3.2): learned queries attend to the target's visual hidden states.

Each query mixes the visual tokens with weights softmax(query . state); the same mixture is applied to embeddings and
hidden states. States are layer-normalised before scoring: unnormalised ones are so long that every query would select a
single token. FLASH means the paper, not FlashAttention.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.interfaces import Compressor, VisualTokens


class TrainedCompressor(nn.Module):
    """A compressor with weights, for states of width `hidden_size`."""

    name: ClassVar[str]

    def __init__(self, hidden_size: int, max_tokens: int) -> None:
        """
        Raises:
            ValueError: `max_tokens` is below 1.
        """
        super().__init__()
        if max_tokens < 1:
            raise ValueError(f"the compressor {self.name} needs at least 1 token; got {max_tokens}.")
        self.hidden_size = hidden_size
        self.max_tokens = max_tokens


class LatentCompressor(TrainedCompressor):
    """`max_tokens` learned queries of width D, trained with a drafter."""

    name = "latent"

    def __init__(self, hidden_size: int, max_tokens: int) -> None:
        """
        Raises:
            ValueError: `max_tokens` is below 1.
        """
        super().__init__(hidden_size, max_tokens)
        self.queries = nn.Parameter(torch.randn(max_tokens, hidden_size))

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        """The mixtures of the first queries, `max_tokens` at most; their positions are evenly spaced over the row."""
        batch, count, hidden = visual_tokens.hidden_states.shape
        queries = self.queries[: num_active_queries(self, max_tokens, self.training)]
        if not count:
            return visual_tokens
        keys = functional.layer_norm(visual_tokens.hidden_states.float(), (hidden,))
        scores = queries.float() @ keys.transpose(1, 2) * hidden**-0.5
        weights = scores.masked_fill(~visual_tokens.mask[:, None], float("-inf")).softmax(-1).nan_to_num(0.0)
        return VisualTokens(
            inputs_embeds=weights.to(visual_tokens.inputs_embeds.dtype) @ visual_tokens.inputs_embeds,
            hidden_states=weights.to(visual_tokens.hidden_states.dtype) @ visual_tokens.hidden_states,
            mask=visual_tokens.mask.any(1, keepdim=True).expand(batch, len(queries)),
            position_ids=spread_positions(visual_tokens, len(queries)),
        )


def num_active_queries(compressor: Compressor, max_tokens: int, training: bool) -> int:
    """Number of leading queries in use: `max_tokens`, or all if the compressor has fewer.

    In training it is all of them with probability 1/2, else a half, a fourth, ... drawn uniformly, so that a prefix of
    the queries also works on its own (nested representations, arXiv 2205.13147).
    """
    limit = min(max_tokens, compressor.max_tokens)
    if not training or limit < 2 or float(torch.rand(())) < 0.5:
        return limit
    return limit >> int(torch.randint(1, limit.bit_length(), ()))


def spread_positions(visual_tokens: VisualTokens, count: int) -> Tensor:
    """[B, count] or [axes, B, count] int64 position ids, evenly spaced over each row's, for tokens that mix a row."""
    last = visual_tokens.mask.sum(1, keepdim=True).clamp(min=1) - 1
    index = (torch.linspace(0, 1, count, device=last.device) * last).round().long()
    positions = visual_tokens.position_ids
    return positions.gather(-1, index if positions.dim() == 2 else index.expand(positions.shape[0], -1, -1))
