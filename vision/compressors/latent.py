"""FLASH's compressor (arXiv 2505.12728, section 3.2): learned queries look at the target's states of visual tokens.

Each query mixes the tokens by softmax(query . state); the same mixture is taken of embeddings and states. States are
normed before they are scored, since raw ones are so long that every query would pick a single token. Trained along
with a drafter. Knows no drafter.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.interfaces import VisualTokens


class LatentCompressor(nn.Module):
    """`tokens` learned queries of width D."""

    name = "latent"

    def __init__(self, hidden_size: int, tokens: int) -> None:
        """
        Raises:
            ValueError: fewer than one token.
        """
        super().__init__()
        if tokens < 1:
            raise ValueError(f"a latent compressor keeps at least 1 token; got {tokens}.")
        self.hidden_size, self.max_tokens = hidden_size, tokens
        self.queries = nn.Parameter(torch.randn(tokens, hidden_size))

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        """The mixtures of the first `budget` queries; their positions are spread evenly over those of the tokens."""
        batch, count, hidden = visual_tokens.hidden_states.shape
        queries = self.queries[: looking(self, max_tokens)]
        if not count:
            return visual_tokens
        keys = functional.layer_norm(visual_tokens.hidden_states.float(), (hidden,))
        scores = queries.float() @ keys.transpose(1, 2) * hidden**-0.5
        shares = scores.masked_fill(~visual_tokens.mask[:, None], float("-inf")).softmax(-1).nan_to_num(0.0)
        return VisualTokens(
            inputs_embeds=shares.to(visual_tokens.inputs_embeds.dtype) @ visual_tokens.inputs_embeds,
            hidden_states=shares.to(visual_tokens.hidden_states.dtype) @ visual_tokens.hidden_states,
            mask=visual_tokens.mask.any(1, keepdim=True).expand(batch, len(queries)),
            position_ids=spread(visual_tokens, len(queries)),
        )


def looking(made: nn.Module, budget: int) -> int:
    """How many of its queries look, from the first on.

    In training it is all of them half of the time, else a half, a fourth, ... as it is drawn: so the first ones learn
    to do without the rest, and a smaller budget may be asked for in use (nested representations, arXiv 2205.13147).
    """
    most = min(budget, int(made.tokens))  # type: ignore[arg-type]
    if not made.training or most < 2 or float(torch.rand(())) < 0.5:
        return most
    return most >> int(torch.randint(1, most.bit_length(), ()))


def spread(visual: VisualTokens, count: int) -> Tensor:
    """[B, count] or [axes, B, count] positions, evenly over those of each row's tokens, for tokens without a place."""
    last = visual.mask.sum(1, keepdim=True).clamp(min=1) - 1
    spots = (torch.linspace(0, 1, count, device=last.device) * last).round().long()
    positions = visual.position_ids
    return positions.gather(-1, spots if positions.dim() == 2 else spots.expand(positions.shape[0], -1, -1))


__all__ = ["LatentCompressor", "looking", "spread"]
