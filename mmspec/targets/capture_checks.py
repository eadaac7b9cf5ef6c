"""Checks of recorded rounds: of the weights that a recording contains, and of its first replays."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mmspec.targets.base import ModelAdapter

BIT_TYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""{bytes: integer type}"""
REPLAY_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Largest difference between the first replay and a plain run, relative to the range of the logits."""
HALF_REPLAY_TOLERANCE = 0.1
"""The same for half precision."""


def decoder_tensors(adapter: ModelAdapter) -> Iterator[Tensor]:
    """Parameters and buffers that a round reads."""
    seen: set[int] = set()
    for module in (adapter.text_model, adapter.model.get_input_embeddings(), adapter.model.get_output_embeddings()):
        for tensor in () if module is None else (*module.parameters(), *module.buffers()):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def bit_checksums(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of the bit patterns along the first and the last dimension. They change where `.data` is edited in place."""
    bits = torch.atleast_1d(tensor.detach()).contiguous()
    if bits.shape[-1] * bits.element_size() % 8 == 0:
        bits = bits.view(torch.long)  # two float32 at a time: four times as fast as a sum of int32
    else:
        bits = bits.view(BIT_TYPES.get(bits.element_size(), torch.uint8))
    return bits.sum(0, dtype=torch.long), bits.sum(-1, dtype=torch.long)


def check_replay(outputs: Tensor, expected: Tensor) -> None:
    """Compare the logits of a first replay with those of a plain run.

    Raises:
        RuntimeError: they differ by more than rounding.
    """
    outputs, expected = outputs.nan_to_num(0, 0, 0), expected.nan_to_num(0, 0, 0)
    tolerance = REPLAY_TOLERANCE.get(expected.dtype, HALF_REPLAY_TOLERANCE)
    scale = (expected.max() - expected.min()).float()
    difference = (outputs - expected).abs().max().float()
    if bool(difference > tolerance * scale):
        raise RuntimeError(f"the recorded round differs from the model by {float(difference / scale):.1e}")


__all__ = ["bit_checksums", "check_replay", "decoder_tensors"]
