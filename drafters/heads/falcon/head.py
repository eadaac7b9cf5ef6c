"""Falcon (arXiv 2412.12639): k tokens from every forward, and several forwards, each over the blocks of the last one.

Positions are grouped in blocks of k; a position attends to its whole block and to all blocks before it, and predicts
the token k positions ahead. The last block ends where the context ends, so it is always full. `fc` joins embedding and
hidden state as in EAGLE, in place of the paper's LSTM, whose released code carries no state between positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.drafters.heads.base.attention import CachedAttention
from mmspec.drafters.heads.base.block import BlockDrafter
from mmspec.drafters.heads.base.block_tree import path_table
from mmspec.drafters.heads.base.expand import AutoregressiveExpander
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.heads.eagle.head import EagleConfig, EagleHead
from mmspec.drafters.rerank import NodePool
from mmspec.drafters.training.batch import HeadInputsAndLabels, PackedQueries, shift
from mmspec.drafters.training.losses import LossAndMetrics, LossInputs, RolloutCache
from mmspec.engine.gather import gather_rows
from mmspec.engine.host_copy import from_host
from mmspec.engine.tree import DraftTree


class FalconHead(EagleHead):
    """EAGLE's head; `block_size` is how many positions ahead each of its outputs predicts."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        if config.block_size < 2:
            raise ValueError(f"a Falcon head needs block_size of at least 2; got {config.block_size}.")


