"""Falcon (arXiv 2412.12639): k tokens from every forward, and several forwards, each over the blocks of the last one.

Positions are grouped in blocks of k; a position attends to its whole block and to all blocks before it, and predicts
the token k positions ahead. The last block ends where the context ends, so it is always full. `fc` joins embedding and
hidden state as in EAGLE, in place of the paper's LSTM, whose released code carries no state between positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.drafters.heads.base.attention import cached_attention
from mmspec.drafters.heads.base.block import BlockDrafter
from mmspec.drafters.heads.base.expand import AutoregressiveExpander
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.heads.eagle.head import EagleConfig, EagleHead
from mmspec.drafters.rerank import NodePool
from mmspec.engine.gather import gather_rows
from mmspec.engine.host_copy import from_host
from mmspec.engine.tree import DraftTree


class FalconHead(EagleHead):
    """EAGLE's head; `block_size` is how many positions ahead each of its outputs predicts."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        if config.block_size < 2:
            raise ValueError(f"a Falcon head needs block_size of at least 2; got {config.block_size}.")


@dataclass
class FalconState(DraftState):
    """State of one call.

    Attributes:
        block: [B, 2 k - 1, D] the outputs at the last k positions, then the last k - 1 inputs; None before the prompt.
    """

    kept: ClassVar[tuple[str, ...]] = ("last_hidden", "block")
    block: Tensor | None = None


