"""Loss of a `ParallelHead`: one for each slot of the block, with `step_decay` to the power of the slot."""

from __future__ import annotations

from mmspec.drafters.training.batch import PackedQueries, shift
from mmspec.drafters.training.losses import LossAndMetrics, LossInputs, RolloutCache


def parallel_loss(given: LossInputs) -> LossAndMetrics:
    """Mask positions attend to the context up to their own position and to each other (ParallelSpec, section 3)."""
    head, data = given.draft_model.head, given.aligned()
    packed = PackedQueries(data)
    loss = given.accumulator(data)
    cache, inputs = RolloutCache(head, packed), data.inputs
    for slot in range(head.config.block_size):
        outputs = cache.forward(inputs, slot)
        if slot and head.token_correction is not None:
            embeds = packed.gather(shift(data.next_embeds, slot))
            outputs = head.token_correction(outputs, embeds.to(outputs.dtype))
        mask = packed.loss_mask_at(slot)
        loss.add(slot, outputs[mask], packed.gather(shift(data.target_hidden, slot))[mask], mask=mask)
        if slot + 1 < head.config.block_size:
            inputs = head.mask_embeddings[slot].to(data.inputs.dtype).expand_as(outputs)
    return loss.result()
