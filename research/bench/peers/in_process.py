"""Peers that run in this process: variants of `generate` of transformers, and models patched by mmspec."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import CompileConfig
from transformers.generation.stopping_criteria import StoppingCriteriaList

import mmspec
from mmspec.app.errors import one_line
from mmspec.app.modeling.load import synchronize
from mmspec.comparison import TimestampCriterion
from research.bench.memory import PeakMemory
from research.bench.peers.base import MEDIA, PeerError, PeerPrompt, PeerRun

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HF_LOOKUP_TOKENS = 10
"""`prompt_lookup_num_tokens` of `hf-lookup`, the value in the documentation of transformers."""
COMPILE_WARM_UP_CALLS = 3
"""The first call compiles, the second may compile again for dynamic shapes."""


class FirstLengthCriterion(TimestampCriterion):
    """Records times as its parent, and the length of the sequence at the first: assisted steps emit several tokens.

    Attributes:
        first_length: prompt and new tokens at the first call; 0 before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first_length = 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        self.first_length = self.first_length or int(input_ids.shape[1])
        return super().__call__(input_ids, scores, **kwargs)


@dataclass
class TransformersPeer:
    """`generate` of transformers with options; `model` is never patched."""

    name: str
    model: PreTrainedModel
    options: Mapping[str, Any] = field(default_factory=dict)
    missing: str | None = None
    reads: str = MEDIA
    max_batch: int | None = None
    warm_up_calls: int = 1

    def unavailable_reason(self) -> str | None:
        """`missing`."""
        return self.missing

    def start(self) -> None:
        """Nothing: the model is loaded."""

    def generate(self, prompt: PeerPrompt, max_new_tokens: int) -> PeerRun:
        """Decode greedily; a criterion records the times."""
        times = FirstLengthCriterion()
        options = greedy_options(self.model, prompt, max_new_tokens) | dict(self.options)
        options["stopping_criteria"] = StoppingCriteriaList([times])
        ids, total_s, start, memory = _timed(self.model, lambda: self.model.generate(**prompt.inputs, **options))
        length = prompt.inputs["input_ids"].shape[1]
        rows = cut_rows(ids[:, length:], prompt.eos_ids)
        first = times.first_length - length
        num_decoded = sum(max(0, len(row) - first) for row in rows)
        decode_s = times.times[-1] - times.times[0]
        return PeerRun(rows, total_s, times.times[0] - start, decode_s, num_decoded, memory_mib=memory)

    def close(self) -> None:
        """Nothing: the model belongs to the caller."""


@dataclass
class PatchedPeer:
    """A model patched by mmspec."""

    name: str
    model: PreTrainedModel
    reads: str = MEDIA
    max_batch: int | None = None
    warm_up_calls: int = 2

    def unavailable_reason(self) -> str | None:
        """None: the model is patched already."""
        return None

    def start(self) -> None:
        """Nothing: the model is loaded."""

    def generate(self, prompt: PeerPrompt, max_new_tokens: int) -> PeerRun:
        """Decode greedily; the loop measures itself.

        Raises:
            PeerError: the call ran in transformers' own loop.
        """
        options = greedy_options(self.model, prompt, max_new_tokens)
        ids, total_s, _, memory = _timed(self.model, lambda: self.model.generate(**prompt.inputs, **options))
        stats = mmspec.stats(self.model, last=True)
        if stats.fallback_calls:
            raise PeerError(f"fallback to plain generate: {stats.fallback_reason}")
        rows = cut_rows(ids[:, prompt.inputs["input_ids"].shape[1] :], prompt.eos_ids)
        num_decoded = sum(len(row) - 1 for row in rows)
        return PeerRun(rows, total_s, stats.ttft_s, stats.decode_s, num_decoded, stats, memory)

    def close(self) -> None:
        """Nothing: the model belongs to the caller."""


def transformers_peers(
    copy_model: Callable[[], PreTrainedModel], assistant: PreTrainedModel | None
) -> dict[str, Callable[[], TransformersPeer]]:
    """{name: builder} of the variants of `generate`.

    Args:
        copy_model: a clone of the model; static caches stay on the model that made them.
        assistant: a smaller model with the same tokenizer, for assisted generation; None if there is none.
    """
    static = {"cache_implementation": "static"}
    compiled = CompileConfig(mode="default")  # on CUDA transformers compiles a static cache by itself
    compiled._compile_all_devices = True
    missing = None if assistant is not None else "no assistant model: --assistant names a smaller one, same tokenizer"
    return {
        "hf-static": lambda: TransformersPeer("hf-static", copy_model(), static, warm_up_calls=2),
        "hf-compile": lambda: TransformersPeer(
            "hf-compile", copy_model(), static | {"compile_config": compiled}, warm_up_calls=COMPILE_WARM_UP_CALLS
        ),
        "hf-lookup": lambda: TransformersPeer(
            "hf-lookup", copy_model(), {"prompt_lookup_num_tokens": HF_LOOKUP_TOKENS}, max_batch=1
        ),
        "hf-assisted": lambda: TransformersPeer(
            "hf-assisted", copy_model(), {"assistant_model": assistant}, missing, max_batch=1
        ),
    }


def greedy_options(model: PreTrainedModel, prompt: PeerPrompt, max_new_tokens: int) -> dict[str, Any]:
    """Options of a greedy call; without end tokens the end gets an id outside the vocabulary."""
    options: dict[str, Any] = dict.fromkeys(("temperature", "top_p", "top_k"))
    options |= {"max_new_tokens": max_new_tokens, "do_sample": False}
    ends = list(prompt.eos_ids) or [model.get_output_embeddings().weight.shape[0]]
    pad = model.generation_config.pad_token_id
    return options | {"eos_token_id": ends, "pad_token_id": ends[0] if pad is None else pad}


def cut_rows(ids: Tensor, eos_ids: tuple[int, ...]) -> list[list[int]]:
    """New tokens [B, T] of each row up to and including the first end token."""
    rows = ids.tolist()
    ends = [next((i + 1 for i, token in enumerate(row) if token in eos_ids), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


def _timed(model: PreTrainedModel, call: Callable[[], Tensor]) -> tuple[Tensor, float, float, float | None]:
    """Output, seconds, start time and peak memory in MiB of a call on a synchronised device."""
    torch.manual_seed(0)
    gc.collect()
    synchronize(model.device)
    with PeakMemory(model.device) as memory:
        start = time.perf_counter()
        try:
            ids = call()
        except Exception as error:
            raise PeerError(f"{type(error).__name__}: {one_line(error, 200)}") from error
        synchronize(model.device)
        total_s = time.perf_counter() - start
    return ids, total_s, start, memory.extra_mib
