"""`WeightTrainer`: the copy of a drafter's weights that is trained, and its optimiser. Knows no calls and no clock."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mmspec.interfaces import SharedEmbeddings
from mmspec.learning.protocols import GradientDrafter, LearningExample

LEARNING_RATE = 5e-4
AVERAGE_DECAY = 0.95
"""Weight of the past in the running mean of the weights, which is what drafts."""
MAX_GRAD_NORM = 1.0


class WeightTrainer:
    """Trains one copy of the weights of a drafter.

    Attributes:
        num_steps: optimiser steps so far.
        num_bad_steps: how many of the last batches in a row gave a loss or a gradient that was not finite.
    """

    def __init__(self, drafter: GradientDrafter, shared_embeddings: SharedEmbeddings) -> None:
        self.drafter = drafter
        self.shared_embeddings = shared_embeddings
        self.module = drafter.learnable_copy()
        self.num_steps = self.num_bad_steps = 0
        self._rng = torch.Generator().manual_seed(0)
        self._weights = dict(self.module.named_parameters())
        self._optimizer = torch.optim.AdamW(
            self._weights.values(), LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0, fused=True
        )
        self._average = {name: value.detach().clone() for name, value in self._weights.items()}

    def step(self, examples: Sequence[LearningExample]) -> float | None:
        """One optimiser step on a batch. Returns the loss; None, without a step, if it or a gradient is not finite, or
        if nothing can be learned from texts so short."""
        device = next(iter(self._weights.values())).device
        batch = [example.to(device) for example in examples]
        loss = self.drafter.learning_loss(self.module, batch, self.shared_embeddings, self._rng)
        if not loss.requires_grad:
            return None
        # Not `backward`, which would add to the gradients of the user's model.
        gradients = torch.autograd.grad(loss, list(self._weights.values()), allow_unused=True)
        for weight, gradient in zip(self._weights.values(), gradients, strict=True):
            weight.grad = gradient
        norm = nn.utils.clip_grad_norm_(self._weights.values(), MAX_GRAD_NORM)
        if not bool(torch.isfinite(norm)):
            self.num_bad_steps += 1
            return None
        self.num_bad_steps = 0
        self._optimizer.step()
        self.num_steps += 1
        decay = min(AVERAGE_DECAY, self.num_steps / (self.num_steps + 9))
        with torch.no_grad():
            torch._foreach_lerp_(list(self._average.values()), list(self._weights.values()), 1 - decay)
        return float(loss.detach())

    def weights(self) -> dict[str, Tensor]:
        """The weights to draft with, never written to."""
        return {name: value.clone() for name, value in self._average.items()}
