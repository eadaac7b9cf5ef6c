"""Rotary tables of layers as C reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mmspec.cpu.layers import DecoderShape, LayerStruct

RotaryFn = Callable[[Tensor], tuple[Tensor, Tensor]]
"""[P] int64 positions -> (cos, sin), each [P, numbers of a head that are rotated]."""


def of_neighbours(angles: Tensor) -> Tensor:
    """[P, d] angles of an interleaved rotation: a module may give them for halves, where neighbours differ."""
    is_of_neighbours = torch.equal(angles[:, ::2], angles[:, 1::2])
    return angles if is_of_neighbours else angles[:, : angles.shape[1] // 2].repeat_interleave(2, -1)


def set_angles(
    structs: ctypes.Array[LayerStruct], rotaries: Sequence[RotaryFn | None], shape: DecoderShape, count: int
) -> list[Tensor]:
    """Set the rotary tables of layers, of positions 0 to `count` - 1. Returns what must outlive their use.

    Args:
        structs: of the layers.
        rotaries: of each layer; None for those without positions and those with a convolution.
        shape: sizes.
        count: P.

    Raises:
        ValueError: angles are missing, or not two tables [P, numbers of a head that are rotated].
    """
    tables = dict[tuple[RotaryFn, int], list[Tensor]]()
    for layer, rotary in zip(structs, rotaries, strict=True):
        size = shape.sizes_of(layer.number)[2]
        if rotary is None and size and not layer.conv:
            raise ValueError("a layer without rotary must rotate 0 numbers of a head (head_sizes of the shape)")
        if rotary is None or not size:
            continue
        if (rotary, size) not in tables:
            angles = [part.detach() for part in rotary(torch.arange(count, device="cpu"))]
            if any(part.shape != (count, size) for part in angles):
                raise ValueError(f"rotary must return two tensors [P, {size}]")
            angles = [of_neighbours(part) for part in angles] if shape.is_interleaved else angles
            tables[rotary, size] = [part.float().contiguous() for part in angles]
        layer.cos, layer.sin = (part.data_ptr() for part in tables[rotary, size])
    return [part for pair in tables.values() for part in pair]
