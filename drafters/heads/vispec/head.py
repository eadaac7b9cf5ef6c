"""The network of ViSpec (arXiv 2509.15235): EAGLE's head and two more modules."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.drafters.heads.eagle.head import EagleConfig, EagleHead


@dataclass(frozen=True)
class VispecConfig(EagleConfig):
    """Shape of a `VispecHead`.

    Attributes:
        num_queries: Q, learned queries of the visual adaptor.
    """

    num_queries: int = 2


class VisualAdaptor(nn.Module):
    """Cross-attention of Q learned queries over an image's projected embeddings, without positions or norm."""

    def __init__(self, config: VispecConfig) -> None:
        super().__init__()
        num_heads, size = config.num_attention_heads, config.head_dim
        self.q = nn.Parameter(torch.randn(config.num_queries, num_heads, size) * size**-0.5)
        self.k_proj = nn.Linear(config.hidden_size, num_heads * size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, num_heads * size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(num_heads * size, config.hidden_size, bias=False)

    def forward(self, image_embeds: Tensor) -> Tensor:
        """[M, D] -> [Q, D]."""
        num_heads, size = self.q.shape[1:]
        keys, values = (
            proj(image_embeds).view(-1, num_heads, size).transpose(0, 1) for proj in (self.k_proj, self.v_proj)
        )
        queries = self.q.transpose(0, 1)
        outputs = functional.scaled_dot_product_attention(queries[None], keys[None], values[None])[0]
        projected: Tensor = self.o_proj(outputs.transpose(0, 1).flatten(1))
        return projected


class VispecHead(EagleHead):
    """EAGLE's head with the visual adaptor, and a layer that mixes an image's vector into the hidden state."""

    config: VispecConfig
    compresses_visual_tokens = True

    def __init__(self, config: VispecConfig) -> None:
        super().__init__(config)
        self.imadpt = VisualAdaptor(config)
        self.img_fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)
