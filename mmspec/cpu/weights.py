"""Matrices of weights as C reads them: in float32, bfloat16 or float16 where they lie, or quantised."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.cpu.structs import fields_of

FLOAT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""{dtype: its number in weights.h}"""
QUANTISED_TYPES = {8: 3, 4: 4}
"""{bits of a weight: its number in weights.h}"""
BFLOAT16_PAIRS = 5
"""Number in weights.h of a bfloat16 weight that is multiplied in pairs of columns."""
GROUP = 32
"""`GROUP` of weights.h: columns that share a scale."""
TILE_ROWS = 16
"""`TILE_ROWS` of weights.h: rows that lie together."""


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight [rows, cols] of 8 or 4 bits with a scale for every 32 columns of a row, in the layout of weights.h.

    Attributes:
        data: uint8, the whole numbers.
        scales: bfloat16, one for each group.
        rows: out features.
        cols: in features.
        bits: of a number: 8 (-127 to 127) or 4 (-8 to 7).
    """

    data: Tensor
    scales: Tensor
    rows: int
    cols: int
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, cols]."""
        return self.rows, self.cols

    @property
    def nbytes(self) -> int:
        """Bytes of numbers and scales."""
        return self.data.nbytes + self.scales.nbytes


Weight = Tensor | QuantisedWeight
"""A contiguous tensor [rows, cols] on the CPU of a type of `FLOAT_TYPES`, or a quantised one."""


class WeightStruct(ctypes.Structure):
    """`weights` of weights.h."""

    _fields_ = fields_of("weights")


def weight_struct(weight: Weight, in_pairs: bool = False) -> WeightStruct:
    """The struct of a weight, which must outlive it.

    Args:
        weight: the weight.
        in_pairs: whether it is multiplied with rows of bfloat16, by a kernel that multiplies these in pairs of columns.
    """
    rows, cols = weight.shape
    if isinstance(weight, QuantisedWeight):
        number = QUANTISED_TYPES[weight.bits]
        return WeightStruct(weight.data.data_ptr(), weight.scales.data_ptr(), None, None, rows, cols, number)
    number = BFLOAT16_PAIRS if in_pairs and weight.dtype is torch.bfloat16 else FLOAT_TYPES[weight.dtype]
    return WeightStruct(weight.data_ptr(), None, None, None, rows, cols, number)


def version_of(tensor: Tensor) -> int:
    """The counter of a tensor's changes in place; 0 for tensors made in inference mode, which have none."""
    return 0 if tensor.is_inference() else tensor._version


def is_block(tensor: Tensor) -> bool:
    """Whether a tensor is a contiguous block of a type of `FLOAT_TYPES` on the CPU."""
    return tensor.dtype in FLOAT_TYPES and tensor.is_cpu and tensor.is_contiguous()


def is_plain(tensor: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether a tensor is a contiguous block of a type on the CPU."""
    return tensor.dtype is dtype and tensor.is_cpu and tensor.is_contiguous()
