"""Linear layers in bfloat16 and float16 on a CPU: the C kernel for few rows, where it is faster than torch's.

Two kernels differ by a rounding of half precision, which is large enough to decide near-ties. So the choice does not
depend on the number of rows, and does not change: a weight's shape is timed before its first product, and then one of
the kernels computes all its products of 1 to 32 rows. With the C kernel a row's result is the same bits whatever
the other rows. Independent of models.
"""

from __future__ import annotations

import threading
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.cpu.c_kernel import MAX_C_ROWS, CKernel

TIMED_ROWS = (1, 8)
"""Numbers of rows with which a shape is timed: one token, and the nodes of a usual tree."""
TIMED_REPEATS = 3
"""Runs of each kernel with each number of rows."""
MUCH_SLOWER = 8.0
"""Ratio of torch's time to the C kernel's from which one run is enough: torch emulates the type."""


class NarrowLinears:
    """Chooses the kernel of each shape. One per patched model, shared by the threads of its calls.

    Attributes:
        choices: {(out_features, in_features, dtype): whether the C kernel computes few rows}.
    """

    def __init__(self) -> None:
        self.choices: dict[tuple[int, int, torch.dtype], bool] = {}
        self._lock = threading.Lock()

    def linear(self, kernel: CKernel | None, layer: nn.Linear, rows: Tensor, deterministic: bool) -> Tensor:
        """`layer(rows)`, both of the same type.

        Args:
            kernel: the C kernel; None where there is none.
            layer: the layer.
            rows: [..., in_features].
            deterministic: the C kernel computes few rows, whatever their time.

        Returns:
            [..., out_features].
        """
        is_few = 0 < rows.numel() <= MAX_C_ROWS * rows.shape[-1]
        if kernel is not None and is_few and (deterministic or self._c_is_faster(kernel, layer)):
            product = kernel.linear(layer.weight, layer.bias, rows.contiguous())
            if product is not None:
                return product
        return functional.linear(rows, layer.weight, layer.bias)

    def _c_is_faster(self, kernel: CKernel, layer: nn.Linear) -> bool:
        """Whether the C kernel is faster for a layer's shape; timed when it is first asked."""
        key = (layer.out_features, layer.in_features, layer.weight.dtype)
        choice = self.choices.get(key)
        if choice is None:
            with self._lock:  # a shape is timed once: two threads could find different answers
                choice = self.choices.get(key)
                if choice is None:
                    choice = self.choices[key] = c_is_faster(kernel, layer.weight)
        return choice


def c_is_faster(kernel: CKernel, weight: Tensor) -> bool:
    """Whether the C kernel takes no longer than torch's for a weight, by the fastest of a few runs of each."""
    totals = [0.0, 0.0]
    for num_rows in TIMED_ROWS:
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
            if seconds[1] > MUCH_SLOWER * seconds[0]:
                return True
        totals = [total + seconds for total, seconds in zip(totals, fastest, strict=True)]
    return totals[0] <= totals[1]
