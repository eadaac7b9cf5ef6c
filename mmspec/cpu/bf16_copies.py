"""Bfloat16 copies of float32 weights whose numbers are all bfloat16: the same products from half the bytes.

A checkpoint in bfloat16 that is loaded in float32 has such weights. Their copies take half as much memory again, so
they are made only where at least twice that is free. A copy is never trusted across calls: the first forward of a call
reads the float32 weights, as it would anyway, and compares a hash of every sixteen rows with that of what was copied.
From the second forward on the copies are read, if nothing differed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mmspec.cpu.c_kernel import CKernel
from mmspec.cpu.weights import FLOAT_TYPES, QuantisedWeight, Weight, WeightStruct

MEMORY_FACTOR = 2
"""Free memory that there must be, in bytes of the copies."""


@dataclass(frozen=True)
class _Copy:
    """A copy, or the knowledge that there can be none.

    Attributes:
        data: [rows, cols] bfloat16; None if a number is no bfloat16.
        hashes: [chunks] int64.
        data_ptr: address of the weight.
        version: its version counter.
    """

    data: Tensor | None
    hashes: Tensor
    data_ptr: int
    version: int

    def is_of(self, weight: Tensor) -> bool:
        """Whether the weight is where it was, and unchanged as far as its version counter tells."""
        return self.data_ptr == weight.data_ptr() and self.version == weight._version


class WeightCopies:
    """The copies of a process's weights; each lives as long as its weight."""

    def __init__(self) -> None:
        self._copies = WeakTensorKeyDictionary()

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.data.nbytes for copy in self._copies.values() if copy.data is not None)

    def checked(self, kernel: CKernel, structs: Iterable[tuple[WeightStruct, Weight]]) -> CheckedWeights | None:
        """Let the structs of the weights of one call be checked by its first forward.

        Args:
            kernel: the C kernel.
            structs: of float32 weights, where the kernel reads them, and the weights; others are left as they are.

        Returns:
            What is told of each forward; None if no weight has a copy.
        """
        weights = [
            (struct, weight)
            for struct, weight in structs
            if not isinstance(weight, QuantisedWeight) and _can_have_copy(weight)
        ]
        needed = sum(weight.nbytes // 2 for _, weight in weights if weight not in self._copies)
        if needed and needed * MEMORY_FACTOR > free_bytes():
            return None
        found = [(struct, weight, self._copy_of(kernel, weight)) for struct, weight in weights]
        kept = [(struct, weight, copy) for struct, weight, copy in found if copy.data is not None]
        return CheckedWeights(self, kept) if kept else None

    def forget(self, weights: Iterable[Tensor]) -> None:
        """Let these weights be copied anew."""
        for weight in weights:
            self._copies.pop(weight, None)

    def _copy_of(self, kernel: CKernel, weight: Tensor) -> _Copy:
        copy: _Copy | None = self._copies.get(weight)
        if copy is None or not copy.is_of(weight):
            data_ptr, version = weight.data_ptr(), weight._version  # before it is read
            data, hashes = kernel.copy(weight)
            copy = self._copies[weight] = _Copy(data, hashes, data_ptr, version)
        return copy


class CheckedWeights:
    """Weights with copies, during one call. Not thread-safe.

    Attributes:
        uses_copies: whether the kernel reads the copies.
    """

    def __init__(self, owner: WeightCopies, weights: list[tuple[WeightStruct, Tensor, _Copy]]) -> None:
        self.uses_copies = False
        self._owner = owner
        self._weights = weights
        self._is_stale = ctypes.c_int64(0)
        self._is_checking = True
        for struct, _, copy in weights:
            struct.hashes, struct.is_stale = copy.hashes.data_ptr(), ctypes.addressof(self._is_stale)

    def copies_of(self, weights: Iterable[Weight]) -> list[Weight]:
        """These weights, or their copies where there are."""
        copies = {id(weight): copy.data for _, weight, copy in self._weights}
        return [weight if (copy := copies.get(id(weight))) is None else copy for weight in weights]

    def before_forward(self) -> None:
        """Read the weights themselves from now on if one was changed since the copies were found right."""
        if self.uses_copies and not all(copy.is_of(weight) for _, weight, copy in self._weights):
            self._read_weights()

    def after_forward(self) -> None:
        """After the first forward: read the copies from then on if no weight had changed."""
        if not self._is_checking:
            return
        self._is_checking = False
        if self._is_stale.value:
            self._owner.forget(weight for _, weight, _ in self._weights)
            self._read_weights()
            return
        self.uses_copies = True
        for struct, _, copy in self._weights:
            assert copy.data is not None
            struct.hashes, struct.is_stale = None, None
            struct.data, struct.type = copy.data.data_ptr(), FLOAT_TYPES[torch.bfloat16]

    def _read_weights(self) -> None:
        self.uses_copies = False
        for struct, weight, _ in self._weights:
            struct.hashes, struct.is_stale = None, None
            struct.data, struct.type = weight.data_ptr(), FLOAT_TYPES[torch.float32]


def _can_have_copy(weight: Tensor) -> bool:
    if weight.dtype is not torch.float32 or weight.is_inference() or weight._is_view():  # views do not outlive a call
        return False
    return weight.dim() == 2 and weight.is_cpu and weight.is_contiguous() and weight.numel() > 0


def free_bytes() -> int:
    """Memory that is free or holds files that can be read again, as Linux estimates it."""
    try:
        with open("/proc/meminfo", encoding="ascii") as stream:
            amounts = {name: rest.split()[0] for name, _, rest in (line.partition(":") for line in stream)}
        return int(amounts["MemAvailable"]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