class FalconDrafter(BlockDrafter):
    """Drafts with a `FalconHead`: up to `max_forwards` blocks, of each of which `top_k` paths are continued.

    A level is a block, which takes one forward. The layer's keys and values depend
    on its inputs only, so when the block boundaries move, the positions of the last block only need new queries.
    `DraftState.carry` is [B, 2 k - 1, D]: the outputs at the last k positions, then the last k - 1 inputs.
    """

    head: FalconHead
    records_drafts = True

    def __init__(
        self, head: FalconHead, visual_mode: str = "decoupled", *, max_forwards: int = 3, **options: Any
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

    def extend_prompt(self, state: DraftState, inputs: Tensor, position_ids: Tensor, counts: list[int]) -> None:
        self._extend(state, inputs, position_ids, counts, is_prompt=True)

    def extend_rows(
        self, state: DraftState, inputs: Tensor, position_ids: Tensor, counts: Sequence[int] | Tensor
    ) -> None:
        self._extend(state, inputs, position_ids, counts, is_prompt=False)

    def _extend(
        self, state: DraftState, inputs: Tensor, position_ids: Tensor, counts: Sequence[int] | Tensor, is_prompt: bool
    ) -> None:
        """Append the inputs to the cache, and compute the outputs of the last block; of a prompt those only."""
        kv_cache, k, (batch, n, hidden), device = state.kv_cache, self.block_size, inputs.shape, inputs.device
        previous = inputs.new_zeros(batch, k - 1, hidden) if state.carry is None else state.carry[:, k:]
        seq_lens = kv_cache.lengths_on(device)[:, None]
        num_new = (counts if isinstance(counts, Tensor) else from_host(counts, device))[:, None]
        inputs = torch.cat((previous, inputs), dim=1)
        kv_cache.begin_forward(n)
        # Position ids of the previous inputs: consecutive, as they are at the end of every prompt.
        previous_ids = (torch.arange(1 - k, 0, device=device) + state.first_positions()).clamp(min=0)
        cos, sin = self.rotary_embedding(state, torch.cat((previous_ids, position_ids), dim=1))
        mask = torch.arange(kv_cache.kv_len, device=device) < (seq_lens + num_new)[..., None]
        last_block = (num_new - 1).clamp(min=0) + torch.arange(k, device=device)
        attend = CachedAttention(kv_cache, mask[:, None], num_cached=k - 1)
        outputs = self.head(inputs, cos, sin, attend, last_block if is_prompt else None)
        outputs = outputs if is_prompt else gather_rows(outputs, last_block)
        block = torch.cat((outputs, gather_rows(inputs, last_block)[:, 1:]), dim=1)
        state.carry = block if state.carry is None else torch.where(num_new[..., None] == 0, state.carry, block)
        state.last_hidden = state.carry[:, k - 1]

    def block_features(self, state: DraftState) -> Tensor:
        """Outputs of the last block."""
        assert state.carry is not None
        return state.carry[:, : self.block_size]

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
        table = path_table(k, max_nodes - 1, len(state.logit_bias), device)
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


GLANCE_RATIO = 0.4
"""Share of the wrong positions whose inputs are replaced at the start of training; it decreases linearly to 0."""


def falcon_loss(given: LossInputs) -> LossAndMetrics:
    """Coupled sequential glancing distillation (Falcon, section 3.2).

    A first forward counts the positions whose prediction is wrong. A decreasing share of that number of positions
    receive their own label as input, so that the others of their block learn with it. Then blocks are drafted behind
    blocks, as in a tree; at most two, of the `ttt_steps`.
    """
    head, data = given.draft_model.head, given.aligned()
    k, n, device = head.config.block_size, data.inputs.shape[1], data.inputs.device
    start = int(torch.randint(k, (), generator=given.progress.rng))
    offset = torch.arange(n, device=device) + start
    block = offset // k
    glanced = torch.zeros_like(data.loss_mask)
    if (share := GLANCE_RATIO * (1 - given.progress.fraction)) > 0:
        with torch.no_grad():
            outputs = _BlockCache(head, data, block).forward(data.inputs)
            glanced = _glance_mask(outputs, data, given, block, k, share)
    label_inputs = head.fuse(shift(data.next_embeds, k), shift(data.target_hidden, k - 1))
    inputs = torch.where(glanced[..., None], label_inputs, data.inputs)
    cache = _BlockCache(head, data, block)
    loss = given.accumulator(data)
    # Each `ttt_step` is a whole block further on; those after the first read the head's own outputs.
    for ttt_step in range(min(2, given.weights.ttt_steps)):
        outputs = cache.forward(inputs, ttt_step * k)
        for slot in range(k):
            distance = k - 1 + ttt_step * k
            mask = data.loss_mask_at(distance) & ~glanced & (offset % k == slot)
            loss.add(slot + ttt_step * k, outputs[mask], cache.packed.labels(distance, mask))
        inputs = head.fuse(shift(data.next_embeds, (ttt_step + 1) * k), outputs)
    return loss.result()


def _glance_mask(
    outputs: Tensor, data: HeadInputsAndLabels, given: LossInputs, block: Tensor, k: int, share: float
) -> Tensor:
    """[B, n] bool, positions that receive their label: a first part, never all, of randomly chosen blocks.

    Args:
        outputs: [B, n, D] of a first forward.
        data: of the batch.
        given: of the loss.
        block: [n] int64 block of each position.
        k: block size.
        share: of the wrong positions.
    """
    mask, target_hidden = data.loss_mask_at(k - 1), shift(data.target_hidden, k - 1)
    logits_of, ids, rng = given.shared_embeddings.logits_of, given.draft_model.draft_ids, given.progress.rng
    predicted, labels = (logits_of(states, ids).argmax(-1) for states in (outputs, target_hidden))
    is_wrong = (predicted != labels) & mask
    rate = share * is_wrong.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    num_blocks = int(block[-1]) + 1
    # A chosen block gives away 1 to k - 1 of its positions, k / 2 in the mean.
    draw = torch.rand(len(outputs), num_blocks, generator=rng).to(outputs.device)
    num_glanced = torch.randint(1, k, (len(outputs), num_blocks), generator=rng).to(outputs.device)
    num_glanced = torch.where(draw < 2 * rate, num_glanced, 0)
    slot = torch.arange(len(block), device=outputs.device) - torch.searchsorted(block, block)
    return mask & (slot < num_glanced[:, block])


class _BlockCache(RolloutCache):
    """In `ttt_step` 0 a position attends to all blocks up to its own, later also to its block in the steps in between.

    All positions are queries.
    """

    def __init__(self, head: FalconHead, data: HeadInputsAndLabels, block: Tensor) -> None:
        super().__init__(head, PackedQueries(data, torch.ones_like(data.loss_mask)))
        self.context_mask = block <= block[:, None]
        self.block_mask = block == block[:, None]

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self._append(queries.shape[1] // keys.shape[1], keys, values)
        mask = torch.cat([self.context_mask, *[self.block_mask] * (len(self.keys) - 1)], dim=1)
        return functional.scaled_dot_product_attention(
            queries, torch.cat(self.keys, dim=2), torch.cat(self.values, dim=2), mask
        )
