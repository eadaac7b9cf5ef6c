"""What it costs a drafter to read a prompt: time, work and memory. For a single row."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mmspec.app.load import synchronise
from mmspec.app.recorder import Recorder
from mmspec.interfaces import Prompt, Verdict


@dataclass
class Reading:
    """What a drafter's prefill cost: seconds, floating-point operations (if counted), bytes of keys and values."""

    seconds: float = 0.0
    flops: int = 0
    kv_bytes: int = 0


class Reader(Recorder):
    """A `Recorder` that measures how the drafter reads its prompt, on a device that it waits for."""

    def __init__(self, inner: Any, device: torch.device, count: bool) -> None:
        """
        Args:
            count: count operations instead of taking the time, which counting would spoil.
        """
        super().__init__(inner)
        self.device, self.count, self.reading = device, count, Reading()
        self._read = False

    def begin(self, prompt: Prompt) -> Any:
        """See `Drafter`."""
        return self._measured(lambda: super(Reader, self).begin(prompt))

    def observe(self, state: Any, verdict: Verdict, taps: Mapping[int, Tensor]) -> None:
        """See `Drafter`; the first time the prompt is read, whether a draft is asked for or not."""
        super().observe(state, verdict, taps)
        read = getattr(self.inner, "read", None)
        if self._read or read is None:
            return
        self._read = True
        self._measured(lambda: read(state))
        buffer = getattr(state, "buffer", None)
        if buffer is not None:
            config = self.inner.head.config  # type: ignore[attr-defined]
            each = 2 * config.num_key_value_heads * config.head_dim * state.last.element_size()
            self.reading.kv_bytes = sum(buffer.lengths) * each

    def _measured(self, do: Callable[[], Any]) -> Any:
        synchronise(self.device)
        began = time.perf_counter()
        if self.count:
            with FlopCounterMode(display=False) as counter:
                result = do()
            self.reading.flops += counter.get_total_flops()
        else:
            result = do()
        synchronise(self.device)
        self.reading.seconds += time.perf_counter() - began
        return result


__all__ = ["Reader", "Reading"]
