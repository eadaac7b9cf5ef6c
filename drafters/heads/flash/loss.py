"""Loss of a `FlashHead`: one for each slot of the block, with `step_decay` to the power of the slot."""

from __future__ import annotations

from mmspec.drafters.training.batch import PackedQueries, shift
from mmspec.drafters.training.losses import LossAndMetrics, LossInputs, RolloutCache


def flash_loss(given: LossInputs) -> LossAndMetrics:
    """Feature i predicts the hidden state i positions further on (FLASH, section 3.3).

    The `MarkovHead` is trained with the target's token before each position.
    """
    head, data = given.draft_model.head, given.aligned()
    packed = PackedQueries(data)
    loss = given.accumulator(data)
    features = head.block_features(RolloutCache(head, packed).forward(data.inputs))
    for slot in range(head.config.block_size):
        mask, logit_bias = packed.loss_mask_at(slot), None
        outputs = features[:, :, slot][mask]
        if slot and head.markov_head is not None:
            embeds = packed.gather(shift(data.next_embeds, slot))[mask]
            logit_bias = head.markov_head(outputs, embeds.to(outputs.dtype))
        loss.add(slot, outputs, packed.gather(shift(data.target_hidden, slot))[mask], logit_bias, mask=mask)
    return loss.result()
