"""Growth of a draft tree level by level (EAGLE-2, arXiv 2406.16858, section 4.1).

The root is level 0; level i holds candidates for the i-th token after it. `expand_levels` chooses the nodes to expand;
a `LevelExpander` computes the distributions of their children: `AutoregressiveExpander` by one forward of the head per
level, those of block drafters without a further forward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.drafters.heads.base.attention import CachedAttention
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.rerank import LEVEL_PENALTY, NodePool
from mmspec.engine.tree import DraftTree

if TYPE_CHECKING:
    from mmspec.drafters.heads.base.drafter import HeadDrafter


class LevelExpander(ABC):
    """Computes the distributions of the children of W nodes of one level at a time.

    Attributes:
        state: of the call.
        root_hidden: [B, 1, D] the head's output at the root.
        candidates: [B, levels, C] tokens of the draft vocabulary to which the logits of each level belong; the others
            have no probability. None for all.
    """

    state: DraftState
    root_hidden: Tensor
    candidates: Tensor | None = None

    @abstractmethod
    def expand(self, level: int, inputs_embeds: Tensor, parent_hidden: Tensor) -> Tensor:
        """Hidden states of the nodes of one level: the head's output at each.

        Args:
            level: of the nodes, from 1.
            inputs_embeds: [B, W, D] embeddings of the nodes' tokens.
            parent_hidden: [B, W, D'] hidden states of the nodes' parents.

        Returns:
            [B, W, D'].
        """

    @abstractmethod
    def logits(self, level: int, hidden_states: Tensor) -> Tensor:
        """[B, W, V'], or [B, W, C], logits of the children of W nodes of this level, from their hidden states."""

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, W, D''] what `expand` takes as embeddings of tokens [B, W] of the draft vocabulary."""
        return self.state.embed(tokens)

    def calibrate(self, level: int, hidden_states: Tensor, log_probs: Tensor) -> Tensor:
        """Log probabilities of acceptance [B, W, K] from those of the best children, greedy decoding only."""
        return log_probs

    def select_parents(self, parent_index: Tensor) -> None:
        """Continue below these nodes: [B, W, 1] int64, indices into the nodes of the last `expand`.

        Keys and values stay in the order of the forwards; only the attention mask follows the chosen nodes.
        """
        return

    def close(self) -> None:
        """Restore the KV cache as it was before the draft."""
        return


def expand_levels(
    state: DraftState, expander: LevelExpander, top_k: int, *, max_nodes: int, num_levels: int
) -> DraftTree:
    """Expand the `top_k` most likely nodes of every level by `top_k` children each, then re-rank all nodes.

    Args:
        state: of the call.
        expander: of this draft, for `top_k` nodes per level.
        top_k: nodes per level that are expanded, and children of each.
        max_nodes: size of the tree, the root included.
        num_levels: levels below the root.
    """
    batch, device = len(state.last_hidden), state.last_hidden.device
    noise = state.log_noise(num_levels)

    def best_children(level: int, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """[B, W, top_k] log probabilities, given their parent, and tokens of the best children of nodes of a level."""
        level_noise = None if noise is None else noise[:, level : level + 1]
        tokens = None if expander.candidates is None else expander.candidates[:, level, None]
        if level_noise is not None and tokens is not None:
            level_noise = level_noise.gather(2, tokens)
        log_probs = state.log_probs(expander.logits(level, hidden_states), level_noise)
        if tokens is not None and (missing := top_k - log_probs.shape[-1]) > 0:
            tokens = functional.pad(tokens, (0, missing))
            log_probs = functional.pad(log_probs, (0, missing), value=-torch.inf)
        log_probs, children = log_probs.topk(top_k)
        if tokens is not None:
            children = tokens.expand(-1, children.shape[1], -1).gather(2, children)
        return log_probs if noise is not None else expander.calibrate(level, hidden_states, log_probs), children

    log_probs, tokens = (part[:, 0] for part in best_children(0, expander.root_hidden))
    path_log_probs = log_probs - LEVEL_PENALTY
    pool = NodePool()
    pool.add(tokens, path_log_probs, torch.full_like(tokens, -1))
    # The nodes to expand: pool index, token, log probability of the path from the root, hidden state of the parent.
    pool_index = torch.arange(top_k, device=device).expand(batch, top_k)
    parent_hidden = expander.root_hidden.expand(batch, top_k, -1)
    for level in range(1, num_levels):
        embeds = expander.embed(tokens).to(parent_hidden.dtype)
        hidden_states = expander.expand(level, embeds, parent_hidden)
        log_probs, children = best_children(level, hidden_states)
        child_log_probs = (path_log_probs[..., None] + log_probs).flatten(1) - LEVEL_PENALTY
        children, first_child = children.flatten(1), pool.num_nodes
        pool.add(children, child_log_probs, pool_index.repeat_interleave(top_k, dim=1))
        if level == num_levels - 1:
            break
        path_log_probs, chosen = child_log_probs.topk(top_k)
        tokens, pool_index = children.gather(1, chosen), first_child + chosen
        parent_index = (chosen // top_k)[..., None]
        parent_hidden = hidden_states.gather(1, parent_index.expand(-1, -1, hidden_states.shape[-1]))
        expander.select_parents(parent_index)
    expander.close()
    return pool.select(state.draft_ids, max_nodes)


class AutoregressiveExpander(LevelExpander):
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
        self.root_hidden = state.last_hidden[:, None]
        # All trees start behind the longest row, so that one slice of the cache covers them; the gaps are masked.
        self.lengths, self.seq_lens = kv_cache.lengths_on(device), kv_cache.seq_lens
        first = state.first_positions()
        kv_cache.seq_lens = [max(self.seq_lens)] * batch
        is_context = torch.arange(max(self.seq_lens), device=device) < self.lengths[:, None]
        self.context_mask = is_context[:, None].expand(batch, num_nodes, -1)
        # All nodes of a level have the same position ids.
        self.cos, self.sin = drafter.rotary_embedding(state, first + torch.arange(drafter.max_depth, device=device))
        self_mask = torch.eye(num_nodes, dtype=torch.bool, device=device).repeat_interleave(positions_per_node, 1)
        self.self_mask = self_mask.expand(batch, num_nodes, num_nodes * positions_per_node)
        self.ancestor_mask = self.self_mask[..., :0]  # [B, W, drafted keys], True at a node's ancestors and itself

    def expand(self, level: int, inputs_embeds: Tensor, parent_hidden: Tensor) -> Tensor:
        """See `LevelExpander`; all [B, W * positions_per_node, D]."""
        drafter, kv_cache, k = self.drafter, self.state.kv_cache, self.positions_per_node
        self.ancestor_mask = torch.cat((self.ancestor_mask, self.self_mask), dim=-1)
        inputs = drafter.fuse(self.state, inputs_embeds, drafter.head.carried(parent_hidden))
        offsets = slice((level - 1) * k, level * k)
        cos, sin = self.cos[:, :, offsets], self.sin[:, :, offsets]
        mask = torch.cat((self.context_mask, self.ancestor_mask), dim=-1)
        if k > 1:
            cos, sin = (part.repeat(1, 1, inputs.shape[1] // k, 1) for part in (cos, sin))
            mask = mask.repeat_interleave(k, 1)
        kv_cache.begin_forward(inputs.shape[1])
        hidden_states: Tensor = drafter.head(inputs, cos, sin, self.attention(level, mask[:, None]))
        kv_cache.advance(inputs.shape[1])
        return hidden_states

    def attention(self, level: int, mask: Tensor) -> CachedAttention:
        """Attention of the nodes of a level with the mask [B, 1, W, keys]."""
        return CachedAttention(self.state.kv_cache, mask)

    def logits(self, level: int, hidden_states: Tensor) -> Tensor:
        return self.drafter.logits(self.state, hidden_states)

    def select_parents(self, parent_index: Tensor) -> None:
        self.ancestor_mask = self.ancestor_mask.gather(1, parent_index.expand(-1, -1, self.ancestor_mask.shape[-1]))

    def close(self) -> None:
        self.state.kv_cache.seq_lens = self.seq_lens


class PairExpander(LevelExpander):
    """A `LevelExpander` over scores of pairs: of the candidates of each position behind those of the position before.

    The hidden state of a node is its place among the candidates of its position.

    Attributes:
        pair_scores: [B, k, C, C] float32, in each row the scores behind one candidate; rows of the first position are
            alike.
    """

    def __init__(self, state: DraftState, candidates: Tensor, pair_scores: Tensor) -> None:
        self.state = state
        self.candidates: Tensor = candidates
        self.pair_scores = pair_scores
        self.root_hidden = pair_scores.new_zeros(len(candidates), 1, 1)

    def embed(self, tokens: Tensor) -> Tensor:
        """See `LevelExpander`; [B, W, 1] the tokens themselves, as float32, which has all integers up to 2^24."""
        return tokens[..., None].float()

    def expand(self, level: int, inputs_embeds: Tensor, parent_hidden: Tensor) -> Tensor:
        """See `LevelExpander`; [B, W, 1]."""
        is_token = self.candidates[:, level - 1, None] == inputs_embeds
        return is_token.float().argmax(-1, keepdim=True).float()

    def logits(self, level: int, hidden_states: Tensor) -> Tensor:
        rows = hidden_states.long().expand(-1, -1, self.candidates.shape[-1])
        return self.pair_scores[:, level].gather(1, rows)
