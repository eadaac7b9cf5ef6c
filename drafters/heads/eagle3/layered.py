"""Attention of EAGLE-3 heads of several layers, or with windows (speculators 0.7): each layer over its own keys.

Layers after the first are ordinary ones of the draft: they read the output of the layer below at all positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.drafters.heads.base.attention import CachedAttention
from mmspec.drafters.heads.base.expand import AutoregressiveExpander
from mmspec.drafters.heads.eagle3.config import Eagle3Config


@dataclass(frozen=True)
class LayeredAttention(CachedAttention):
    """Attention of all layers.

    Attributes:
        windows: positions that each layer sees, its own included; 0 for all; empty for no windows.
        distances: [B, n or 1, keys] int64, how many positions each key is behind a query.
    """

    windows: tuple[int, ...] = ()
    distances: Tensor | None = None

    def of_layer(self, layer: int) -> CachedAttention:
        """Attention of one layer."""
        mask, window = self.mask, self.windows[layer] if self.windows else 0
        if window:
            assert self.distances is not None and mask is not None
            mask = mask & (self.distances < window)[:, None]
        return CachedAttention(self.kv_cache, mask, layer=layer)


def committed_attention(config: Eagle3Config, attend: CachedAttention, n: int, device: torch.device) -> CachedAttention:
    """Attention of n positions behind the committed ones of each row, in every layer to all before them."""
    kv_cache = attend.kv_cache
    queries = kv_cache.lengths_on(device)[:, None] + torch.arange(n, device=device)
    distances = queries[..., None] - torch.arange(kv_cache.kv_len, device=device)
    return LayeredAttention(kv_cache, (distances >= 0)[:, None], windows=config.sliding_windows, distances=distances)


class Eagle3Expander(AutoregressiveExpander):
    """Levels of nodes: a window counts from each level's position."""

    def attention(self, level: int, mask: Tensor) -> CachedAttention:
        config = self.drafter.head.config
        if not isinstance(config, Eagle3Config) or not config.is_layered:
            return super().attention(level, mask)
        num_nodes, num_context = self.self_mask.shape[1], self.context_mask.shape[-1]
        device = mask.device
        context = self.lengths[:, None] + (level - 1) - torch.arange(num_context, device=device)
        nodes = torch.arange(level - 1, -1, -1, device=device).repeat_interleave(num_nodes)
        distances = torch.cat((context, nodes.expand(len(context), -1)), dim=1)[:, None]
        cache = self.state.kv_cache
        return LayeredAttention(cache, mask, windows=config.sliding_windows, distances=distances)
