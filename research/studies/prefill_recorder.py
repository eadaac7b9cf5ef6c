"""Cost of the drafter's own prefill: time, floating-point operations, memory. For a single row."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mmspec.app.bench.recorder import RecordingDrafter
from mmspec.app.modeling.load import synchronize
from mmspec.control.draft_cost import HeadCostModel
from mmspec.drafters.heads.eagle.drafter import EagleDrafter
from mmspec.interfaces import Drafter, Prompt, VerifyResult

ResultT = TypeVar("ResultT")


@dataclass
class PrefillCost:
    """Cost of one prefill: seconds, floating-point operations (0 if not counted), bytes of keys and values."""

    seconds: float = 0.0
    flops: int = 0
    kv_bytes: int = 0


@torch.inference_mode()
def _read(drafter: EagleDrafter, state: Any) -> None:
    """Let the head read the prompt, and the first token."""
    drafter.read_prompt(state)
    drafter.read_pending(state)


class PrefillRecorder(RecordingDrafter):
    """A `RecordingDrafter` that measures the drafter's prefill on a synchronised device.

    A drafter without a draft head has no prefill: its cost has no bytes and no operations.
    """

    def __init__(self, inner: Drafter, device: torch.device) -> None:
        super().__init__(inner)
        self.device, self.cost = device, PrefillCost()
        self._prompt: Prompt | None = None
        self._head_drafter = inner if isinstance(inner, EagleDrafter) else None
        # The costs that a compressor goes by in this call, for `count_flops`; the drafter's own are updated meanwhile.
        self._cost_model = (
            HeadCostModel(copy.deepcopy(self._head_drafter.cost_model.by_batch)) if self._head_drafter else None
        )

    def begin(self, prompt: Prompt) -> Any:
        """See `Drafter`."""
        self._prompt = prompt
        return self._timed(lambda: super(PrefillRecorder, self).begin(prompt))

    def observe(self, state: Any, result: VerifyResult, hidden_states: Mapping[int, Tensor]) -> None:
        """See `Drafter`; the first call runs the prefill, even if no draft follows."""
        super().observe(state, result, hidden_states)
        drafter = self._head_drafter
        if drafter is None or len(self._results) > 1:
            return
        self._timed(lambda: _read(drafter, state))
        kv_cache = getattr(state, "kv_cache", None)
        if kv_cache is not None:
            config = drafter.head.config
            position_bytes = 2 * config.num_key_value_heads * config.head_dim * state.last_hidden.element_size()
            self.cost.kv_bytes = sum(kv_cache.seq_lens) * position_bytes

    def count_flops(self) -> None:
        """After the call, count the operations of the prefill in a second one, which updates no costs."""
        if self._head_drafter is None or self._cost_model is None or self._prompt is None:
            return
        twin = copy.copy(self._head_drafter)
        twin.cost_model = self._cost_model
        with FlopCounterMode(display=False) as counter:
            state = twin.begin(self._prompt)
            twin.observe(state, self._results[0][0], {})
            _read(twin, state)
        self.cost.flops = counter.get_total_flops()

    def _timed(self, function: Callable[[], ResultT]) -> ResultT:
        synchronize(self.device)
        start_time = time.perf_counter()
        result = function()
        synchronize(self.device)
        self.cost.seconds += time.perf_counter() - start_time
        return result


__all__ = ["PrefillCost", "PrefillRecorder"]
