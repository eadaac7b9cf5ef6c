"""Whether bfloat16 autocast speeds up training on a device."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.economy.kernels import fastest


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
    return _fastest_type() == "bfloat16"


@cache
def _fastest_type() -> str | None:
    """The type in which a [1024, 384] x [384, 1024] product is faster on this CPU."""
    ones = {name: torch.ones(1024, 384, dtype=getattr(torch, name)) for name in ("float32", "bfloat16")}

    def run(name: str, _: None) -> Tensor:
        with torch.no_grad():
            return functional.linear(ones[name], ones[name])

    return fastest(tuple(ones), [None], run)
