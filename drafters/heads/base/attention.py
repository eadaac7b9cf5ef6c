"""Attention of a head's layer over its KV cache: the attention function, its mask, the last outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.engine.host_copy import from_host
from mmspec.engine.kv_cache import RaggedKVCache


@dataclass(frozen=True)
class CachedAttention:
    """Attention over the cache and the new positions, which are appended to it; an `AttentionFn`.

    Attributes:
        kv_cache: of the head, after `begin_forward`.
        mask: [B, 1, n or 1, keys] bool, True where a query attends; None for all keys.
        num_cached: first positions of the forward whose keys and values are in the cache already; they only bring
            queries.
        layer: of the cache, 0 but for heads of several.
    """

    kv_cache: RaggedKVCache
    mask: Tensor | None
    num_cached: int = 0
    layer: int = 0

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[B, H, m, d] outputs."""
        is_gqa = queries.shape[1] != keys.shape[1]
        keys, values = self.update(keys, values)
        return functional.scaled_dot_product_attention(queries, keys, values, self.mask, enable_gqa=is_gqa)

    def update(self, keys: Tensor, values: Tensor, *others: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new keys and values [B, H', n, d]; returns all. See `HeadCache`."""
        return self.kv_cache.write(self.layer, keys[:, :, self.num_cached :], values[:, :, self.num_cached :])


def causal_mask(kv_cache: RaggedKVCache, n: int, device: torch.device) -> Tensor | None:
    """Mask for `CachedAttention` of n new positions that attend to the cache and to those before them.

    Returns:
        [B, 1, n, keys] bool, or None if every key may be attended to.
    """
    if n == 1 and kv_cache.is_uniform:
        return None
    last_key = kv_cache.lengths_on(device)[:, None] + torch.arange(n, device=device)
    return (torch.arange(kv_cache.kv_len, device=device) <= last_key[..., None])[:, None]


def select_last(outputs: Tensor, counts: Sequence[int] | Tensor, previous: Tensor) -> Tensor:
    """Output at the last valid position of each row.

    Args:
        outputs: [B, n, D].
        counts: number of valid positions of each row; [B] int64 in a recorded function.
        previous: [B, D] returned for rows without a valid position.

    Returns:
        [B, D].
    """
    if not isinstance(counts, Tensor):
        if not max(counts):
            return previous
        if min(counts) == max(counts):
            return outputs[:, counts[0] - 1]
        counts = from_host(counts, outputs.device)
    index = (counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, outputs.shape[-1])
    return torch.where(counts[:, None] > 0, outputs.gather(1, index)[:, 0], previous)
