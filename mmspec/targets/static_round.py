"""`StaticRound`: a target's forward over the nodes of a tree as a function of tensors, with static shapes.

Mask, transformers' own forward, and the writes into the cache. It reads no value on the host, so that it can be
recorded once and replayed (`mmspec.engine.graph`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from mmspec.engine.static_cache import write_nodes
from mmspec.engine.tree_cache import CACHE_ARGUMENT
from mmspec.targets.hf import CAN_SELECT_HIDDEN_STATES

MASK_ALIGNMENT = 16
"""Attention kernels on a GPU copy a mask whose rows do not begin at a multiple of this many numbers."""


class StaticLayer(CacheLayerMixin):
    """One layer of a `StaticTreeCache`; transformers reads its sizes only."""

    is_sliding = False
    is_compileable = True
    supports_early_init = False

    def __init__(self, num_nodes: int, bucket: int) -> None:
        super().__init__()
        self.num_nodes, self.bucket = num_nodes, bucket

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Not used: `StaticTreeCache.update` writes."""
        raise NotImplementedError

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(key length, offset)."""
        return self.num_nodes + self.bucket, 0

    def get_seq_length(self) -> int:
        """The bucket: the same in every round, and not 0, which would mean a prompt."""
        return self.bucket

    def get_max_length(self) -> int:
        """-1: no maximum length."""
        return -1


class StaticTreeCache(Cache):
    """The KV cache of a recorded forward, on the tensors of a `StaticKVCache`."""

    is_initialized = True

    def __init__(self, buffers: Sequence[Tensor], num_nodes: int, bucket: int) -> None:
        """
        Args:
            buffers: 2 * L tensors of `StaticKVCache.layers`.
            num_nodes: N.
            bucket: committed positions to read.
        """
        super().__init__(layers=[StaticLayer(num_nodes, bucket) for _ in range(len(buffers) // 2)])
        self.buffers, self.bucket = buffers, bucket

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """See `write_nodes`."""
        keys = write_nodes(self.buffers[2 * layer_idx], key_states, self.bucket)
        return keys, write_nodes(self.buffers[2 * layer_idx + 1], value_states, self.bucket)


class StaticRound:
    """The forward over N nodes behind up to `bucket` committed positions, as a function of tensors.

    Attributes:
        model: the transformers model.
        template: constant inputs of its forward.
        token_types: names of inputs with one value per token.
        bucket: committed positions that it reads.
        hidden_state_indices: hidden states that it returns.
    """

    def __init__(
        self,
        model: Any,
        template: dict[str, Any],
        token_types: Sequence[str],
        bucket: int,
        hidden_state_indices: Sequence[int],
    ) -> None:
        self.model = model
        self.template = template
        self.token_types = tuple(token_types)
        self.bucket = bucket
        self.hidden_state_indices = tuple(hidden_state_indices)

    @property
    def constants(self) -> str:
        """The inputs that a recording repeats, besides tensors."""
        simple = (bool, int, float, str, type(None))
        values = {name: value for name, value in self.template.items() if isinstance(value, simple)}
        return repr((sorted(values.items()), self.token_types))

    def __call__(
        self, lengths: Tensor, padding: Tensor, position_base: Tensor, max_position: Tensor, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        """One forward.

        Args:
            lengths: [B] int64 committed positions.
            padding: [B, C] bool, False at left pads.
            position_base: [B, 1] or [axes, B, 1] int64, position id of cache position 0 if all positions were text.
            max_position: [1] int64, largest cache position that is given a position id of its own: drafts past the end
                may exceed the model's positions.
            rest: [..., B, 1] of each token type; the 2 * L tensors [B, H, T + C, D] of `StaticKVCache.layers`, in which
                the nodes' keys and values are written; `tokens` [B, N], `depths` [B, N] int64, and `ancestor_mask`
                [B, N, N] bool.

        Returns:
            logits [B, N, V], and [B, N, D] of each hidden state.
        """
        *parts, tokens, depths, ancestor_mask = rest
        token_types, buffers = parts[: len(self.token_types)], parts[len(self.token_types) :]
        num_nodes = tokens.shape[1]
        inputs = dict(self.template)
        inputs["input_ids"] = tokens
        inputs["position_ids"] = position_base + torch.minimum(lengths[:, None] + depths, max_position)
        inputs["attention_mask"] = self._mask(lengths, padding, ancestor_mask)
        inputs[CACHE_ARGUMENT] = StaticTreeCache(buffers, num_nodes, self.bucket)
        for name, last in zip(self.token_types, token_types, strict=True):
            inputs[name] = last.expand(*last.shape[:-1], num_nodes)
        if self.hidden_state_indices:
            inputs["output_hidden_states"] = sorted(self.hidden_state_indices) if CAN_SELECT_HIDDEN_STATES else True
        outputs = self.model(**inputs, return_dict=True)
        return outputs.logits, *(outputs.hidden_states[index] for index in self.hidden_state_indices)

    def _mask(self, lengths: Tensor, padding: Tensor, ancestor_mask: Tensor) -> Tensor:
        """[B, 1, N, N + bucket] additive, in the model's dtype: SDPA would convert a bool mask in every layer."""
        batch, num_nodes, _ = ancestor_mask.shape
        index = torch.arange(self.bucket, device=lengths.device)
        committed = (index < lengths[:, None]) & padding[:, : self.bucket]
        allowed = torch.cat([ancestor_mask, committed[:, None].expand(batch, num_nodes, self.bucket)], dim=-1)
        width = allowed.shape[-1]
        dtype = self.model.dtype
        aligned = -(-width // MASK_ALIGNMENT) * MASK_ALIGNMENT
        mask = torch.zeros(batch, 1, num_nodes, aligned, dtype=dtype, device=lengths.device)[..., :width]
        return mask.masked_fill_(~allowed[:, None], torch.finfo(dtype).min)


__all__ = ["StaticRound", "StaticTreeCache"]
