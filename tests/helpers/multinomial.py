"""What transformers samples at each step of a call, for tests of the noise."""

from __future__ import annotations

import torch
from torch import Tensor


def step_probs(step: int, batch: int, vocab: int) -> Tensor:
    """[B, V] probabilities of a step, some of them zero; not drawn from the default generator."""
    scores = torch.randn(batch, vocab, generator=torch.Generator().manual_seed(step))
    scores[scores < -1] = -torch.inf
    scores[:, step % vocab] = 1.0
    return (scores * 3).softmax(-1)


def sample_plain(num_steps: int, batch: int, vocab: int, seed: int) -> tuple[list[list[int]], list[Tensor]]:
    """What transformers samples, step by step, and the generator's state after each."""
    torch.manual_seed(seed)
    tokens, states = [], []
    for step in range(num_steps):
        tokens.append(torch.multinomial(step_probs(step, batch, vocab), 1).squeeze(1).tolist())
        states.append(torch.get_rng_state())
    return tokens, states
