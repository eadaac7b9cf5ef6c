"""`WeightTrainer`: the copy of a drafter's weights that is trained, and its optimiser. Knows no calls and no clock."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmspec.interfaces import Examples, LearnableDrafter, SharedEmbeddings

LEARNING_RATE = 5e-4
AVERAGE_DECAY = 0.95
"""Weight of the past in the running mean of the weights, which is what drafts."""
MAX_GRAD_NORM = 1.0
MAX_FIT_FACTOR = 8
"""The fit in closed form ends at this many times the examples of its first solution."""


class WeightTrainer:
    """Fits and trains one copy of the weights of a drafter.

    Attributes:
        fit: the fit in closed form that comes before the first step; None after it.
        num_steps: optimiser steps so far.
    """

    def __init__(self, drafter: LearnableDrafter, shared_embeddings: SharedEmbeddings, *, with_fit: bool) -> None:
        self.drafter = drafter
        self.shared_embeddings = shared_embeddings
        self.module = drafter.learnable_copy()
        self.num_steps = 0
        self.fit = drafter.closed_form(self.module) if with_fit else None
        self._next_solution = self._last_solution = 0
        self._optimizer: torch.optim.AdamW | None = None
        self._average: dict[str, Tensor] = {}

    @property
    def is_solution_due(self) -> bool:
        """Whether the sums of the fit hold so many more examples that it is worth solving again."""
        fit = self.fit
        return fit is not None and fit.is_determined and fit.num_examples >= self._next_solution

    def add_to_fit(self, examples: Examples) -> None:
        """Add the examples of one call to the sums of the fit."""
        assert self.fit is not None
        self.fit.add(examples.to(self._device), self.shared_embeddings)

    def solve(self) -> bool:
        """Write the fit into the weights; after the last time the fit is dropped. False if there is no finite one."""
        fit = self.fit
        assert fit is not None
        is_solved = fit.solve()
        if not self._next_solution:
            self._last_solution = MAX_FIT_FACTOR * fit.num_examples
        self._next_solution = min(2 * fit.num_examples, self._last_solution)
        if fit.num_examples >= self._last_solution:
            self.fit = None
        return is_solved

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
