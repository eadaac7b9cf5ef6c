"""Loss of a `DsparkHead`: blocks from random positions of the response, all slots in one forward.

A block begins with the token at an anchor; its positions see the context before it and each other. The label of slot i
is the target's hidden state at the block's position i, which scores the token after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mmspec.drafters.heads.base.markov import project_vocabulary
from mmspec.drafters.heads.dspark.head import DsparkHead
from mmspec.drafters.training.batch import HeadInputsAndLabels, Labels, PackedQueries, shift
from mmspec.drafters.training.losses import LossAndMetrics, LossInputs

MAX_ANCHORS = 48
"""Blocks per sequence and step."""


@dataclass(frozen=True)
class BlockBatch:
    """Blocks of a batch.

    Attributes:
        packed: the anchors.
        features: [B, m, k, D] of the positions that predict, of the blocks of m anchors per row.
    """

    packed: PackedQueries
    features: Tensor

    @classmethod
    def sample(cls, given: LossInputs) -> BlockBatch:
        """Blocks at random anchors."""
        data = given.aligned()
        packed = PackedQueries(data, _sample_anchors(data.loss_mask, given.progress.rng))
        return cls(packed, _block_features(given.draft_model.head, data, packed))

    def slots(self) -> Iterator[tuple[int, Tensor, Tensor, Labels]]:
        """Slot, mask [B, m] of the anchors that have its label, and there the features [n, D] and labels."""
        for slot in range(self.features.shape[2]):
            mask = self.packed.loss_mask_at(slot)
            yield slot, mask, self.features[:, :, slot][mask], self.packed.labels(slot, mask)

    def at(self, part: Tensor, slot: int, mask: Tensor) -> Tensor:
        """[n, ...] of parts [B, L, ...] of the batch: `slot` positions behind the anchors of the mask."""
        return self.packed.gather(shift(part, slot))[mask]


def dspark_loss(given: LossInputs) -> LossAndMetrics:
    """Results as those of `eagle_loss`; `ttt_steps` is not used. Adds the loss of the confidence head."""
    head, blocks = given.draft_model.head, BlockBatch.sample(given)
    data, ids = blocks.packed.data, None if head.lm_head is not None else given.draft_model.draft_ids
    loss = given.accumulator(data, head.lm_head is not None)
    for slot, mask, outputs, labels in blocks.slots():
        bias, confidence = None, None
        if head.bigram_head is not None:
            token_features = head.bigram_head.project(blocks.at(data.next_embeds, slot, mask))
            bias = project_vocabulary(head.bigram_head.vocab_proj, token_features.to(outputs.dtype), ids)
            if head.confidence_head is not None:
                confidence = head.confidence(outputs, token_features.to(outputs.dtype))
        loss.add(slot, outputs, labels, bias, mask=mask, confidence=confidence)
    return loss.result()


def _sample_anchors(loss_mask: Tensor, rng: torch.Generator) -> Tensor:
    """[B, n] bool, at most `MAX_ANCHORS` of the positions [B, n] of each row."""
    draw = torch.rand(loss_mask.shape, generator=rng).to(loss_mask.device).masked_fill(~loss_mask, -1.0)
    last = draw.topk(min(MAX_ANCHORS, draw.shape[1]), dim=1).values[:, -1:]
    return loss_mask & (draw >= last)


def _block_features(head: DsparkHead, data: HeadInputsAndLabels, packed: PackedQueries) -> Tensor:
    """`BlockBatch.features`."""
    k = head.config.block_positions
    inputs = head.block_inputs(packed.gather(data.next_embeds).to(data.inputs.dtype), k)
    position_ids = packed.gather(data.position_ids)[..., None] + 1 + torch.arange(k, device=inputs.device)
    context_cos, context_sin = (part[:, None] for part in head.rotary_embedding(data.position_ids, inputs.dtype))
    context = head.context_keys_values(data.inputs, context_cos, context_sin)
    cos, sin = (part[:, None] for part in head.rotary_embedding(position_ids.flatten(1), inputs.dtype))
    is_context = packed.causal_mask.repeat_interleave(k, dim=1)[:, None]

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        num_groups = queries.shape[1] // keys.shape[1]
        parts = [part.repeat_interleave(num_groups, 1) for part in (*context[layer], keys, values)]
        return _attend_blocks(queries, (parts[0], parts[1]), (parts[2], parts[3]), is_context, k)

    attention = [partial(attend, layer) for layer in range(len(context))]
    features = head.forward_block(inputs.flatten(1, 2), cos, sin, attention)
    return features.unflatten(1, (-1, k))[:, :, -head.config.block_size :]


def _attend_blocks(
    queries: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], is_context: Tensor, k: int
) -> Tensor:
    """Attention of blocks of k positions to the context and to their own block.

    Args:
        queries: [B, H, m * k, d].
        context: keys and values [B, H, n, d].
        own: keys and values [B, H, m * k, d] of the blocks.
        is_context: [B, 1, m * k, n] bool, True at the context of each query.
        k: block size.

    Returns:
        [B, H, m * k, d].
    """
    scale, n = queries.shape[-1] ** -0.5, context[0].shape[2]
    context_scores = (queries @ context[0].transpose(-1, -2) * scale).masked_fill(~is_context, float("-inf"))
    own_queries, own_keys, own_values = (part.unflatten(2, (-1, k)) for part in (queries, *own))
    own_scores = (own_queries @ own_keys.transpose(-1, -2) * scale).flatten(2, 3)
    weights = torch.cat((context_scores, own_scores), dim=-1).float().softmax(-1).to(queries.dtype)
    return weights[..., :n] @ context[1] + (weights[..., n:].unflatten(2, (-1, k)) @ own_values).flatten(2, 3)
