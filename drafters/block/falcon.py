"""Falcon (arXiv 2412.12639): k tokens from every forward, and several forwards, each over the blocks of the last one.

Rows are grouped in blocks of k; a row attends to its whole block and to all blocks before it, and predicts the token k
positions ahead. The last block ends where the context ends, so it is always full. `fc` joins embedding and hidden state
as in EAGLE, in place of the paper's LSTM, whose released code never carries a state from row to row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.control.depth import DepthController
from mmspec.drafters.block.base import BlockDrafter
from mmspec.drafters.block.block_tree import select_nodes
from mmspec.drafters.eagle.expand import AutoregressiveExpander
from mmspec.drafters.eagle.head import AttentionFn, EagleHead, HeadConfig
from mmspec.drafters.eagle.state import EagleState
from mmspec.engine.gather import gather_rows
from mmspec.engine.kv_cache import RaggedKVCache
from mmspec.engine.tree import DraftTree


class FalconHead(EagleHead):
    """EAGLE's head; `block_size` is how many positions ahead each of its outputs predicts."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        if config.block_size < 2:
            raise ValueError(f"a Falcon head needs block_size of at least 2; got {config.block_size}.")


class FalconDrafter(BlockDrafter):
    """Drafts with a `FalconHead`: up to `passes` blocks, of each of which `beam_width` paths are continued.

    `EagleState.extra` is [B, 2 k - 1, D]: the outputs of the last k rows, then the last k - 1 input rows. The layer's
    keys and values depend on its inputs only, so when the block boundaries move, the rows of the last block only need
    new queries.
    """

    head: FalconHead

    def __init__(self, head: FalconHead, visual_mode: str = "decoupled", *, passes: int = 3, **options: Any) -> None:
        """
        Args:
            head: the draft head.
            visual_mode: a key of `VISUAL_MODES`.
            passes: maximum number of forwards per draft.
            **options: further arguments of `BlockDrafter`.

        Raises:
            ValueError: a block size other than the head's, or fewer than one pass.
        """
        super().__init__(head, visual_mode, **options)
        if self.block_size != head.config.block_size:
            raise ValueError(
                f"block_size must be {head.config.block_size}, how far this Falcon head predicts ahead; "
                f"got {self.block_size}."
            )
        if passes < 1:
            raise ValueError(f"passes must be at least 1; got {passes}.")
        self.depth_controller = DepthController(passes, tokens_per_level=self.block_size)
        self.max_lookahead = passes * self.block_size

    def _forward(self, state: EagleState, inputs: Tensor, position_ids: Tensor, counts: list[int]) -> None:
        """Append the inputs to the cache, and compute the outputs of the last block."""
        kv_cache, k, (batch, n, hidden), device = state.kv_cache, self.block_size, inputs.shape, inputs.device
        previous = inputs.new_zeros(batch, k - 1, hidden) if state.extra is None else state.extra[:, k:]
        seq_lens, num_new = torch.tensor([kv_cache.seq_lens, counts], device=device)[..., None]
        rows = torch.cat((previous, inputs), dim=1)
        kv_cache.begin_forward(n)
        # Position ids of the previous rows: consecutive, as they are at the end of every prompt.
        next_positions = torch.tensor(state.next_positions, device=device)[:, None]
        previous_ids = (torch.arange(1 - k, 0, device=device) + next_positions).clamp(min=0)
        cos, sin = self.rotary_embedding(state, torch.cat((previous_ids, position_ids), dim=1))
        mask = torch.arange(kv_cache.kv_len, device=device) < (seq_lens + num_new)[..., None]
        last_block = (num_new - 1).clamp(min=0) + torch.arange(k, device=device)
        is_prompt = not any(kv_cache.seq_lens)  # of which only the last block's outputs are used
        attend = _query_only_attention(kv_cache, mask, k - 1)
        outputs = self.head(rows, cos, sin, attend, last_block if is_prompt else None)
        kv_cache.seq_lens = [length + count for length, count in zip(kv_cache.seq_lens, counts, strict=True)]
        outputs = outputs if is_prompt else gather_rows(outputs, last_block)
        extra = torch.cat((outputs, gather_rows(rows, last_block)[:, 1:]), dim=1)
        state.extra = extra if state.extra is None else torch.where(num_new[..., None] == 0, state.extra, extra)
        state.last_hidden = state.extra[:, k - 1]

    def block_features(self, state: EagleState) -> Tensor:
        """Outputs of the last block."""
        assert state.extra is not None
        return state.extra[:, : self.block_size]

    def _draft_tree(self, state: EagleState, max_nodes: int, depth: int) -> DraftTree:
        """Block by block: the most likely paths through a block are the inputs of the next (Falcon, section 3.3)."""
        k = self.block_size
        if max_nodes - 1 < k:
            return super()._draft_tree(state, max_nodes, 1)
        (batch, hidden), device = state.last_hidden.shape, state.last_hidden.device
        table, noise = self.path_table(state, max_nodes, k), self.log_noise(state, depth * k)
        full_paths, num_paths = table.full_paths, len(table.parents)
        width = min(self.num_followed(device), len(full_paths))
        expander = AutoregressiveExpander(self, state, width, rows_per_node=k)
        features = self.block_features(state)[:, None]
        beam_scores = state.last_hidden.new_zeros(batch, 1, dtype=torch.float32)
        beam = torch.full((batch, 1), -1, device=device)  # indices of the followed nodes in the pool
        pool, pool_size = [], 0
        for level in range(depth):
            level_noise = None if noise is None else noise[:, None, level * k : (level + 1) * k]
            log_probs = self.log_probs(state, self.logits(state, features), level_noise)
            tokens, scores, top_ids = table.score_paths(log_probs, beam_scores)
            num_followed = beam.shape[1]
            offsets = pool_size + num_paths * torch.arange(num_followed, device=device)[:, None]
            parents = torch.where(table.parents < 0, beam[..., None], offsets + table.parents)
            pool.append((tokens.flatten(1), scores.flatten(1), parents.flatten(1)))
            if level == depth - 1:
                break
            beam_scores, chosen = scores[..., full_paths].flatten(1).topk(width)
            source, path = chosen // len(full_paths), chosen % len(full_paths)
            beam = pool_size + source * num_paths + full_paths[path]
            pool_size += num_followed * num_paths
            source_ids = top_ids.gather(1, source[..., None].expand(-1, -1, top_ids.shape[-1]))
            path_tokens = source_ids.gather(2, table.token_indices[path])
            hidden_states = features.gather(1, source[..., None, None].expand(-1, -1, k, hidden))
            if level:
                expander.reorder(source[..., None])
            embeds = self.embed(state, path_tokens.flatten(1)).to(hidden_states.dtype)
            outputs = expander.step(level + 1, embeds, hidden_states.flatten(1, 2))
            features = outputs.unflatten(1, (width, k))
        expander.close()
        tokens, scores, parents = (torch.cat(parts, dim=1) for parts in zip(*pool, strict=True))
        return select_nodes(state.draft_ids, tokens, scores, parents, num_nodes=max_nodes)


def _query_only_attention(kv_cache: RaggedKVCache, mask: Tensor, num_cached: int) -> AttentionFn:
    """Attention of all rows over the cache and the new rows.

    Args:
        kv_cache: of one layer, after `begin_forward`.
        mask: [B, 1, keys] bool, True where a row attends.
        num_cached: leading rows whose keys and values are in the cache already; they bring queries only.
    """

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        is_gqa = queries.shape[1] != keys.shape[1]
        keys, values = kv_cache.write(0, keys[:, :, num_cached:], values[:, :, num_cached:])
        return functional.scaled_dot_product_attention(queries, keys, values, mask[:, None], enable_gqa=is_gqa)

    return attend


__all__ = ["FalconDrafter", "FalconHead"]
