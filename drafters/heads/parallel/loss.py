"""Loss of a `ParallelHead`: one for each slot of the block, with `step_decay` to the power of the slot."""

from __future__ import annotations

from torch import Tensor

from mmspec.drafters.training.batch import DraftModel, PackedQueries, TrainBatch, build_inputs_and_labels, shift
from mmspec.drafters.training.losses import LossAccumulator, LossAndMetrics, LossWeights, RolloutCache, TrainProgress
from mmspec.interfaces import SharedEmbeddings


def parallel_loss(
    draft_model: DraftModel,
    batch: TrainBatch,
    shared_embeddings: SharedEmbeddings,
    placeholder: Tensor,
    weights: LossWeights,
    progress: TrainProgress,
) -> LossAndMetrics:
    """Mask positions attend to the context up to their own position and to each other (ParallelSpec, section 3)."""
    head, data = draft_model.head, build_inputs_and_labels(draft_model, batch, placeholder, progress.rng)
    packed = PackedQueries(data)
    loss = LossAccumulator(shared_embeddings, weights, data.compressor_loss)
    cache, inputs = RolloutCache(head, packed), data.inputs
    for slot in range(head.config.block_size):
        outputs = cache.forward(inputs, data.position_ids + slot)
        if slot and head.token_correction is not None:
            embeds = packed.gather(shift(data.next_embeds, slot))
            outputs = head.token_correction(outputs, embeds.to(outputs.dtype))
        mask = packed.loss_mask_at(slot)
        loss.add(slot, outputs[mask], packed.gather(shift(data.target_hidden, slot))[mask], mask=mask)
        if slot + 1 < head.config.block_size:
            inputs = head.mask_embeddings[slot].to(data.inputs.dtype).expand_as(outputs)
    return loss.result()
