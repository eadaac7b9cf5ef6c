"""Distribution of the next token as a drafter should rank it: under the noise with which the target is sampled."""

from __future__ import annotations

from torch import Tensor


def next_log_probs(logits: Tensor, temperature: float | Tensor, log_noise: Tensor | None) -> Tensor:
    """[..., V] log probability of each next token: of the argmax, or of the sample under the given noise.

    Args:
        logits: [..., V] float32.
        temperature: of the sampling, a number or a scalar tensor.
        log_noise: [..., V] logarithm of the exponential noise; None for greedy decoding.
    """
    if log_noise is None:
        return logits.log_softmax(-1)
    return ((logits / temperature).log_softmax(-1) - log_noise).log_softmax(-1)
