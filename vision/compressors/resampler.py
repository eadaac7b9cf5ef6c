"""Learned queries that look at visual tokens once (SpecVLM's resampler, arXiv 2509.11815, section 3.2).

Keys are made of embedding and state; what a query saw is taken of both with the same shares. It begins as the mean of
the heads' views, and learns what to add to it. Trained along with a drafter.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.interfaces import VisualTokens
from mmspec.vision.compressors.latent import looking, spread


class Resampler(nn.Module):
    """`tokens` queries, `heads` views of `width` each."""

    name = "resampler"

    def __init__(self, hidden_size: int, tokens: int, heads: int = 4, width: int = 32) -> None:
        """
        Raises:
            ValueError: fewer than one token.
        """
        super().__init__()
        if tokens < 1:
            raise ValueError(f"a resampler keeps at least 1 token; got {tokens}.")
        self.hidden_size, self.max_tokens, self.heads, self.width = hidden_size, tokens, heads, width
        self.queries = nn.Parameter(torch.randn(tokens, heads, width))
        self.keys = nn.Linear(2 * hidden_size, heads * width, bias=False)
        self.values = nn.Linear(hidden_size, heads * width, bias=False)
        self.out = nn.Linear(heads * width, hidden_size, bias=False)
        nn.init.zeros_(self.out.weight)

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        """What the first `budget` queries see; their positions are spread evenly over those of the tokens."""
        batch, count, hidden = visual_tokens.hidden_states.shape
        if not count:
            return visual_tokens
        queries = self.queries[: looking(self, max_tokens)]
        joined = torch.cat(
            [
                functional.layer_norm(part.float(), (hidden,))
                for part in (visual_tokens.inputs_embeds, visual_tokens.hidden_states)
            ],
            dim=-1,
        )
        keys = self.keys(joined).view(batch, count, self.heads, self.width)
        scores = torch.einsum("qhw,bmhw->bhqm", queries, keys) * self.width**-0.5
        shares = scores.masked_fill(~visual_tokens.mask[:, None, None], float("-inf")).softmax(-1).nan_to_num(0.0)

        def seen(part: Tensor) -> Tensor:
            values = self.values(part.to(self.values.weight.dtype)).view(batch, count, self.heads, self.width)
            views = torch.einsum("bhqm,bmhw->bqhw", shares.to(values.dtype), values)
            plain = shares.mean(1).to(part.dtype) @ part
            added: Tensor = self.out(views.flatten(2))
            return plain + added.to(part.dtype)

        return VisualTokens(
            inputs_embeds=seen(visual_tokens.inputs_embeds),
            hidden_states=seen(visual_tokens.hidden_states),
            mask=visual_tokens.mask.any(1, keepdim=True).expand(batch, len(queries)),
            position_ids=spread(visual_tokens, len(queries)),
        )


__all__ = ["Resampler"]
