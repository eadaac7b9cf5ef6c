"""The time of reading a model's weights once: the limit of plain decoding, which speculation can pass.

Every forward of one token reads the text weights once from memory, so `bytes / bandwidth` is the least time of a step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import nn

from mmspec.app.modeling.load import synchronize
from research.bench.peers.export import text_backbone

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BUFFER_BYTES = 2**29
"""Larger than any cache."""
REPEATS = 7


@dataclass(frozen=True)
class WeightReading:
    """Weights and memory of one machine.

    Attributes:
        weight_bytes: of the layers and the output embeddings; input embeddings only where both are one tensor.
        bytes_per_s: measured, all threads of torch.
    """

    weight_bytes: int
    bytes_per_s: float

    @property
    def ms(self) -> float:
        """Milliseconds of reading the weights once."""
        return 1e3 * self.weight_bytes / self.bytes_per_s


def text_weight_bytes(model: PreTrainedModel) -> int:
    """Bytes that a forward of one token reads: embedding tables are read by the row, except as output embeddings."""
    head = model.get_output_embeddings().weight
    backbone = text_backbone(model)
    tables = {id(module.weight) for module in backbone.modules() if isinstance(module, nn.Embedding)}
    weights = {id(weight): weight for weight in backbone.parameters() if id(weight) not in tables}
    weights[id(head)] = head
    return sum(weight.nbytes for weight in weights.values())


def measure_bandwidth(device: torch.device) -> float:
    """Bytes per second of reading a large buffer (a sum), median of several runs."""
    buffer = torch.ones(BUFFER_BYTES // 4, device=device)
    seconds = []
    for number in range(REPEATS + 1):
        synchronize(device)
        start = time.perf_counter()
        buffer.sum()
        synchronize(device)
        if number:
            seconds.append(time.perf_counter() - start)
    return BUFFER_BYTES / median(seconds)


def measure_weight_reading(model: PreTrainedModel) -> WeightReading:
    """Both, for a model on its device."""
    return WeightReading(text_weight_bytes(model), measure_bandwidth(model.device))
