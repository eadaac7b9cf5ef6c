"""Copies of numbers of the host to the device that do not wait for it. Independent of models.

`torch.tensor(values, device="cuda")` copies from pageable memory: it waits until the device has done all that was
launched before. Pinned memory needs no wait; torch reuses it once the copy is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def from_host(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.tensor(values, dtype=dtype, device=device)` without a wait for a GPU."""
    return to_device(torch.tensor(values, dtype=dtype, device="cpu"), device)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """`host`, a tensor on the CPU, on `device`. On a GPU the copy is done before whatever is launched later."""
    return pin(host, device).to(device, non_blocking=device.type == "cuda")


def pin(host: Tensor, device: torch.device) -> Tensor:
    """`host` in memory from which it can be copied to `device` without a wait."""
    return host.pin_memory() if device.type == "cuda" else host
