"""The most memory that a call uses beyond what was in use before it."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import torch

CLEAR_PEAK = "5"
"""Resets the peak of resident memory of a process (Linux, proc(5), /proc/pid/clear_refs)."""


class PeakMemory:
    """Context manager: peak memory of the device between entry and exit.

    On CUDA that of torch's allocator; on a CPU the resident memory of the process, where Linux tells its peak.

    Attributes:
        extra_mib: MiB beyond those at entry; None if unknown.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.extra_mib: float | None = None
        self._before = 0.0

    def __enter__(self) -> PeakMemory:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device) / 2**20
        else:
            _reset_peak()
            self._before = _status_mib("VmRSS") or 0.0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.device.type == "cuda":
            peak: float | None = torch.cuda.max_memory_allocated(self.device) / 2**20
        else:
            peak = _status_mib("VmHWM")
        self.extra_mib = None if peak is None else max(0.0, peak - self._before)


def _reset_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text(CLEAR_PEAK, encoding="ascii")
    except OSError:  # not Linux, or not allowed: the peak is then that of the whole process
        return


def _status_mib(name: str) -> float | None:
    """A field of /proc/self/status in MiB."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:")), None)
