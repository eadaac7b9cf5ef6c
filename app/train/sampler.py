"""Which requests each training step takes: every epoch takes each request once, batches of similar length."""

from __future__ import annotations

import random
from collections.abc import Mapping

LENGTH_GROUP_BATCHES = 16
"""Batches that are formed from one window of the shuffled requests, sorted by length."""


class LengthGroupedSampler:
    """Batches of requests of similar length, since a batch is as long as its longest sequence.

    The batch of a step depends on the step and the seed alone, so an interrupted run resumes with the same batches.
    """

    def __init__(self, count: int, batch: int, seed: int, lengths: Mapping[int, int] | None = None) -> None:
        """
        Args:
            count: number of requests.
            batch: requests per step.
            lengths: {request index: tokens}; 0 where unknown. Held by reference: the lengths come with the answers,
                which may be generated after this.
        """
        self.count, self.batch, self.seed = count, batch, seed
        self.lengths: Mapping[int, int] = {} if lengths is None else lengths
        self._epochs: dict[int, list[int]] = {}

    def batch_indices(self, step: int, with_images: float = 1.0) -> list[int]:
        """[batch] request indices of a step.

        Args:
            with_images: share of the requests that keep their images; the others are their questions as
                text alone (`Requests.also_text`, index + count).
        """
        indices = []
        for position in range(step * self.batch, (step + 1) * self.batch):
            epoch, offset = divmod(position, self.count)
            has_images = random.Random(f"shown {self.seed} {position}").random() < with_images
            indices.append(self._epoch(epoch)[offset] + (0 if has_images else self.count))
        return indices

    def _epoch(self, epoch: int) -> list[int]:
        if epoch not in self._epochs:
            order = list(range(self.count))
            random.Random(f"order {self.seed} {epoch}").shuffle(order)
            width = LENGTH_GROUP_BATCHES * self.batch
            windows = [order[start : start + width] for start in range(0, self.count, width)]
            grouped = [index for window in windows for index in sorted(window, key=self._length)]
            latest = dict(list(self._epochs.items())[-1:])  # a step may take from two epochs
            self._epochs = latest | {epoch: grouped}
        return self._epochs[epoch]

    def _length(self, index: int) -> int:
        return self.lengths.get(index, 0)
