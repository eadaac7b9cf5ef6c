"""SpecVLM's resampler (arXiv 2509.11815, section 3.2): one cross-attention layer with learned queries.

Keys are projected from embedding and hidden state together; the same attention weights are applied to both. The output
starts as the mean over the heads' attention (`out` is initialised with zeros), and training adds a correction.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.interfaces import VisualTokens
from mmspec.vision.compressors.latent import TrainedCompressor, num_active_queries, spread_positions


class Resampler(TrainedCompressor):
    """`max_tokens` learned queries with `num_heads` heads of width `head_dim`, trained with a drafter."""

    name = "resampler"

    def __init__(self, hidden_size: int, max_tokens: int, num_heads: int = 4, head_dim: int = 32) -> None:
        """
        Raises:
            ValueError: `max_tokens` is below 1.
        """
        super().__init__(hidden_size, max_tokens)
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.queries = nn.Parameter(torch.randn(max_tokens, num_heads, head_dim))
        self.keys = nn.Linear(2 * hidden_size, num_heads * head_dim, bias=False)
        self.values = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.out = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        nn.init.zeros_(self.out.weight)

    def compress(self, visual_tokens: VisualTokens, query: Tensor | None, max_tokens: int) -> VisualTokens:
        """The outputs of the first queries, `max_tokens` at most; their positions are evenly spaced over the row."""
        batch, count, hidden = visual_tokens.hidden_states.shape
        if not count:
            return visual_tokens
        queries = self.queries[: num_active_queries(self, max_tokens, self.training)]
        key_inputs = torch.cat(
            [
                functional.layer_norm(part.float(), (hidden,))
                for part in (visual_tokens.inputs_embeds, visual_tokens.hidden_states)
            ],
            dim=-1,
        )
        keys = self.keys(key_inputs).view(batch, count, self.num_heads, self.head_dim)
        scores = torch.einsum("qhw,bmhw->bhqm", queries, keys) * self.head_dim**-0.5
        weights = scores.masked_fill(~visual_tokens.mask[:, None, None], float("-inf")).softmax(-1).nan_to_num(0.0)

        def attend(part: Tensor) -> Tensor:
            values = self.values(part.to(self.values.weight.dtype)).view(batch, count, self.num_heads, self.head_dim)
            heads = torch.einsum("bhqm,bmhw->bqhw", weights.to(values.dtype), values)
            mean = weights.mean(1).to(part.dtype) @ part
            correction: Tensor = self.out(heads.flatten(2))
            return mean + correction.to(part.dtype)

        return VisualTokens(
            inputs_embeds=attend(visual_tokens.inputs_embeds),
            hidden_states=attend(visual_tokens.hidden_states),
            mask=visual_tokens.mask.any(1, keepdim=True).expand(batch, len(queries)),
            position_ids=spread_positions(visual_tokens, len(queries)),
        )
