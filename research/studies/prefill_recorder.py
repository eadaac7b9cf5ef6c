"""Cost of the drafter's own prefill: time, floating-point operations, memory. For a single row."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from mmspec.app.modeling.load import synchronize
from mmspec.app.ui.rounds import RoundRecorder
from mmspec.drafters.heads.eagle.drafter import EagleDrafter
from mmspec.interfaces import Drafter, Prompt
from mmspec.metrics.compression_stats import RecordingCompressor


@dataclass
class PrefillCost:
    """Cost of one prefill: seconds, floating-point operations (0 if not counted), bytes of keys and values; and what a
    compressor has read and left."""

    seconds: float = 0.0
    flops: int = 0
    kv_bytes: int = 0
    num_visual_tokens: int = 0
    num_compressed_tokens: int = 0


@torch.inference_mode()
def _read(drafter: EagleDrafter, state: Any) -> None:
    """Let the head read the prompt, and the first token."""
    drafter.read_prompt(state)
    drafter.read_pending(state)


class PrefillRecorder(RoundRecorder):
    """A `RoundRecorder` that measures the drafter's prefill after the call, on a synchronised device.

    A drafter without a draft head has no prefill: its cost has no bytes and no operations.
    """

    def __init__(self, drafter: Drafter, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._drafter = drafter if isinstance(drafter, EagleDrafter) else None

    def measure(self, count_flops: bool = True) -> PrefillCost:
        """The cost of the prefill of the call."""
        drafter, prompt, cost = self._drafter, self.prompt, PrefillCost()
        if drafter is None or prompt is None:
            return cost
        synchronize(self.device)
        start_time = time.perf_counter()
        state = self._prefill(drafter, prompt)
        synchronize(self.device)
        cost.seconds = time.perf_counter() - start_time
        kv_cache, config = getattr(state, "kv_cache", None), drafter.head.config
        if kv_cache is not None:
            position_bytes = 2 * config.num_key_value_heads * config.head_dim * state.last_hidden.element_size()
            cost.kv_bytes = sum(kv_cache.seq_lens) * position_bytes
        if isinstance(prompt.compressor, RecordingCompressor):
            for record in prompt.compressor.records():
                cost.num_visual_tokens += record.num_visual_tokens
                cost.num_compressed_tokens += record.num_compressed_tokens
        if count_flops:
            with FlopCounterMode(display=False) as counter:
                self._prefill(drafter, prompt)
            cost.flops = counter.get_total_flops()
        return cost

    def _prefill(self, drafter: EagleDrafter, prompt: Prompt) -> Any:
        """The state behind the prompt and the first token."""
        state = drafter.begin(prompt)
        drafter.observe(state, self._results[0][0], {})
        _read(drafter, state)
        return state


__all__ = ["PrefillCost", "PrefillRecorder"]
