"""Level expansion of a draft tree: from the nodes of one level to the logits of the next.

`expand_levels` drives a `LevelExpander`. `AutoregressiveExpander` runs the head once per
level (EAGLE-2, arXiv 2406.16858, section 4.1); the block drafters bring expanders that need no further forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.drafters.block.block_tree import LEVEL_PENALTY, select_nodes
from mmspec.drafters.eagle.head import AttentionFn
from mmspec.drafters.eagle.state import EagleState
from mmspec.engine.kv_cache import RaggedKVCache
from mmspec.engine.tree import DraftTree

if TYPE_CHECKING:
    from mmspec.drafters.eagle.drafter import EagleDrafter


class LevelExpander(Protocol):
    """Expands W nodes of one tree level at a time.

    Attributes:
        start: [B, 1, D] head output at the root.
    """

    start: Tensor

    def step(self, level: int, inputs_embeds: Tensor, hidden_states: Tensor) -> Tensor:
        """Run one level.

        Args:
            level: 1 for the children of the root.
            inputs_embeds: [B, W, D] embeddings of the nodes' tokens.
            hidden_states: [B, W, D] outputs at the nodes' parents.

        Returns:
            [B, W, D'] outputs at the nodes.
        """

    def logits(self, level: int, hidden_states: Tensor) -> Tensor:
        """[B, W, V'] logits of the tokens that follow the outputs of a level."""

    def reorder(self, parent_index: Tensor) -> None:
        """Continue from the children of these nodes: [B, W, 1] int64, indices into the last level."""

    def close(self) -> None:
        """Restore the KV cache as it was before the draft."""


class AutoregressiveExpander:
    """One forward of the head per level; a node attends to the context and to its own ancestors."""

    def __init__(self, drafter: EagleDrafter, state: EagleState, beam_width: int, rows_per_node: int = 1) -> None:
        """
        Args:
            drafter: provides the head, the rotary table and the logits.
            state: of the call.
            beam_width: W, nodes per level.
            rows_per_node: input rows that each node consists of (Falcon's blocks); they attend to each other.
        """
        kv_cache, batch, device = state.kv_cache, state.last_hidden.shape[0], state.last_hidden.device
        self.drafter = drafter
        self.state = state
        self.rows_per_node = rows_per_node
        self.start = state.last_hidden[:, None]
        # All trees start behind the longest row, so that one slice of the cache covers them; the gaps are masked.
        self.seq_lens = kv_cache.seq_lens
        kv_cache.seq_lens = [max(self.seq_lens)] * batch
        is_context = (
            torch.arange(max(self.seq_lens), device=device) < torch.tensor(self.seq_lens, device=device)[:, None]
        )
        self.context_mask = is_context[:, None].expand(batch, beam_width, -1)
        # All nodes of a level share their position ids: `rows_per_node` consecutive ones.
        first = torch.tensor(state.next_positions, device=device)[:, None]
        self.cos, self.sin = drafter.rotary_embedding(state, first + torch.arange(drafter.max_lookahead, device=device))
        self_mask = torch.eye(beam_width, dtype=torch.bool, device=device).repeat_interleave(rows_per_node, 1)
        self.self_mask = self_mask.expand(batch, beam_width, beam_width * rows_per_node)
        self.ancestor_mask = self.self_mask[..., :0]

    def step(self, level: int, inputs_embeds: Tensor, hidden_states: Tensor) -> Tensor:
        """See `LevelExpander`; [B, W * rows_per_node, D]."""
        drafter, state, kv_cache = self.drafter, self.state, self.state.kv_cache
        self.ancestor_mask = torch.cat((self.ancestor_mask, self.self_mask), dim=-1)
        inputs = drafter.fuse(state, inputs_embeds, hidden_states)
        columns = slice((level - 1) * self.rows_per_node, level * self.rows_per_node)
        cos, sin = self.cos[:, :, columns], self.sin[:, :, columns]
        mask = torch.cat((self.context_mask, self.ancestor_mask), dim=-1)
        if self.rows_per_node > 1:
            cos, sin = (part.repeat(1, 1, inputs.shape[1] // self.rows_per_node, 1) for part in (cos, sin))
            mask = mask.repeat_interleave(self.rows_per_node, 1)
        kv_cache.begin_forward(inputs.shape[1])
        outputs: Tensor = drafter.head(inputs, cos, sin, cached_attention(kv_cache, mask[:, None]))
        kv_cache.advance(inputs.shape[1])
        return outputs

    def logits(self, level: int, hidden_states: Tensor) -> Tensor:
        """See `LevelExpander`."""
        return self.drafter.logits(self.state, hidden_states)

    def reorder(self, parent_index: Tensor) -> None:
        """See `LevelExpander`."""
        self.ancestor_mask = self.ancestor_mask.gather(1, parent_index.expand(-1, -1, self.ancestor_mask.shape[-1]))

    def close(self) -> None:
        """See `LevelExpander`."""
        self.state.kv_cache.seq_lens = self.seq_lens


class StatelessExpander:
    """Base of a `LevelExpander` that runs no further forward, so it has no cache to reorder or to restore."""

    def reorder(self, parent_index: Tensor) -> None:
        """See `LevelExpander`."""

    def close(self) -> None:
        """See `LevelExpander`."""


def expand_levels(drafter: EagleDrafter, state: EagleState, max_nodes: int, depth: int) -> DraftTree:
    """Expand level by level, then re-rank the nodes of all levels (EAGLE-2, section 4).

    Args:
        drafter: provides the expander and the log probabilities.
        state: of the call.
        max_nodes: size of the tree, the root included.
        depth: number of levels.
    """
    batch, device = len(state.last_hidden), state.last_hidden.device
    width = min(drafter.num_followed(device), state.logit_bias.shape[0])
    noise = drafter.log_noise(state, depth)
    expander = drafter.expander(state, width)

    root_noise = None if noise is None else noise[:, :1]
    log_probs = drafter.log_probs(state, expander.logits(0, expander.start), root_noise)
    beam_scores, tokens = (part[:, 0] for part in log_probs.topk(width))
    beam_scores = beam_scores - LEVEL_PENALTY
    pool = [(tokens, beam_scores, torch.full_like(tokens, -1))]
    beam = torch.arange(width, device=device).expand(batch, width)  # indices of the followed nodes in the pool
    hidden_states, pool_size = expander.start.expand(batch, width, -1), width
    for level in range(1, depth):
        outputs = expander.step(level, drafter.embed(state, tokens).to(hidden_states.dtype), hidden_states)
        level_noise = None if noise is None else noise[:, level : level + 1]
        log_probs, children = drafter.log_probs(state, expander.logits(level, outputs), level_noise).topk(width)
        scores, children = (beam_scores[..., None] + log_probs).flatten(1) - LEVEL_PENALTY, children.flatten(1)
        pool.append((children, scores, beam.repeat_interleave(width, dim=1)))
        if level < depth - 1:
            beam_scores, chosen = scores.topk(width)
            tokens, parent_index = children.gather(1, chosen), (chosen // width)[..., None]
            beam, pool_size = pool_size + chosen, pool_size + width * width
            hidden_states = outputs.gather(1, parent_index.expand(-1, -1, outputs.shape[-1]))
            expander.reorder(parent_index)
    expander.close()
    tokens, scores, parents = (torch.cat(parts, dim=1) for parts in zip(*pool, strict=True))
    return select_nodes(state.draft_ids, tokens, scores, parents, num_nodes=max_nodes)


def select_last(outputs: Tensor, counts: Sequence[int], previous: Tensor) -> Tensor:
    """Output at the last valid position of each row.

    Args:
        outputs: [B, n, D].
        counts: number of valid positions of each row.
        previous: [B, D] returned for rows without a valid position.

    Returns:
        [B, D].
    """
    if min(counts) == max(counts):
        return outputs[:, counts[0] - 1]
    index = torch.tensor([max(0, count - 1) for count in counts], device=outputs.device)
    last = outputs.gather(1, index[:, None, None].expand(-1, 1, outputs.shape[-1]))[:, 0]
    has_output = torch.tensor([count > 0 for count in counts], device=outputs.device)
    return torch.where(has_output[:, None], last, previous)


def cached_attention(kv_cache: RaggedKVCache, mask: Tensor | None) -> AttentionFn:
    """Attention over the cache and the new rows, which are appended to it.

    Args:
        kv_cache: a cache of one layer, after `begin_forward`.
        mask: [B, 1, n, keys] bool, True where a query attends; None for all keys.
    """

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        is_gqa = queries.shape[1] != keys.shape[1]
        keys, values = kv_cache.write(0, keys, values)
        return functional.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=is_gqa)

    return attend


__all__ = [
    "AutoregressiveExpander",
    "LevelExpander",
    "StatelessExpander",
    "cached_attention",
    "expand_levels",
    "select_last",
]
