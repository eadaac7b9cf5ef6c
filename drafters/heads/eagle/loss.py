"""Loss of heads that predict one token per forward (EAGLE, MSD, EAGLE-3), over a rollout on their own outputs."""

from __future__ import annotations

from torch import Tensor

from mmspec.drafters.training.batch import DraftModel, PackedQueries, TrainBatch, build_inputs_and_labels, shift
from mmspec.drafters.training.losses import LossAccumulator, LossAndMetrics, LossWeights, RolloutCache, TrainProgress
from mmspec.interfaces import SharedEmbeddings


def eagle_loss(
    draft_model: DraftModel,
    batch: TrainBatch,
    shared_embeddings: SharedEmbeddings,
    placeholder: Tensor,
    weights: LossWeights,
    progress: TrainProgress,
) -> LossAndMetrics:
    """The loss of a head that predicts one token per forward (EAGLE, MSD, EAGLE-3).

    Args:
        draft_model: head, visual mode and compressor.
        batch: hidden states of the target.
        shared_embeddings: of the target.
        placeholder: [D] embedding of the media placeholder id.
        weights: of the parts of the loss.
        progress: of the run.

    Returns:
        The loss, a scalar, and the metrics of `LossAccumulator`.
    """
    head, data = draft_model.head, build_inputs_and_labels(draft_model, batch, placeholder, progress.rng)
    packed = PackedQueries(data)
    has_own_lm_head = bool(head.config.draft_vocab_size)
    loss = LossAccumulator(shared_embeddings, weights, data.compressor_loss, draft_model if has_own_lm_head else None)
    cache, inputs = RolloutCache(head, packed), data.inputs
    for ttt_step in range(weights.ttt_steps):
        outputs = cache.forward(inputs, data.position_ids + ttt_step)
        mask = packed.loss_mask_at(ttt_step)
        labels = packed.gather(shift(data.target_hidden, ttt_step))[mask]
        loss.add(ttt_step, outputs[mask], labels, mask=mask)
        if ttt_step + 1 < weights.ttt_steps:
            inputs = head.fuse(packed.gather(shift(data.next_embeds, ttt_step + 1)), outputs)
    return loss.result()
