"""`WeightTrainer`: the copy of a drafter's weights that is trained, and its optimiser. Knows no calls and no clock."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmspec.interfaces import Examples, LearnableDrafter, SharedEmbeddings

LEARNING_RATE = 5e-4
AVERAGE_DECAY = 0.95
"""Weight of the past in the running mean of the weights, which is what drafts."""
MAX_GRAD_NORM = 1.0


class WeightTrainer:
    """Trains one copy of the weights of a drafter.

    Attributes:
        num_steps: optimiser steps so far.
    """

    def __init__(self, drafter: LearnableDrafter, shared_embeddings: SharedEmbeddings) -> None:
        self.drafter = drafter
        self.shared_embeddings = shared_embeddings
        self.module = drafter.learnable_copy()
        self.num_steps = 0
        self._optimizer: torch.optim.AdamW | None = None
        self._average: dict[str, Tensor] = {}

    def step(self, examples: Examples, candidate_ids: Tensor) -> float | None:
        """One optimiser step on a batch. Returns the loss; None, without a step, if it or a gradient is not finite."""
        if self._optimizer is None:
            parameters = list(self._trained().values())
            self._optimizer = torch.optim.AdamW(parameters, LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
            self._average = {name: value.detach().clone() for name, value in self._trained().items()}
        loss = self.drafter.learning_loss(
            self.module, examples.to(self._device), self.shared_embeddings, candidate_ids.to(self._device)
        )
        self._optimizer.zero_grad(set_to_none=True)
        if not loss.requires_grad:
            return None
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self._trained().values(), MAX_GRAD_NORM)
        if not bool(torch.isfinite(norm)):
            return None
        self._optimizer.step()
        self.num_steps += 1
        decay = min(AVERAGE_DECAY, self.num_steps / (self.num_steps + 9))
        for name, value in self._trained().items():
            self._average[name].lerp_(value.detach(), 1 - decay)
        return float(loss.detach())

    def weights(self) -> dict[str, Tensor]:
        """Copies of the weights to draft with."""
        source = self._average or self._trained()
        return {name: value.detach().clone() for name, value in source.items()}

    @property
    def _device(self) -> torch.device:
        return next(iter(self._trained().values())).device

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: value for name, value in self.module.named_parameters() if value.requires_grad}


__all__ = ["WeightTrainer"]
