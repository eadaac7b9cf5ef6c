"""Whether bfloat16 autocast speeds up training on a device."""

from __future__ import annotations

import time
from functools import cache

import torch
from torch.nn import functional


def bf16_is_faster(device: torch.device) -> bool:
    """Whether products in bfloat16 are faster than in float32; True for every device but a CPU.

    CPUs without bfloat16 instructions emulate it, about fifty times slower. With instructions it depends: on a Xeon
    with AVX-512 BF16 but without AMX, products took twice as long as in float32 (measured 2026-11-24). So both are
    timed, once per process.
    """
    if device.type != "cpu":
        return True
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return False
    return _product_seconds(torch.bfloat16) < _product_seconds(torch.float32)


@cache
def _product_seconds(dtype: torch.dtype) -> float:
    """Seconds of a [1024, 384] x [384, 1024] product on this CPU: the minimum of five runs after a warm-up."""
    inputs = torch.ones(1024, 384, dtype=dtype)
    weight = torch.ones(1024, 384, dtype=dtype)
    seconds = []
    with torch.no_grad():
        for _ in range(6):
            start = time.perf_counter()
            functional.linear(inputs, weight)
            seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
