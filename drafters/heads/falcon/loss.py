"""Loss of a `FalconHead`: one for each slot of a block, with `step_decay` to the power of the slot, and a rollout."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.drafters.heads.falcon.drafter import FalconHead
from mmspec.drafters.training.batch import HeadInputsAndLabels, PackedQueries, shift
from mmspec.drafters.training.losses import LossAndMetrics, LossInputs, RolloutCache
from mmspec.interfaces import SharedEmbeddings

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
            glanced = _glance_mask(outputs, data, given.shared_embeddings, block, k, share, given.progress.rng)
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
            loss.add(slot + ttt_step * k, outputs[mask], shift(data.target_hidden, distance)[mask])
        inputs = head.fuse(shift(data.next_embeds, (ttt_step + 1) * k), outputs)
    return loss.result()


def _glance_mask(
    outputs: Tensor,
    data: HeadInputsAndLabels,
    shared_embeddings: SharedEmbeddings,
    block: Tensor,
    k: int,
    share: float,
    rng: torch.Generator,
) -> Tensor:
    """[B, n] bool, positions that receive their label: a first part, never all, of randomly chosen blocks.

    Args:
        outputs: [B, n, D] of a first forward.
        data: of the batch.
        shared_embeddings: of the target.
        block: [n] int64 block of each position.
        k: block size.
        share: of the wrong positions.
        rng: random generator.
    """
    mask, target_hidden = data.loss_mask_at(k - 1), shift(data.target_hidden, k - 1)
    predicted, labels = (shared_embeddings.logits(states).argmax(-1) for states in (outputs, target_hidden))
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
