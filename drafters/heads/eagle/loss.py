"""Loss of heads that predict one token per forward (EAGLE, MSD, EAGLE-3), over a rollout on their own outputs."""

from __future__ import annotations

from mmspec.drafters.training.batch import PackedQueries
from mmspec.drafters.training.losses import LossAndMetrics, LossInputs, RolloutCache, rollout_loss


def eagle_loss(given: LossInputs) -> LossAndMetrics:
    """The loss of a head that predicts one token per forward (EAGLE, MSD, EAGLE-3).

    Returns:
        The loss, a scalar, and the metrics of `LossAccumulator`.
    """
    head = given.draft_model.head
    cache = RolloutCache(head, PackedQueries(given.aligned()))
    return rollout_loss(given, cache, has_own_lm_head=bool(head.config.draft_vocab_size))
