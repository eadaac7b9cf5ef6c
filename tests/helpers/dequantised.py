"""The inverse of `mmspec.cpu.quantise`: the layout of quantised weights, read by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.cpu.weights import GROUP, TILE_ROWS, QuantisedWeight


def dequantise(weight: QuantisedWeight) -> Tensor:
    """[rows, cols] float32, the numbers that a quantised weight stands for."""
    tiles, groups = -(-weight.rows // TILE_ROWS), -(-weight.cols // GROUP)
    if weight.bits == 8:
        parts = weight.data.view(torch.int8).view(tiles, groups, GROUP // 4, TILE_ROWS, 4).float()
    else:
        halves = weight.data.view(tiles, groups, GROUP // 8, 1, TILE_ROWS, 4)
        parts = torch.cat([halves & 15, halves >> 4], 3).float().sub_(8).view(tiles, groups, GROUP // 4, TILE_ROWS, 4)
    numbers = parts.permute(0, 3, 1, 2, 4).reshape(tiles, TILE_ROWS, groups, GROUP)
    scales = weight.scales.float().view(tiles, groups, TILE_ROWS).transpose(1, 2)
    wide = (numbers * scales[..., None]).view(tiles * TILE_ROWS, groups * GROUP)
    return wide[: weight.rows, : weight.cols].contiguous()
