"""Loss of a `LilicorrHead`: that of DFlash, and of the scores of candidates behind the text's own token.

As Model-Optimizer trains it without its margin and its penalty, and with the target's distribution for the label.
Behind a token that is no candidate all scores are 0, from which nothing is learned.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.drafters.heads.dspark.loss import BlockBatch
from mmspec.drafters.training.batch import shift
from mmspec.drafters.training.losses import LossAndMetrics, LossInputs


def lilicorr_loss(given: LossInputs) -> LossAndMetrics:
    """Results as those of `dspark_loss`, without a loss on the hidden states."""
    head, blocks = given.draft_model.head, BlockBatch.sample(given)
    config, packed, data = head.config, blocks.packed, blocks.packed.data
    features, context = blocks.features.flatten(0, 1), packed.gather(data.inputs).flatten(0, 1)  # [n, k, D], [n, D]
    with torch.no_grad():
        logits = head.logits(features, given.shared_embeddings, None)[..., : config.vocab_size].float()
        log_probs, candidates = logits.log_softmax(-1).topk(min(config.candidate_topk, logits.shape[-1]))
        embeds = given.shared_embeddings.embed(candidates).to(features.dtype)
    parts: Any = head.lattice(embeds, log_probs, features, context)
    first, behind, before = (part.float() for part in parts)
    loss = given.accumulator(data, has_own_lm_head=True)
    for slot, mask, outputs, labels in blocks.slots():
        vectors = first
        if slot:
            tokens = packed.gather(shift(data.next_ids, slot)).flatten()
            vectors = ((candidates[:, slot - 1] == tokens[:, None]).float()[:, None] @ behind[:, slot - 1])[:, 0]
        scores = config.logit_scale * (before[:, slot] @ vectors[..., None])[..., 0]
        chosen = candidates[:, slot][mask.flatten()], scores[mask.flatten()]

        def choose(logits: Tensor, chosen: tuple[Tensor, Tensor] = chosen) -> tuple[Tensor, Tensor]:
            return chosen

        loss.add(slot, outputs, labels, mask=mask, choose=choose)
    return loss.result()
