"""One call of the decode loop: from what transformers prepared to what its own `_sample` would return.

    prefill         the target, and its forward over the prompt        mmspec.prefill
    _build_loop     sampler, output, chooser, prompt, loop             below
    DecodeLoop.run  rounds, until all rows are finished                mmspec.engine.loop

Who runs and computes the rounds is decided on the way, by `mmspec.backend`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from mmspec.backend import use_kernels
from mmspec.call import Call, CallPlan
from mmspec.economy.chooser import Chooser
from mmspec.economy.known import Source
from mmspec.engine.constrained_draft import DraftRules
from mmspec.engine.criteria import UNLIMITED_STEPS
from mmspec.engine.draws import PrivateDraws
from mmspec.engine.loop import DecodeLoop
from mmspec.engine.output import OutputBuffer, ReturnFlags, UserCodeHooks
from mmspec.engine.rng import SamplingNoise
from mmspec.engine.sampler import TreeSampler
from mmspec.engine.tree_cache import CACHE_ARGUMENT
from mmspec.engine.undo import undone
from mmspec.interfaces import ObservedRound, Prompt, VisualGrid
from mmspec.metrics.compression_stats import RecordingCompressor
from mmspec.prefill import Prefilled, prefill
from mmspec.targets.assistant import TargetKeysReader
from mmspec.targets.base import ModelAdapter
from mmspec.targets.hf import HFTarget
from mmspec.targets.layer_subset import open_layer_subsets
from mmspec.user_code import is_builtin

NOISE_BYTES = 256 << 20
"""Largest memory for the noise of the steps in flight; rows that are too far ahead wait."""
NOISE_STEPS = 128
"""Largest number of steps in flight when sampling."""
UNLIMITED = UNLIMITED_STEPS >> 1
"""A `max_new_tokens` from here on means that the call has no length limit."""


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
            loop = _build_loop(call, prefilled)
            try:
                _run(call, loop, prefilled)
            finally:
                if loop.sampler.noise is not None:
                    loop.sampler.noise.close(loop.output.steps - 1)
            result = _finish(call, target, loop)
        except BaseException:
            target.restore_user_cache()
            raise
        use, states = call.plan.prefix_use, target.states
        if use is not None and use.revision.is_current(reads_data=True):
            found = use.rows, loop.output.sequences, target.buffer, prefilled[2], call.plan.num_return_sequences
            use.store.add(*found, None if states is None else states.prompt, use.revision)
        return result


@undone  # before its noise is closed, which draws: a mode that forbids that may be left by an interrupt
def _run(call: Call, loop: DecodeLoop, prefilled: Prefilled) -> None:
    """Run the loop of a call."""
    target, logits, _ = prefilled
    with target.decoding():
        loop.run(logits, partial(use_kernels, call.plan, target))


def _finish(call: Call, target: HFTarget, loop: DecodeLoop) -> Any:
    """End the streamer, count, and return the result."""
    output, compressor = loop.output, loop.prompt.compressor
    if output.streamer is not None:
        output.streamer.end()
    stats, lengths = call.stats, output.output_lengths()
    stats.calls, stats.row_tokens, stats.tokens, stats.first_tokens = 1, lengths, sum(lengths), len(lengths)
    if isinstance(compressor, RecordingCompressor):
        stats.add_compression(compressor.records())
    sequences, scores, logits = output.result()
    returns_dict = call.generation_config.return_dict_in_generate
    cache = target.export_cache(output.steps) if returns_dict or target.keeps_cache else None
    if not returns_dict:
        return sequences
    return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits, **{CACHE_ARGUMENT: cache})


# --- the parts of a call ----------------------------------------------------------------------------------------------


def _build_loop(call: Call, prefilled: Prefilled) -> DecodeLoop:
    """The loop of a call after its prefill."""
    plan, (target, logits, _) = call.plan, prefilled
    drafter, observers = plan.config.drafter, plan.config.observers
    sampler = _build_sampler(call, logits)
    output = _build_output(call, target, sampler)
    # What is the user's draws from generators of its own.
    private_draws = PrivateDraws(expected_state=None if sampler.noise is None else sampler.noise.expected_state)
    prompt = _build_prompt(call, prefilled, output, private_draws)
    if sampler.constraints and len(logits) == 1:
        prompt = replace(prompt, rules=DraftRules(sampler.constraints, partial(_only_row, output)))
    assert prompt.chooser is not None
    call.stats.drafter = drafter.label

    def observe(one: ObservedRound) -> None:
        with private_draws:
            for observer in observers:
                observer(one)

    return DecodeLoop(
        target=target,
        drafter=drafter,
        prompt=prompt,
        output=output,
        sampler=sampler,
        chooser=prompt.chooser,
        stats=call.stats,
        draftable=_draftable_ids(prompt, plan.adapter, call.input_ids.device),
        start_time=plan.start_time,
        warn=plan.warn,
        observe=observe if observers else None,
        isolation=None if is_builtin(drafter) else private_draws,
    )


def _build_sampler(call: Call, prompt_logits: Tensor) -> TreeSampler:
    """The sampler, with noise if the call samples. User processors draw by transformers' own calls."""
    noise = None
    if call.generation_config.do_sample:
        batch, vocab = prompt_logits.shape
        window = max(2, min(NOISE_STEPS, NOISE_BYTES // (4 * batch * vocab)))
        noise = SamplingNoise(batch, vocab, call.input_ids.device, window)
    sampler = TreeSampler(call.processors, noise)
    if sampler.unknown_processors:
        names = ", ".join(sampler.unknown_processors)
        call.plan.warn(f"{names}: called once per step as transformers does; not sped up")
        if noise is not None:
            noise.immediate = True
        return sampler
    return sampler.constrained(*prompt_logits.shape)


def _build_output(call: Call, target: HFTarget, sampler: TreeSampler) -> OutputBuffer:
    config = call.generation_config
    returns_dict = bool(config.return_dict_in_generate)
    pad_token = config._pad_token_tensor
    output = OutputBuffer(
        call.input_ids,
        call.criteria,
        pad_token_id=None if pad_token is None else int(pad_token),
        noise=sampler.noise,
        streamer=call.plan.streamer,
        returns=ReturnFlags(
            scores=bool(returns_dict and config.output_scores),
            logits=bool(returns_dict and config.output_logits),
            cache=returns_dict or target.keeps_cache,
        ),
        stepwise=bool(sampler.unknown_processors),
        confirms=bool(sampler.constraints),
        position_steps=target.position_steps,
        hooks=UserCodeHooks(before_user_code=target.sync_user_cache, cache_was_written=target.user_cache_view.written),
    )
    output.sync_finished_rows |= sampler.can_fail_at_padding
    for constraint in sampler.constraints:
        constraint.is_ended, constraint.stop_ids = lambda row: output.finished[row], output.criteria.stop_id_set
        if (tokenizer := call.plan.tokenizer) is not None:
            constraint.encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    return output


def _only_row(output: OutputBuffer) -> tuple[Tensor, int]:
    """[1, S] int64, and how many of them are ids."""
    return output.sequences, output.prompt_length + output.num_emitted[0]


def _build_prompt(call: Call, prefilled: Prefilled, output: OutputBuffer, private_draws: PrivateDraws) -> Prompt:
    """The prompt as drafters see it, with the call's compressor, recorded, and the chooser of its rounds."""
    plan, input_ids, (target, logits, hidden_states) = call.plan, call.input_ids, prefilled
    batch, length = input_ids.shape
    media_ids = torch.tensor(plan.adapter.media_token_ids, device=input_ids.device)
    visual_mask = torch.isin(input_ids, media_ids)
    attention_mask = target.kwargs.get("attention_mask")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    config, samples, repeats = plan.config, output.noise is not None, plan.num_return_sequences
    drafter, needs = config.drafter, config.drafter.requirements
    grids = _visual_grids(plan, input_ids) if hidden_states else ()
    banned_ids = _banned_ids(call, logits.shape[-1])
    compressor = config.active_compressor
    if compressor is not None:
        compressor = RecordingCompressor(compressor, None if is_builtin(compressor) else private_draws)
    return Prompt(
        input_ids=input_ids.clone(),  # the user's own: a drafter may write into what it is given
        attention_mask=attention_mask[:, -length:].to(torch.bool, copy=True),
        visual_mask=visual_mask,
        position_ids=target.position_ids[..., -length:].clone(),
        grids=grids,
        hidden_states=hidden_states,
        vocab_size=logits.shape[-1],
        banned_ids=banned_ids,
        stop_ids=output.criteria.stop_id_set,
        reference_ids=_reference_rows(config.reference_ids, batch, repeats),
        noise=output.noise_ahead if samples else None,
        temperature=float(call.generation_config.temperature or 1.0) if samples else 1.0,
        shared_embeddings=plan.adapter.shared_embeddings,
        static_shapes=config.fixed_tree_size is not None,
        compressor=compressor,
        max_new_tokens=target.max_new_tokens if target.max_new_tokens < UNLIMITED else None,
        media_inputs=plan.media_inputs,
        layer_subsets=open_layer_subsets(target, needs) if needs.layer_subsets else None,
        target_keys=TargetKeysReader.of(target) if needs.target_keys else None,
        c_shape=lambda: target.c_shape,
        chains_only=lambda: target.chains_only,
        chooser=Chooser(
            plan.economy,
            batch,
            sources=[] if drafter.name == "none" else [Source(drafter.name)],
            max_tree_size=needs.max_tree_size,
            fixed_tree_size=config.fixed_tree_size,
        ),
    )


def _visual_grids(plan: CallPlan, input_ids: Tensor) -> tuple[VisualGrid, ...]:
    """The grids of all rows. The visual inputs describe each prompt once, whatever `num_return_sequences`."""
    repeats = plan.num_return_sequences
    grids = plan.adapter.layout.grids(input_ids[::repeats], plan.vision_inputs)
    return tuple(replace(grid, row=grid.row * repeats + repeat) for grid in grids for repeat in range(repeats))


def _reference_rows(ids: Sequence[Sequence[int]] | None, batch: int, num_return_sequences: int) -> list[list[int]]:
    """One list of reference ids per row of the expanded batch (prompts times `num_return_sequences`).

    Args:
        ids: one list for all prompts, or one per prompt; None for no reference.
        batch: rows of the expanded batch.
        num_return_sequences: rows per prompt.

    Raises:
        ValueError: another number of texts than prompts.
    """
    if ids is None:
        return [[] for _ in range(batch)]
    if len(ids) == 1:
        ids = list(ids) * (batch // num_return_sequences)
    if len(ids) * num_return_sequences != batch:
        raise ValueError(
            f"reference has {len(ids)} texts for {batch // num_return_sequences} prompts; pass one, or one per prompt."
        )
    return [list(row) for row in ids for _ in range(num_return_sequences)]


def _banned_ids(call: Call, vocab_size: int) -> frozenset[int]:
    """Ids that a draft must not contain: placeholders, padding, ids beyond the tokenizer."""
    config, tokenizer = call.generation_config, call.plan.tokenizer
    banned = set(call.plan.adapter.media_token_ids)
    pad_token, eos_tokens = config._pad_token_tensor, config._eos_token_tensor
    if pad_token is not None and (eos_tokens is None or int(pad_token) not in eos_tokens.tolist()):
        banned.add(int(pad_token))
    if tokenizer is not None:
        banned.update(range(len(tokenizer), vocab_size))
    return frozenset(banned)


def _draftable_ids(prompt: Prompt, adapter: ModelAdapter, device: torch.device) -> Tensor:
    """[V] bool, ids that may be drafted: not banned, and with an embedding (the head may have more rows)."""
    draftable = torch.ones(prompt.vocab_size, dtype=torch.bool, device=device)
    draftable[[token for token in prompt.banned_ids if 0 <= token < prompt.vocab_size]] = False
    draftable[adapter.num_embeddings :] = False
    return draftable
