"""Losses between the target's and a head's next-token distributions, one value per position.

`ce` and `kl` fit the whole distribution (their gradients are equal). The others follow what verification rewards: a
draft token is accepted with probability sum over v of min(p(v), q(v)), the overlap of the target's distribution p and
the head's q (Leviathan et al., arXiv 2211.17192).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MIX_DECAY = 3.0
"""How fast `lk-mix` moves from the divergence to the overlap as the overlap grows (eta of LK losses)."""
MIN_OVERLAP = 1e-6


def overlap(logits: Tensor, target_logits: Tensor) -> Tensor:
    """[n] probability that a token drawn from the head's distribution [n, V] is accepted."""
    return torch.minimum(logits.softmax(-1), target_logits.softmax(-1)).sum(-1)


def soft_cross_entropy(logits: Tensor, target_logits: Tensor) -> Tensor:
    """[n] cross-entropy against the target's distribution; logits [n, V]."""
    return -(target_logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def kl_divergence(logits: Tensor, target_logits: Tensor) -> Tensor:
    """[n] forward Kullback-Leibler divergence KL(p || q); logits [n, V]."""
    target_log_probs = target_logits.log_softmax(-1)
    return (target_log_probs.exp() * (target_log_probs - logits.log_softmax(-1))).sum(-1)


def total_variation(logits: Tensor, target_logits: Tensor) -> Tensor:
    """[n] total variation, the probability of a rejection; logits [n, V]."""
    return 1 - overlap(logits, target_logits)


def negative_log_overlap(logits: Tensor, target_logits: Tensor) -> Tensor:
    """[n] minus log of the acceptance probability (LK losses, arXiv 2602.23881); logits [n, V]."""
    return -overlap(logits, target_logits).clamp(min=MIN_OVERLAP).log()


def divergence_then_overlap(logits: Tensor, target_logits: Tensor) -> Tensor:
    """[n] divergence where the overlap is small, total variation where it is large (LK losses); logits [n, V].

    The overlap has hardly a gradient where the distributions do not meet, which the divergence has.
    """
    distance = total_variation(logits, target_logits)
    share = torch.exp(-MIX_DECAY * (1 - distance.detach()))
    return share * kl_divergence(logits, target_logits) + (1 - share) * distance


DISTRIBUTION_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ce": soft_cross_entropy,
    "kl": kl_divergence,
    "tv": total_variation,
    "lk": negative_log_overlap,
    "lk-mix": divergence_then_overlap,
    "path": negative_log_overlap,
}
"""By the names of `mmspec train --loss`. `path` is `lk` with each position weighted by the probability that the draft
tokens before it are accepted: acceptance of the sequence instead of the token, the aim of VSD (arXiv 2602.05774),
without its sampling of draft paths."""
