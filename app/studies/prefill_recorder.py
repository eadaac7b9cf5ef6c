"""Cost of the drafter's own prefill: time, floating-point operations, memory. For a single row."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mmspec.app.bench.recorder import RecordingDrafter
from mmspec.app.modeling.load import synchronize
from mmspec.control.draft_cost import DraftCostModel
from mmspec.interfaces import Prompt, VerifyResult


@dataclass
class PrefillCost:
    """Cost of one prefill: seconds, floating-point operations (0 if not counted), bytes of keys and values."""

    seconds: float = 0.0
    flops: int = 0
    kv_bytes: int = 0


class PrefillRecorder(RecordingDrafter):
    """A `RecordingDrafter` that measures the drafter's prefill on a synchronised device."""

    def __init__(self, inner: Any, device: torch.device) -> None:
        super().__init__(inner)
        self.device, self.cost = device, PrefillCost()
        self._prompt: Prompt | None = None
        self._reads = hasattr(inner, "sync")
        # What a compressor goes by in this call, for `count`; the drafter's own goes on learning.
        self._known = DraftCostModel(copy.deepcopy(inner.cost_model.by_batch)) if self._reads else None

    def begin(self, prompt: Prompt) -> Any:
        """See `Drafter`."""
        self._prompt = prompt
        return self._timed(lambda: super(PrefillRecorder, self).begin(prompt))

    def observe(self, state: Any, verdict: VerifyResult, taps: Mapping[int, Tensor]) -> None:
        """See `Drafter`; the first time the prompt is read, whether a draft is asked for or not."""
        super().observe(state, verdict, taps)
        if not self._reads or len(self._results) > 1:
            return
        self._timed(lambda: self.inner.sync(state))  # type: ignore[attr-defined]
        buffer = getattr(state, "kv_cache", None)
        if buffer is not None:
            config = self.inner.head.config  # type: ignore[attr-defined]
            each = 2 * config.num_key_value_heads * config.head_dim * state.last_hidden.element_size()
            self.cost.kv_bytes = sum(buffer.seq_lens) * each

    def count_flops(self) -> None:
        """After the call, count the operations of reading: of the same once more, from which nothing is learned."""
        if not self._reads or self._prompt is None:
            return
        twin: Any = copy.copy(self.inner)
        twin.cost_model = self._known
        with FlopCounterMode(display=False) as counter:
            state = twin.begin(self._prompt)
            twin.observe(state, self._results[0][0], {})
            twin.sync(state)
        self.cost.flops = counter.get_total_flops()

    def _timed(self, do: Callable[[], Any]) -> Any:
        synchronize(self.device)
        began = time.perf_counter()
        result = do()
        synchronize(self.device)
        self.cost.seconds += time.perf_counter() - began
        return result


__all__ = ["PrefillCost", "PrefillRecorder"]
