"""One call of the decode loop: from what transformers prepared to what its own `_sample` would return.

    prefill         the target, and its forward over the prompt        mmspec.prefill
    build_session   sampler, output, drafter, chooser, loop            mmspec.session
    DecodeLoop.run  rounds, until all rows are finished                mmspec.engine.loop

Who runs and computes the rounds is decided on the way, by `mmspec.backend`.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from transformers.generation.utils import GenerateDecoderOnlyOutput

from mmspec.call import CallContext, PreparedInputs
from mmspec.engine.output import OutputBuffer
from mmspec.engine.tree_cache import CACHE_ARGUMENT
from mmspec.metrics.stats import Stats
from mmspec.prefill import prefill
from mmspec.reuse import keep_prompt
from mmspec.session import Session, build_session


def decode(call: CallContext, inputs: PreparedInputs) -> Any:
    """Decode one call; returns what `GenerationMixin._sample` returns.

    Raises:
        FallbackRequired: the prefill shows that transformers must decode this call.
    """
    start = time.perf_counter()
    with ExitStack() as stack:
        prefilled = prefill(call, inputs, stack)
        call.stats.prefill_s = time.perf_counter() - start
        try:
            session = build_session(call, inputs, prefilled)
            result = _run(session)
        except BaseException:
            prefilled.target.restore_user_cache()
            raise
        if call.prefix_use is not None:
            keep_prompt(call.prefix_use, session.loop.output, prefilled, call.num_return_sequences)
        return result


def _run(session: Session) -> Any:
    """Run the loop; returns the result."""
    loop, target = session.loop, session.target
    output, stats, noise = loop.output, loop.stats, loop.sampler.noise
    try:
        with target.decoding(), session.linear_kernels:
            loop.run(session.prompt_logits, session.prompt)
    finally:
        if noise is not None:
            noise.close(output.steps - 1)
    if output.streamer is not None:
        output.streamer.end()
    _count_tokens(stats, output)
    if session.compressor is not None:
        stats.add_compression(session.compressor.records())
    sequences, scores, logits = output.result()
    cache = target.export_cache(output.steps) if session.returns_cache else None
    if not session.returns_dict:
        return sequences
    return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits, **{CACHE_ARGUMENT: cache})


def _count_tokens(stats: Stats, output: OutputBuffer) -> None:
    """Count the call and its output tokens, without padding."""
    lengths = output.output_lengths()
    stats.calls = 1
    stats.row_tokens = lengths
    stats.tokens = sum(lengths)
    stats.first_tokens = len(lengths)
