"""Examples for online learning, collected while a call is decoded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmspec.drafters.heads.base.collector import MAX_COLLECTED
from mmspec.learning.protocols import Examples


class CallCollector:
    """What a head read at some positions of a call, and all tokens that the call emitted.

    Attributes:
        inputs: per collected step, [B, A, S] and the number of valid positions of each row.
        positions: per collected step and row, the index into `tokens` of the root at the first of these positions.
        tokens: emitted tokens of each row.
        num_recorded: positions recorded so far.
    """

    def __init__(self, batch: int) -> None:
        self.inputs: list[tuple[Tensor, list[int]]] = []
        self.positions: list[list[int]] = []
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        self.num_recorded = 0

    def add(self, inputs: Tensor, counts: Sequence[int]) -> None:
        """Record what the head reads at consecutive positions, before the tokens there are added to `tokens`.

        Args:
            inputs: [B, A, S].
            counts: number of valid positions of each row.
        """
        if self.num_recorded < MAX_COLLECTED:
            self.inputs.append((inputs, list(counts)))
            self.positions.append([len(row) for row in self.tokens])
            self.num_recorded += inputs.shape[1]

    def examples(self, num_next: int) -> Examples | None:
        """The examples, row by row in the order of the text, with `num_next` tokens each; None if there are none."""
        if not self.inputs:
            return None
        places, roots, text = list[int](), list[int](), list[int]()  # of the examples; the texts, each padded
        width = sum(inputs.shape[1] for inputs, _ in self.inputs)
        for row, tokens in enumerate(self.tokens):
            place, text_start = row * width, len(text)
            for (inputs, counts), positions in zip(self.inputs, self.positions, strict=True):
                first = positions[row]
                count = min(counts[row], len(tokens) - first)
                if count > 0:
                    places += range(place, place + count)
                    roots += range(text_start + first, text_start + first + count)
                place += inputs.shape[1]
            text += tokens + [-1] * num_next
        if not places:
            return None
        inputs = torch.cat([inputs for inputs, _ in self.inputs], dim=1).flatten(0, 1)
        if len(places) < len(inputs):
            inputs = inputs[torch.tensor(places, device=inputs.device)]
        ids, index = torch.tensor(text), torch.tensor(roots)
        return Examples(inputs, ids[index], ids[index[:, None] + torch.arange(1, num_next + 1)])
