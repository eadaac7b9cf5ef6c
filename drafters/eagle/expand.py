"""Growth of a draft tree level by level (EAGLE-2, arXiv 2406.16858, section 4.1).

The root is level 0; level i holds candidates for the i-th token after it. `expand_levels` chooses the nodes to expand;
a `LevelExpander` computes the distributions of their children: `AutoregressiveExpander` by one forward of the head per
level, those of block drafters without a further forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from mmspec.drafters.eagle.attention import cached_attention
from mmspec.drafters.eagle.state import DraftState
from mmspec.drafters.rerank import LEVEL_PENALTY, NodePool
from mmspec.engine.tree import DraftTree

if TYPE_CHECKING:
    from mmspec.drafters.eagle.base import HeadDrafter


class LevelExpander(Protocol):
    """Computes the distributions of the children of W nodes of one level at a time.

    Attributes:
        start: [B, 1, D] output at the root.
    """

    start: Tensor

    def expand(self, level: int, inputs_embeds: Tensor, parent_outputs: Tensor) -> Tensor:
        """Outputs at the nodes of one level.

        Args:
            level: of the nodes, from 1.
            inputs_embeds: [B, W, D] embeddings of the nodes' tokens.
            parent_outputs: [B, W, D'] outputs at the nodes' parents.

        Returns:
            [B, W, D'].
        """

    def logits(self, level: int, outputs: Tensor) -> Tensor:
        """[B, W, V'] logits of the children of W nodes, from the outputs at the nodes, which are of this level."""

    def reorder(self, parent_index: Tensor) -> None:
        """Continue below these nodes: [B, W, 1] int64, indices into the nodes of the last `expand`."""

    def close(self) -> None:
        """Restore the KV cache as it was before the draft."""


def expand_levels(state: DraftState, expander: LevelExpander, top_k: int, *, max_nodes: int, depth: int) -> DraftTree:
    """Expand the `top_k` most likely nodes of every level by `top_k` children each, then re-rank all nodes.

    Args:
        state: of the call.
        expander: of this draft, for `top_k` nodes per level.
        top_k: nodes per level that are expanded, and children of each.
        max_nodes: size of the tree, the root included.
        depth: number of levels below the root.
    """
    batch, device = len(state.last_hidden), state.last_hidden.device
    noise = state.log_noise(depth)

    def score_children(level: int, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """[B, W, top_k] log probabilities and tokens of the best children of nodes of this level."""
        level_noise = None if noise is None else noise[:, level : level + 1]
        log_probs = state.log_probs(expander.logits(level, outputs), level_noise)
        scores, tokens = log_probs.topk(top_k)
        return scores, tokens

    scores, tokens = (part[:, 0] for part in score_children(0, expander.start))
    scores = scores - LEVEL_PENALTY
    pool = NodePool()
    pool.add(tokens, scores, torch.full_like(tokens, -1))
    # The nodes to expand: pool index, token, score (log probability from the root) and output of the parent.
    pool_index = torch.arange(top_k, device=device).expand(batch, top_k)
    parent_outputs = expander.start.expand(batch, top_k, -1)
    for level in range(1, depth):
        embeds = state.embed(tokens).to(parent_outputs.dtype)
        outputs = expander.expand(level, embeds, parent_outputs)
        child_scores, children = score_children(level, outputs)
        child_scores = (scores[..., None] + child_scores).flatten(1) - LEVEL_PENALTY
        children, first_child = children.flatten(1), pool.num_nodes
        pool.add(children, child_scores, pool_index.repeat_interleave(top_k, dim=1))
        if level == depth - 1:
            break
        scores, chosen = child_scores.topk(top_k)
        tokens, pool_index = children.gather(1, chosen), first_child + chosen
        parent_index = (chosen // top_k)[..., None]
        parent_outputs = outputs.gather(1, parent_index.expand(-1, -1, outputs.shape[-1]))
        expander.reorder(parent_index)
    expander.close()
    return pool.select(state.draft_ids, max_nodes)


class AutoregressiveExpander:
    """One forward of the head per level; a node attends to the context and to its own ancestors."""

    def __init__(self, drafter: HeadDrafter, state: DraftState, num_nodes: int, positions_per_node: int = 1) -> None:
        """
        Args:
            drafter: provides the head, the rotary table and the logits.
            state: of the call.
            num_nodes: W, nodes per level.
            positions_per_node: consecutive positions that a node consists of (a block of Falcon, whose positions attend
                to each other).
        """
        kv_cache, batch, device = state.kv_cache, state.last_hidden.shape[0], state.last_hidden.device
        self.drafter = drafter
        self.state = state
        self.positions_per_node = positions_per_node
        self.start = state.last_hidden[:, None]
        # All trees start behind the longest row, so that one slice of the cache covers them; the gaps are masked.
        self.seq_lens = kv_cache.seq_lens
        kv_cache.seq_lens = [max(self.seq_lens)] * batch
        is_context = (
            torch.arange(max(self.seq_lens), device=device) < torch.tensor(self.seq_lens, device=device)[:, None]
        )
        self.context_mask = is_context[:, None].expand(batch, num_nodes, -1)
        # All nodes of a level have the same position ids.
        first = torch.tensor(state.next_positions, device=device)[:, None]
        self.cos, self.sin = drafter.rotary_embedding(state, first + torch.arange(drafter.max_lookahead, device=device))
        self_mask = torch.eye(num_nodes, dtype=torch.bool, device=device).repeat_interleave(positions_per_node, 1)
        self.self_mask = self_mask.expand(batch, num_nodes, num_nodes * positions_per_node)
        self.ancestor_mask = self.self_mask[..., :0]  # [B, W, drafted keys], True at a node's ancestors and itself

    def expand(self, level: int, inputs_embeds: Tensor, parent_outputs: Tensor) -> Tensor:
        """See `LevelExpander`; all [B, W * positions_per_node, D]."""
        drafter, kv_cache, k = self.drafter, self.state.kv_cache, self.positions_per_node
        self.ancestor_mask = torch.cat((self.ancestor_mask, self.self_mask), dim=-1)
        inputs = drafter.fuse(self.state, inputs_embeds, parent_outputs)
        offsets = slice((level - 1) * k, level * k)
        cos, sin = self.cos[:, :, offsets], self.sin[:, :, offsets]
        mask = torch.cat((self.context_mask, self.ancestor_mask), dim=-1)
        if k > 1:
            cos, sin = (part.repeat(1, 1, inputs.shape[1] // k, 1) for part in (cos, sin))
            mask = mask.repeat_interleave(k, 1)
        kv_cache.begin_forward(inputs.shape[1])
        outputs: Tensor = drafter.head(inputs, cos, sin, cached_attention(kv_cache, mask[:, None]))
        kv_cache.advance(inputs.shape[1])
        return outputs

    def logits(self, level: int, outputs: Tensor) -> Tensor:
        """See `LevelExpander`."""
        return self.drafter.logits(self.state, outputs)

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


__all__ = ["AutoregressiveExpander", "LevelExpander", "StatelessExpander", "expand_levels"]
