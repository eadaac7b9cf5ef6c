"""Weights rounded to 8 or 4 bits for the C kernel, and back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmspec.cpu.c_kernel import CKernel
from mmspec.cpu.weights import FLOAT_TYPES, GROUP, QUANTISED_TYPES, TILE_ROWS, QuantisedWeight, is_block

NewBytes = Callable[[int], Tensor]
"""Makes a uint8 tensor of so many bytes, which lie at a multiple of 64."""


def new_bytes(count: int) -> Tensor:
    """A `NewBytes` of torch's own memory."""
    return torch.empty(count, dtype=torch.uint8, device="cpu")


def quantise(
    kernel: CKernel, weight: Tensor, bits: int, mean_squares: Tensor | None = None, new: NewBytes = new_bytes
) -> QuantisedWeight:
    """A weight rounded to whole numbers, with a scale for every 32 columns of a row.

    Of eight scales that are tried for a group, the one of the smallest sum of `mean_squares` times squared error is
    taken: with the mean squares of a layer's inputs, about the smallest error of its products.

    Args:
        kernel: the C kernel.
        weight: [rows, cols], contiguous float32, bfloat16 or float16 on the CPU.
        bits: 8 or 4.
        mean_squares: [cols] at least 0; None if errors in all columns are as bad.
        new: makes its memory.

    Returns:
        The quantised weight. A group with a number that is not finite has the scale nan.

    Raises:
        ValueError: of other types, shapes or devices.
    """
    if bits not in QUANTISED_TYPES:
        raise ValueError(f"bits must be one of {sorted(QUANTISED_TYPES)}; got {bits}")
    if weight.dim() != 2 or not is_block(weight) or not weight.numel():
        raise ValueError(
            f"weight must be a contiguous matrix of {', '.join(map(str, FLOAT_TYPES))} on the CPU; got "
            f"{list(weight.shape)} of {weight.dtype} on {weight.device}"
        )
    rows, cols = weight.shape
    costs = None
    if mean_squares is not None:
        if mean_squares.shape != (cols,):
            raise ValueError(f"mean_squares must have shape [{cols}]; got {list(mean_squares.shape)}")
        costs = mean_squares.detach().to("cpu", torch.float32).contiguous()
        if not bool((costs.isfinite() & (costs >= 0)).all()):
            raise ValueError("mean_squares must be finite and at least 0; compute them from finite inputs")
        costs = costs / costs.max().clamp(min=torch.finfo(torch.float32).tiny)  # sums of squares stay in range
    data, scales = map(new, quantised_bytes(rows, cols, bits))
    quantised = QuantisedWeight(data, scales.view(torch.bfloat16), rows, cols, bits)
    kernel.quantise(weight, costs, quantised)
    return quantised


def quantised_bytes(rows: int, cols: int, bits: int) -> tuple[int, int]:
    """Bytes of the numbers and of the scales of a quantised weight."""
    groups = -(-rows // TILE_ROWS) * TILE_ROWS * -(-cols // GROUP)
    return groups * GROUP * bits // 8, groups * torch.bfloat16.itemsize
