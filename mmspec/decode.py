"""One call of the decode loop: from what transformers prepared to what its own `_sample` would return.

    prefill         the target, and its forward over the prompt        mmspec.prefill
    build_loop      sampler, output, chooser, prompt, loop             mmspec.build
    DecodeLoop.run  rounds, until all rows are finished                mmspec.engine.loop

Who runs and computes the rounds is decided on the way, by `mmspec.backend`.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from mmspec.backend import use_kernels
from mmspec.build import build_loop
from mmspec.call import Call
from mmspec.engine.loop import DecodeLoop
from mmspec.engine.output import OutputBuffer
from mmspec.engine.tree_cache import CACHE_ARGUMENT
from mmspec.engine.undo import undone
from mmspec.interfaces import Compressor, Prompt
from mmspec.metrics.compression_stats import RecordingCompressor
from mmspec.metrics.stats import Stats
from mmspec.prefill import prefill
from mmspec.reuse import keep_prompt
from mmspec.targets.hf import HFTarget


def decode(call: Call) -> Any:
    """Decode one call; returns what `GenerationMixin._sample` returns.

    Raises:
        FallbackRequired: the prefill shows that transformers must decode this call.
    """
    start = time.perf_counter()
    with ExitStack() as stack:
        prefilled = prefill(call, stack)
        call.stats.prefill_s = time.perf_counter() - start
        target = prefilled[0]
        try:
            loop, prompt = build_loop(call, prefilled)
            try:
                _run(call, loop, target, prefilled[1], prompt)
            finally:
                if loop.sampler.noise is not None:
                    loop.sampler.noise.close(loop.output.steps - 1)
            result = _finish(call, target, loop.output, prompt.compressor)
        except BaseException:
            target.restore_user_cache()
            raise
        if call.plan.prefix_use is not None:
            keep_prompt(call.plan.prefix_use, loop.output, prefilled, call.plan.num_return_sequences)
        return result


@undone  # before its noise is closed, which draws: a mode that forbids that may be left by an interrupt
def _run(call: Call, loop: DecodeLoop, target: HFTarget, logits: Tensor, prompt: Prompt) -> None:
    """Run the loop of a call."""
    with target.decoding():
        loop.run(logits, prompt, partial(use_kernels, call.plan, target))


def _finish(call: Call, target: HFTarget, output: OutputBuffer, compressor: Compressor | None) -> Any:
    """End the streamer, count, and return the result."""
    if output.streamer is not None:
        output.streamer.end()
    _count_tokens(call.stats, output)
    if isinstance(compressor, RecordingCompressor):
        call.stats.add_compression(compressor.records())
    sequences, scores, logits = output.result()
    returns_dict = call.generation_config.return_dict_in_generate
    cache = target.export_cache(output.steps) if returns_dict or target.keeps_cache else None
    if not returns_dict:
        return sequences
    return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits, **{CACHE_ARGUMENT: cache})


def _count_tokens(stats: Stats, output: OutputBuffer) -> None:
    """Count the call and its output tokens, without padding."""
    lengths = output.output_lengths()
    stats.calls = 1
    stats.row_tokens = lengths
    stats.tokens = sum(lengths)
    stats.first_tokens = len(lengths)
