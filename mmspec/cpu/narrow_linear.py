"""Linear layers in bfloat16 and float16 on a CPU: the C kernel where it is faster than torch's.

Two kernels differ by a rounding of half precision, which is large enough to decide near-ties. So one kernel computes
all products of 1 to 32 rows of a layer. Products of more rows, such as a prompt's, are decided apart: torch may have
instructions that pay with many rows only, or may emulate the type. With the C kernel a row's result is the same bits
whatever the other rows. Independent of models.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.cpu.c_kernel import MAX_C_ROWS, CKernel
from mmspec.economy.kernels import IN_C, PLAIN, KernelChoices, ProductKey

FEW_TIMED, MANY_TIMED = (1, 8), (64,)
"""Numbers of rows with which a layer is timed: one token and the nodes of a usual tree; a prompt."""
MANY_ROWS = 1 << 16
"""Stands for all numbers of rows that are not few."""
TIMED_PRODUCTS = 8 << 20
"""Multiplications of a timed run at most: out features beyond are left out. A type that torch emulates takes 10 ms."""
ROUNDED_FEATURES = 1024
"""Layers with as many out features or more share their choice."""


def narrow_linear(
    choices: KernelChoices, kernel: CKernel | None, layer: nn.Linear, rows: Tensor, deterministic: bool
) -> Tensor:
    """`layer(rows)`, both of the same type.

    Args:
        choices: of this process.
        kernel: the C kernel; None where there is none.
        layer: the layer.
        rows: [..., in_features].
        deterministic: the C kernel computes all rows, whatever their time.

    Returns:
        [..., out_features].
    """
    rows = (
        rows.contiguous()
    )  # torch 2.13 computes rows that lie apart, such as those of the last tokens, 90 times slower
    is_few = rows.numel() <= MAX_C_ROWS * rows.shape[-1]
    if kernel is not None and (deterministic or _is_in_c(choices, kernel, layer, is_few)):
        product = kernel.linear(layer.weight, layer.bias, rows)
        if product is not None:
            return product
    return functional.linear(rows, layer.weight, layer.bias)


def _is_in_c(choices: KernelChoices, kernel: CKernel, layer: nn.Linear, is_few: bool) -> bool:
    """Whether the C kernel computes such products of a layer."""
    weight = layer.weight
    key = choice_key(weight, MAX_C_ROWS if is_few else MANY_ROWS)
    chosen = choices.used(key)
    if chosen is None:
        names = (IN_C, PLAIN) if is_few or not _has_instructions(weight.dtype) else (PLAIN, IN_C)
        cases = FEW_TIMED if is_few else MANY_TIMED
        chosen = choices.choose(key, names, cases, lambda name, count: _run(name, kernel, weight, count))
    return chosen == IN_C


def choice_key(weight: Tensor, max_rows: int) -> ProductKey:
    """The key of products with a weight: layers of similar size share it, to be timed once."""
    out_features, in_features = weight.shape
    rounded = min(ROUNDED_FEATURES, 1 << max(0, out_features - 1).bit_length())
    return torch.get_num_threads(), weight.dtype, max_rows, rounded, in_features


def _run(name: str, kernel: CKernel, weight: Tensor, num_rows: int) -> Tensor | None:
    part, rows = timed_part(weight, num_rows, TIMED_PRODUCTS)
    return kernel.linear(part, None, rows) if name == IN_C else functional.linear(rows, part)


def timed_part(weight: Tensor, num_rows: int, max_products: int) -> tuple[Tensor, Tensor]:
    """So many of the out features of a weight, and rows, that a run takes no more than these multiplications."""
    num_features = max(64, max_products // max(1, num_rows * weight.shape[1]))
    return weight[:num_features], weight.new_ones(num_rows, weight.shape[1])


def _has_instructions(dtype: torch.dtype) -> bool:
    """Whether torch computes many rows of a type by the processor's own instructions, as far as it tells."""
    try:
        ops = torch.ops.mkldnn
        is_supported = ops._is_mkldnn_bf16_supported if dtype is torch.bfloat16 else ops._is_mkldnn_fp16_supported
        return bool(is_supported())
    except (AttributeError, RuntimeError):
        return False
