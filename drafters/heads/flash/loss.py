"""Loss of a `FlashHead`: one for each slot of the block, with `step_decay` to the power of the slot."""

from __future__ import annotations

from torch import Tensor

from mmspec.drafters.training.batch import DraftModel, PackedQueries, TrainBatch, build_inputs_and_labels, shift
from mmspec.drafters.training.losses import LossAccumulator, LossAndMetrics, LossWeights, RolloutCache, TrainProgress
from mmspec.interfaces import SharedEmbeddings


def flash_loss(
    draft_model: DraftModel,
    batch: TrainBatch,
    shared_embeddings: SharedEmbeddings,
    placeholder: Tensor,
    weights: LossWeights,
    progress: TrainProgress,
) -> LossAndMetrics:
    """Feature i predicts the hidden state i positions further on (FLASH, section 3.3).

    The `MarkovHead` is trained with the target's token before each position.
    """
    head, data = draft_model.head, build_inputs_and_labels(draft_model, batch, placeholder, progress.rng)
    packed = PackedQueries(data)
    loss = LossAccumulator(shared_embeddings, weights, data.compressor_loss)
    features = head.block_features(RolloutCache(head, packed).forward(data.inputs, data.position_ids))
    for slot in range(head.config.block_size):
        mask, logit_bias = packed.loss_mask_at(slot), None
        outputs = features[:, :, slot][mask]
        if slot and head.markov_head is not None:
            embeds = packed.gather(shift(data.next_embeds, slot))[mask]
            logit_bias = head.markov_head(outputs, embeds.to(outputs.dtype))
        loss.add(slot, outputs, packed.gather(shift(data.target_hidden, slot))[mask], logit_bias, mask=mask)
    return loss.result()
