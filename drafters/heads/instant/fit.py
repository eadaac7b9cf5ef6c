"""The start of an `InstantHead` in closed form: ridge regression of the target's later hidden states."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mmspec.drafters.heads.instant.head import InstantHead
from mmspec.drafters.heads.instant.loss import batch_examples
from mmspec.drafters.training.batch import TrainBatch
from mmspec.interfaces import SharedEmbeddings
from mmspec.learning.protocols import Examples

RIDGE = 1e-3
"""Weight of the squared weights, as a fraction of the mean squared feature."""


MAX_FIT_EXAMPLES = 8
"""Positions for each feature, after which the fit is good enough."""


class RidgeFit:
    """Fits the map of every position so that its features are the target's hidden states there.

    Keeps sums over the examples (F x F and F x k D float32), not the examples, so every one is processed once.

    Attributes:
        num_examples: positions so far.
    """

    def __init__(self, head: InstantHead) -> None:
        config, device = head.config, head.fc.weight.device
        self.head = head
        self.num_examples = 0
        self.gram = torch.zeros(head.num_features, head.num_features, device=device)
        self.products = torch.zeros(head.num_features, config.block_size * config.hidden_size, device=device)

    @property
    def is_determined(self) -> bool:
        """Whether there are as many examples as features, so that the fit is more than an interpolation."""
        return self.num_examples >= self.head.num_features

    @torch.no_grad()
    def add(self, examples: Examples, shared_embeddings: SharedEmbeddings) -> None:
        """Add consecutive positions, in the order of the text (`Examples.next_ids`)."""
        k = self.head.config.block_size
        rows = (examples.next_ids[:, k - 1] >= 0).nonzero()[:, 0]  # the last positions of a text lack some labels
        if not len(rows):
            return
        states = examples.inputs.float()
        features = self.head.features(shared_embeddings.embed(examples.root_ids[rows]).float(), states[rows])
        labels = torch.cat([states[rows + slot + 1] - states[rows] for slot in range(k)], dim=1)
        self.gram.addmm_(features.t(), features)
        self.products.addmm_(features.t(), labels)
        self.num_examples += len(rows)

    @torch.no_grad()
    def solve(self) -> bool:
        """Write the fit into `head.block_proj`; False, and no change, if the sums are singular or not finite."""
        gram = self.gram.clone()
        gram.diagonal().add_(RIDGE * gram.diagonal().mean())
        factor, info = torch.linalg.cholesky_ex(gram)
        if bool(info):
            return False
        weight: Tensor = torch.cholesky_solve(self.products, factor).t().contiguous()
        if not bool(torch.isfinite(weight).all()):
            return False
        self.head.block_proj.weight.copy_(weight)
        return True


def fit_batches(head: InstantHead, batches: Iterable[TrainBatch], shared_embeddings: SharedEmbeddings) -> None:
    """Start a head from batches of whole sequences, as many of them as the fit needs."""
    fit = RidgeFit(head)
    for batch in batches:
        for examples in batch_examples(batch, head.config.block_size):
            fit.add(examples, shared_embeddings)
        if fit.num_examples >= MAX_FIT_EXAMPLES * head.num_features:
            break
    if fit.num_examples:
        fit.solve()
