"""Addresses of weights, for the structs that C reads."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from mmspec.cpu.structs import fields_of
from mmspec.cpu.weights import QuantisedWeight, Weight, WeightStruct, is_plain, weight_struct

ANY_TYPE = ("decay_log", "decay_bias", "router_bias")
"""Vectors that may be float32 whatever the other weights are."""


class VectorStruct(ctypes.Structure):
    """`vector` of decoder_types.h."""

    _fields_ = fields_of("vector")


class WeightAddresses:
    """Addresses of weights, whose memory lives as long as this.

    Vectors that the kernel cannot read where they lie, since they have another type or need an offset, have copies that
    it makes at the start of each forward (`vectors`).

    Attributes:
        dtype: of all weights but quantised ones.
        in_pairs: they are bfloat16, and multiplied in pairs.
    """

    def __init__(
        self, dtype: torch.dtype = torch.float32, norm_offset: float = 0.0, multiplies_pairs: bool = False
    ) -> None:
        """
        Args:
            dtype: of all weights but quantised ones.
            norm_offset: added to vectors whose name ends with "norm".
            multiplies_pairs: of the kernel.
        """
        self.dtype = dtype
        self.in_pairs = multiplies_pairs and dtype is torch.bfloat16
        self._norm_offset = norm_offset
        self._storages: list[torch.UntypedStorage] = []  # which live as long as C may read them
        self._copies: list[tuple[Tensor, Tensor, float]] = []

    def add(self, name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> int | None:
        """Address of a vector, or of a table of float32; None for None.

        Raises:
            ValueError: it is not contiguous, of the type and of this shape on the CPU.
        """
        if tensor is None:
            return None
        field = name.partition(" ")[0]
        is_float32 = self.dtype is torch.float32 or (field in ANY_TYPE and tensor.dtype is torch.float32)
        self._check(name, tensor, shape, torch.float32 if is_float32 else self.dtype)
        self._storages.append(tensor.untyped_storage())
        offset = self._norm_offset if field.endswith("norm") else 0.0
        if is_float32 and not offset:
            return tensor.data_ptr()
        copy = new_floats(*shape)
        self._copies.append((tensor, copy, offset))
        return copy.data_ptr()

    def vectors(self) -> ctypes.Array[VectorStruct]:
        """What `decoder.vectors` points to; must outlive its use."""
        rows = [
            VectorStruct(one.data_ptr(), copy.data_ptr(), one.numel(), offset) for one, copy, offset in self._copies
        ]
        return (VectorStruct * len(rows))(*rows)

    def add_matrix(self, name: str, weight: Weight | None, shape: tuple[int, ...]) -> WeightStruct:
        """The struct of a matrix; an empty one for None.

        Raises:
            ValueError: it is neither contiguous, of the type and of this shape on the CPU, nor a quantised weight of
                this shape.
        """
        if weight is None:
            return WeightStruct()
        if isinstance(weight, QuantisedWeight):
            if weight.shape != shape:
                raise ValueError(f"{name} must have shape {list(shape)}; got a quantised weight {list(weight.shape)}")
            self._storages += weight.data.untyped_storage(), weight.scales.untyped_storage()
        else:
            self._check(name, weight, shape, self.dtype)
            self._storages.append(weight.untyped_storage())
        return weight_struct(weight, self.in_pairs)

    def set(
        self, struct: ctypes.Structure, name: str, weight: Weight | None, shape: tuple[int, ...], label: str
    ) -> None:
        """Set a field of a new struct to a weight, whose name in messages is `label`; None leaves it empty.

        Raises:
            ValueError: see `add` and `add_matrix`.
        """
        if weight is None:
            return
        add = self.add_matrix if isinstance(getattr(struct, name), WeightStruct) else self.add
        setattr(struct, name, add(label, weight, shape))  # type: ignore[arg-type]

    def _check(self, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if not is_plain(tensor, dtype) or tensor.shape != shape:
            kind = str(dtype).removeprefix("torch.")
            raise ValueError(
                f"{name} must be contiguous {kind} of shape {list(shape)} on the CPU; got "
                f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}"
            )


def new_floats(*shape: int) -> Tensor:
    """A float32 tensor on the CPU, not initialised."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")
