"""Linear layers in bfloat16 and float16 on a CPU: the C kernel where it is faster than torch's.

Two kernels differ by a rounding of half precision, which is large enough to decide near-ties. So the choice does not
change: a weight's shape is timed before its first product, and then one of the kernels computes all its products of 1
to 32 rows. Products of more rows, such as a prompt's, are timed apart: torch may have instructions that pay with many
rows only, or may emulate the type. With the C kernel a row's result is the same bits whatever the other rows.
Independent of models.
"""

from __future__ import annotations

import sys
import threading
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.cpu.c_kernel import MAX_C_ROWS, CKernel

FEW_TIMED, MANY_TIMED = (1, 8, MAX_C_ROWS), (64, 256)
"""Numbers of rows with which a shape is timed: one token, the nodes of a usual tree, and a short prompt; long ones."""
TIMED_FEATURES = 512
"""Out features with which products of many rows are timed."""
TIMED_REPEATS = 3
"""Runs of each kernel with each number of rows."""
MUCH_SLOWER = 4.0
"""Ratio of torch's time to the C kernel's from which one run is enough: torch emulates the type,"""
LONG_SECONDS = 5e-3
"""if that run was so long that preparing it does not count."""


class NarrowLinears:
    """Chooses the kernel of each shape. One per patched model, shared by the threads of its calls.

    Attributes:
        choices: {(out_features, in_features, dtype, whether rows are few): whether the C kernel computes them}.
    """

    def __init__(self) -> None:
        self.choices: dict[tuple[int, int, torch.dtype, bool], bool] = {}
        self._lock = threading.Lock()

    def linear(self, kernel: CKernel | None, layer: nn.Linear, rows: Tensor, deterministic: bool) -> Tensor:
        """`layer(rows)`, both of the same type.

        Args:
            kernel: the C kernel; None where there is none.
            layer: the layer.
            rows: [..., in_features].
            deterministic: the C kernel computes all rows, whatever their time.

        Returns:
            [..., out_features].
        """
        is_few = rows.numel() <= MAX_C_ROWS * rows.shape[-1]
        if kernel is not None and (deterministic or self._c_is_faster(kernel, layer, is_few)):
            product = kernel.linear(layer.weight, layer.bias, rows.contiguous())
            if product is not None:
                return product
        return functional.linear(rows, layer.weight, layer.bias)

    def _c_is_faster(self, kernel: CKernel, layer: nn.Linear, is_few: bool) -> bool:
        """Whether the C kernel is faster for a layer's shape; timed when it is first asked."""
        key = (layer.out_features, layer.in_features, layer.weight.dtype, is_few)
        choice = self.choices.get(key)
        if choice is None:
            with self._lock:  # a shape is timed once: two threads could find different answers
                choice = self.choices.get(key)
                if choice is None:
                    choice = self.choices[key] = c_is_faster(kernel, layer.weight, is_few)
        return choice


def c_is_faster(kernel: CKernel, weight: Tensor, is_few: bool) -> bool:
    """Whether the C kernel takes no longer than torch's for a weight, by the fastest of a few runs of each.

    Each number of rows counts the same, however long it takes: most products are of few rows.
    """
    ratio = 1.0
    weight = weight if is_few else weight[:TIMED_FEATURES]
    for num_rows in FEW_TIMED if is_few else MANY_TIMED:
        rows = weight.new_ones(num_rows, weight.shape[1])
        fastest = [float("inf")] * 2
        for _ in range(TIMED_REPEATS):
            start = time.perf_counter()
            if kernel.linear(weight, None, rows) is None:
                return False
            middle = time.perf_counter()
            functional.linear(rows, weight)
            seconds = (middle - start, time.perf_counter() - middle)
            fastest = list(map(min, fastest, seconds))
            if seconds[1] > max(LONG_SECONDS, MUCH_SLOWER * seconds[0]):
                return True
        ratio *= fastest[1] / max(fastest[0], sys.float_info.min)
    return ratio >= 1