class FalconDrafter(BlockDrafter):
    """Drafts with a `FalconHead`: up to `max_forwards` blocks, of each of which `top_k` paths are continued.

    A level is a block, which takes one forward. The layer's keys and values depend
    on its inputs only, so when the block boundaries move, the positions of the last block only need new queries.
    """

    head: FalconHead
    state_class = FalconState
    records_drafts = True

    def __init__(
        self,
        head: FalconHead,
        visual_mode: str = "decoupled",
        *,
        max_forwards: int = 3,
        **options: Any,
    ) -> None:
        """
        Args:
            head: the draft head.
            visual_mode: a key of `VISUAL_MODES`.
            max_forwards: maximum number of forwards per draft.
            **options: further arguments of `BlockDrafter`.

        Raises:
            ValueError: a block size other than the head's, or `max_forwards` below 1.
        """
        super().__init__(head, visual_mode, **options)
        if self.block_size != head.config.block_size:
            raise ValueError(
                f"block_size must be {head.config.block_size}, how far this Falcon head predicts ahead; "
                f"got {self.block_size}."
            )
        if max_forwards < 1:
            raise ValueError(f"max_forwards must be at least 1; got {max_forwards}.")
        self.max_levels, self.max_depth = max_forwards, max_forwards * self.block_size

    def extend_context(self, state: DraftState, inputs: Tensor, position_ids: Tensor, counts: list[int]) -> None:
        self._extend(state, inputs, position_ids, counts, is_prompt=not any(state.kv_cache.seq_lens))
        lengths = state.kv_cache.seq_lens
        state.kv_cache.seq_lens = [length + count for length, count in zip(lengths, counts, strict=True)]

    def extend_rows(
        self, state: DraftState, inputs: Tensor, position_ids: Tensor, counts: Sequence[int] | Tensor
    ) -> None:
        self._extend(state, inputs, position_ids, counts, is_prompt=False)

    def _extend(
        self,
        state: DraftState,
        inputs: Tensor,
        position_ids: Tensor,
        counts: Sequence[int] | Tensor,
        is_prompt: bool,
    ) -> None:
        """Append the inputs to the cache, and compute the outputs of the last block; of a prompt those only."""
        assert isinstance(state, FalconState)
        kv_cache, k, (batch, n, hidden), device = state.kv_cache, self.block_size, inputs.shape, inputs.device
        previous = inputs.new_zeros(batch, k - 1, hidden) if state.block is None else state.block[:, k:]
        seq_lens = kv_cache.lengths_on(device)[:, None]
        num_new = (counts if isinstance(counts, Tensor) else from_host(counts, device))[:, None]
        inputs = torch.cat((previous, inputs), dim=1)
        kv_cache.begin_forward(n)
        # Position ids of the previous inputs: consecutive, as they are at the end of every prompt.
        previous_ids = (torch.arange(1 - k, 0, device=device) + state.first_positions()).clamp(min=0)
        cos, sin = self.rotary_embedding(state, torch.cat((previous_ids, position_ids), dim=1))
        mask = torch.arange(kv_cache.kv_len, device=device) < (seq_lens + num_new)[..., None]
        last_block = (num_new - 1).clamp(min=0) + torch.arange(k, device=device)
        attend = cached_attention(kv_cache, mask[:, None], num_cached=k - 1)
        outputs = self.head(inputs, cos, sin, attend, last_block if is_prompt else None)
        outputs = outputs if is_prompt else gather_rows(outputs, last_block)
        block = torch.cat((outputs, gather_rows(inputs, last_block)[:, 1:]), dim=1)
        state.block = block if state.block is None else torch.where(num_new[..., None] == 0, state.block, block)
        state.last_hidden = state.block[:, k - 1]

    def block_features(self, state: DraftState) -> Tensor:
        """Outputs of the last block."""
        assert isinstance(state, FalconState) and state.block is not None
        return state.block[:, : self.block_size]

    def draft_tree(self, state: DraftState, max_nodes: int, num_levels: int) -> DraftTree:
        """Block by block: the likeliest paths through a block are the inputs of the next (Falcon, section 3.3).

        Args:
            state: of the call.
            max_nodes: size of the tree, the root included.
            num_levels: number of blocks, which is that of forwards.
        """
        k = self.block_size
        if max_nodes - 1 < k:
            return super().draft_tree(state, max_nodes, 1)
        batch, device = len(state.last_hidden), state.last_hidden.device
        table = self.path_table(state, max_nodes, k)
        top_k = min(self.top_k_of(state), len(table.full_paths))
        noise = state.log_noise(num_levels * k)
        expander = AutoregressiveExpander(self, state, top_k, positions_per_node=k)
        pool = NodePool()
        # The W nodes to expand, the root alone at first: log probability, pool index, features of the next k positions.
        node_log_probs = state.last_hidden.new_zeros(batch, 1, dtype=torch.float32)
        pool_index = torch.full((batch, 1), -1, device=device)
        features = self.block_features(state)[:, None]
        for block in range(num_levels):
            block_noise = None if noise is None else noise[:, None, block * k : (block + 1) * k]
            log_probs = state.log_probs(self.logits(state, features), block_noise)
            tokens, path_log_probs, top_ids = table.score_paths(log_probs, node_log_probs)
            num_paths, first = len(table.parents), pool.num_nodes
            offsets = first + num_paths * torch.arange(pool_index.shape[1], device=device)[:, None]
            parents = torch.where(table.parents < 0, pool_index[..., None], offsets + table.parents)
            pool.add(tokens.flatten(1), path_log_probs.flatten(1), parents.flatten(1))
            if block == num_levels - 1:
                break
            node_log_probs, chosen = path_log_probs[..., table.full_paths].flatten(1).topk(top_k)
            parent, path = chosen // len(table.full_paths), chosen % len(table.full_paths)
            pool_index = first + parent * num_paths + table.full_paths[path]
            path_ids = top_ids.gather(1, parent[..., None].expand(-1, -1, top_ids.shape[-1]))
            path_tokens = path_ids.gather(2, table.token_indices[path]).flatten(1)
            parent_hidden = features.gather(1, parent[..., None, None].expand(-1, -1, *features.shape[2:]))
            if block:
                expander.select_parents(parent[..., None])
            embeds = state.embed(path_tokens).to(features.dtype)
            hidden_states = expander.expand(block + 1, embeds, parent_hidden.flatten(1, 2))
            features = hidden_states.unflatten(1, (top_k, k))
        expander.close()
        return pool.select(state.draft_ids, max_nodes)
