"""Loss of a `Dflash2Head`: that of DFlash, and of the scores of candidates behind the target's own token.

As NeMo Automodel trains it, with the target's distribution for the label: every position over the whole vocabulary, and
over its candidates alone where the target's likeliest token is among them; both have the same weight.
"""

from __future__ import annotations

from torch import Tensor

from mmspec.drafters.heads.dspark.loss import BlockBatch
from mmspec.drafters.training.losses import LossAndMetrics, LossInputs


def dflash2_loss(given: LossInputs) -> LossAndMetrics:
    """Results as those of `dspark_loss`, without a loss on the hidden states."""
    head, blocks = given.draft_model.head, BlockBatch.sample(given)
    selector, vocab_size, data = head.selector, head.config.vocab_size, blocks.packed.data
    loss = given.accumulator(data, has_own_lm_head=True)
    for slot, mask, outputs, labels in blocks.slots():
        gates, tokens = selector.hidden_projection(outputs), blocks.at(data.next_ids, slot, mask)
        before = selector.rows(tokens[:, None])

        def choose(logits: Tensor, gates: Tensor = gates, before: Tensor = before) -> tuple[Tensor, Tensor]:
            scores, candidates = selector.candidates(logits[:, :vocab_size])
            return candidates, scores + selector(gates, before, candidates)[:, 0].float()

        loss.add(slot, outputs, labels, mask=mask, choose=choose)
    return loss.result()
