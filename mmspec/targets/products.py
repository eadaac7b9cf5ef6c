"""Products of rows with quantised weights: by the C kernel on a CPU, by torch's own operators elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.cpu.bf16_copies import free_bytes
from mmspec.cpu.c_kernel import MAX_C_ROWS, CKernel, describe_kernel, load_kernel
from mmspec.cpu.quantise import NewBytes, new_bytes, quantise
from mmspec.cpu.weights import GROUP, TILE_ROWS, QuantisedWeight

GPU_COPIES = False
"""Whether models on a GPU have quantised copies: `TorchProducts` is tested on a CPU and has not run on a GPU yet."""
INNER_TILES = 8
"""Of torch's packing of 4-bit weights on a GPU, in units of 16 columns."""
SCALE_FACTORS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""Of the scale with which the largest number of a group is the largest integer: those that are tried."""
QUANTISED_ROWS = 1024
"""Rows of a weight that are quantised at once."""


@dataclass(frozen=True)
class CProducts:
    """Quantises weights for the C kernel, and multiplies rows with them."""

    kernel: CKernel

    def fits(self, weight: Tensor) -> bool:
        """Whether a weight of this shape can be quantised."""
        return min(weight.shape) >= TILE_ROWS

    def free_bytes(self) -> int:
        """Free memory where the copies lie."""
        return free_bytes()

    def quantise(self, weight: Tensor, bits: int, mean_squares: Tensor | None, new: NewBytes) -> PackedWeight:
        """A weight [out, in] in 4 or 8 bits; errors count by the [in] mean squares of its inputs, if they are known.

        `new` makes its memory, on a CPU.
        """
        return quantise(self.kernel, weight, bits, mean_squares, new)

    def linear(self, weight: PackedWeight, bias: Tensor | None, rows: Tensor) -> Tensor | None:
        """[R, out] of rows [R, in], in their type; None for rows that have no such product."""
        assert isinstance(weight, QuantisedWeight)
        parts = [self.kernel.linear(weight, bias, part) for part in rows.split(MAX_C_ROWS)]
        found = [part for part in parts if part is not None]
        return torch.cat(found) if len(found) == len(parts) else None


@dataclass(frozen=True)
class TorchWeight:
    """A weight as torch's operators take it.

    Attributes:
        data: 4 bits: packed by torch; 8 bits: int8 [out, in].
        scales: 4 bits: bfloat16 [in / 32, out, 2], scales and zeros; 8 bits: bfloat16 [out].
        shape: [out features, in features].
        bits: 4 or 8.
    """

    data: Tensor
    scales: Tensor
    shape: tuple[int, int]
    bits: int

    @property
    def nbytes(self) -> int:
        """Of the numbers and their scales."""
        return self.data.nbytes + self.scales.nbytes


@dataclass(frozen=True)
class TorchProducts:
    """The same by torch: `_weight_int4pack_mm` with groups of 32 columns, `_weight_int8pack_mm` with a scale per row.

    In bfloat16, whatever the rows are: that is what a GPU has.
    """

    device: torch.device

    def fits(self, weight: Tensor) -> bool:
        """See `CProducts`."""
        rows, cols = weight.shape
        return rows % 16 == 0 and cols % (16 * INNER_TILES) == 0

    def free_bytes(self) -> int:
        """See `CProducts`."""
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else free_bytes()

    def quantise(
        self, weight: Tensor, bits: int, mean_squares: Tensor | None, new: NewBytes = new_bytes
    ) -> PackedWeight:
        """See `CProducts`."""
        shape = weight.shape[0], weight.shape[1]
        largest = 127 if bits == 8 else 7
        numbers, scales = [], []
        for part in weight.split(QUANTISED_ROWS):
            groups = part.float().view(len(part), -1, GROUP if bits == 4 else shape[1])
            costs = None if mean_squares is None else mean_squares.float().view(groups.shape[1:])
            scale = best_scales(groups, costs, largest)
            numbers.append((groups / scale[..., None]).round().clamp(-largest - 1, largest).view(part.shape).int())
            scales.append(scale.bfloat16())
        data, scale = torch.cat(numbers), torch.cat(scales)
        if bits == 8:
            return TorchWeight(data.clamp(min=-127).to(torch.int8), scale[:, 0].contiguous(), shape, bits)
        scale = scale.t().contiguous()
        return TorchWeight(self._pack(data + 8), torch.stack([scale, torch.zeros_like(scale)], -1), shape, bits)

    def linear(self, weight: PackedWeight, bias: Tensor | None, rows: Tensor) -> Tensor | None:
        """See `CProducts`."""
        assert isinstance(weight, TorchWeight)
        inputs = rows.to(torch.bfloat16)
        if weight.bits == 8:
            outputs = torch._weight_int8pack_mm(inputs, weight.data, weight.scales)
        elif self.device.type == "cuda":
            outputs = torch._weight_int4pack_mm(inputs, weight.data, GROUP, weight.scales)
        else:
            outputs = torch._weight_int4pack_mm_for_cpu(inputs, weight.data, GROUP, weight.scales)
        outputs = outputs.to(rows.dtype)
        return outputs if bias is None else outputs + bias

    def _pack(self, numbers: Tensor) -> Tensor:
        """As the operators read them, of int32 [out, in] from 0 to 15."""
        if self.device.type != "cuda":
            return torch._convert_weight_to_int4pack_for_cpu(numbers, 1)
        pairs = (numbers[:, ::2] << 4 | numbers[:, 1::2]).to(torch.uint8)
        return torch._convert_weight_to_int4pack(pairs, INNER_TILES)


PackedWeight = QuantisedWeight | TorchWeight
Products = CProducts | TorchProducts


def best_scales(groups: Tensor, costs: Tensor | None, largest: int) -> Tensor:
    """[R, G] scales of the groups of a weight: of those tried, that of the smallest sum of squared errors.

    Args:
        groups: [R, G, n] float32.
        costs: [G, n] weights of the squared errors; None for equal ones.
        largest: integer.
    """
    widest = groups.abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny) / largest
    best, least = widest, torch.full_like(widest, torch.inf)
    for factor in SCALE_FACTORS:
        scale = (widest * factor).bfloat16().float().clamp(min=torch.finfo(torch.float32).tiny)
        rounded = (groups / scale[..., None]).round().clamp(-largest - 1, largest) * scale[..., None]
        errors = (rounded - groups).square()
        error = (errors if costs is None else errors * costs).sum(-1)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best


def products_for(device: torch.device) -> Products:
    """The products of models on a device.

    Raises:
        ValueError: there are none.
    """
    if device.type == "cuda" and GPU_COPIES:
        return TorchProducts(device)
    if device.type != "cpu":
        raise ValueError(
            f"drafter='quantized' runs on a CPU; the model is on {device}. Use drafter='self' or 'hybrid'."
        )
    kernel = load_kernel()
    if kernel is None:
        raise ValueError(
            "drafter='quantized' needs the C kernel, which cannot be had here: "
            f"{describe_kernel()}. Use drafter='hybrid'."
        )
    return CProducts(kernel)
