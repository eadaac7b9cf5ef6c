"""The losses of heads that say several tokens a pass: FLASH, parallel, Falcon. Knows tensors only.

All sum what a head of one token is taught (`training_losses.Sum`) over the places of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.drafters.block.falcon import FalconHead
from mmspec.drafters.training.losses import (
    PackedQueries,
    TrainBatch,
    RolloutCache,
    DraftModel,
    DraftTargets,
    LossAccumulator,
    LossWeights,
    Progress,
    shifted_loss_mask,
    build_targets,
    shift,
)
from mmspec.interfaces import SharedEmbeddings

LossAndMetrics = tuple[Tensor, dict[str, float]]


def flash_loss(
    draft_model: DraftModel,
    batch: TrainBatch,
    shared_embeddings: SharedEmbeddings,
    placeholder: Tensor,
    weights: LossWeights,
    progress: Progress,
) -> LossAndMetrics:
    """Every slot says the state as many places on (FLASH, section 3.3); a chain adds to its scores what the word does
    that the target said before it."""
    head, data = draft_model.head, build_targets(draft_model, batch, placeholder)
    asked, told = PackedQueries(data), LossAccumulator(shared_embeddings, weights, data.compressor_loss)
    features = head.block(RolloutCache(head, asked).forward(data.inputs, data.position_ids))
    for slot in range(head.config.block):
        learn, added = asked.loss_mask(slot), None
        said = features[:, :, slot][learn]
        if slot and head.chain is not None:
            added = head.chain(said, asked.gather(shift(data.next_embeds, slot))[learn].to(said.dtype))
        told.add(slot, said, asked.gather(shift(data.target_hidden, slot))[learn], added)
    return told.result()


def parallel_loss(
    draft_model: DraftModel,
    batch: TrainBatch,
    shared_embeddings: SharedEmbeddings,
    placeholder: Tensor,
    weights: LossWeights,
    progress: Progress,
) -> LossAndMetrics:
    """Behind every row its own learned rows, which see the text up to it and each other (ParallelSpec, section 3)."""
    head, data = draft_model.head, build_targets(draft_model, batch, placeholder)
    asked, told = PackedQueries(data), LossAccumulator(shared_embeddings, weights, data.compressor_loss)
    memory, rows = RolloutCache(head, asked), data.inputs
    for slot in range(head.config.block):
        out = memory.forward(rows, data.position_ids + slot)
        if slot and head.link is not None:
            out = head.link(out, asked.gather(shift(data.next_embeds, slot)).to(out.dtype))
        learn = asked.loss_mask(slot)
        told.add(slot, out[learn], asked.gather(shift(data.target_hidden, slot))[learn])
        if slot + 1 < head.config.block:
            rows = head.slots[slot].to(data.inputs.dtype).expand_as(out)
    return told.result()


GLANCE_RATIO = 0.4
"""Share of the wrong rows that are shown the answer when the training begins; it falls evenly to none."""


def falcon_loss(
    draft_model: DraftModel,
    batch: TrainBatch,
    shared_embeddings: SharedEmbeddings,
    placeholder: Tensor,
    weights: LossWeights,
    progress: Progress,
) -> LossAndMetrics:
    """Coupled sequential glancing distillation (Falcon, section 3.2).

    A first look finds how many rows are wrong; as many, times a share that falls over the training, are shown their own
    answer, so that the others of their block learn with it. Then blocks are drafted behind blocks, as in a tree.
    """
    head, data, k = draft_model.head, build_targets(draft_model, batch, placeholder), draft_model.head.config.block
    n = data.inputs.shape[1]
    start = int(torch.randint(k, (), generator=progress.rng))
    block = (torch.arange(n, device=data.inputs.device) + start) // k
    shown = torch.zeros_like(data.loss_mask)
    if (share := GLANCE_RATIO * (1 - progress.fraction)) > 0:
        with torch.no_grad():
            out = _BlockCache(head, data, block).forward(data.inputs, data.position_ids)
            shown = _glance_mask(out, data, shared_embeddings, block, k, share, progress.rng)
    answers = head.fuse(shift(data.next_embeds, k), shift(data.target_hidden, k - 1))
    rows = torch.where(shown[..., None], answers, data.inputs)
    memory, told = _BlockCache(head, data, block), LossAccumulator(shared_embeddings, weights, data.compressor_loss)
    # A whole block further per step; the step after the first reads what the head said itself.
    for step in range(1 + min(1, weights.ttt_steps)):
        out = memory.forward(rows, data.position_ids + step * k)
        place = (torch.arange(n, device=block.device) + start) % k
        for slot in range(k):
            far = k - 1 + step * k
            learn = shifted_loss_mask(data, far) & ~shown & (place == slot)
            told.add(slot + step * k, out[learn], shift(data.target_hidden, far)[learn])
        rows = head.fuse(shift(data.next_embeds, (step + 1) * k), out)
    return told.result()


def _glance_mask(
    out: Tensor, data: DraftTargets, words: SharedEmbeddings, block: Tensor, k: int, share: float, rng: torch.Generator
) -> Tensor:
    """[B, n] bool, which rows are shown their answer: of blocks drawn by chance a first part, never all."""
    learn, goal = shifted_loss_mask(data, k - 1), shift(data.target_hidden, k - 1)
    wrong = (words.lm_head(out).argmax(-1) != words.lm_head(goal).argmax(-1)) & learn
    rate = share * wrong.sum(1, keepdim=True) / learn.sum(1, keepdim=True).clamp(min=1)
    blocks = int(block[-1]) + 1
    # A chosen block shows 1 to k - 1 of its rows, k / 2 in the mean.
    chance = torch.rand(len(out), blocks, generator=rng).to(out.device)
    many = torch.randint(1, k, (len(out), blocks), generator=rng).to(out.device)
    many = torch.where(chance < 2 * rate, many, 0)
    place = torch.arange(len(block), device=out.device) - torch.searchsorted(block, block)
    return learn & (place < many[:, block])


class _BlockCache(RolloutCache):
    """In step 0 a row sees all blocks up to its own; later also what its block was in the steps between. All rows are
    asked."""

    def __init__(self, head: FalconHead, data: DraftTargets, block: Tensor) -> None:
        super().__init__(head, PackedQueries(data, torch.ones_like(data.loss_mask)))
        self.context_mask, self.block_mask = block <= block[:, None], block == block[:, None]

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self._append(queries.shape[1] // keys.shape[1], keys, values)
        mask = torch.cat([self.context_mask, *[self.block_mask] * (len(self.keys) - 1)], dim=1)
        return functional.scaled_dot_product_attention(
            queries, torch.cat(self.keys, dim=2), torch.cat(self.values, dim=2), mask
        )


__all__ = ["falcon_loss", "flash_loss", "parallel_loss"]
