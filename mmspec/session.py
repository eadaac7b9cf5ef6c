"""`Session`: the parts of one call, built after its prompt: sampler, output, drafter, chooser, and the loop."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmspec.backend import use_c, use_linear_kernels
from mmspec.call import CallContext, PreparedInputs
from mmspec.economy.chooser import Chooser
from mmspec.economy.known import Source
from mmspec.engine.criteria import UNLIMITED_STEPS
from mmspec.engine.draws import PrivateDraws
from mmspec.engine.loop import DecodeLoop
from mmspec.engine.output import OutputBuffer, ReturnFlags, UserCodeHooks
from mmspec.engine.rng import SamplingNoise
from mmspec.engine.sampler import TreeSampler
from mmspec.interfaces import ObservedRound, Observer, Prompt, VisualGrid
from mmspec.interfaces.target import own_copies
from mmspec.metrics.compression_stats import RecordingCompressor
from mmspec.prefill import Prefilled
from mmspec.reference import reference_rows
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


@dataclass(frozen=True)
class Session:
    """The parts of one call.

    Attributes:
        target: after its prefill.
        loop: the decode loop, with the other parts.
        prompt: the prompt as drafters see it.
        prompt_logits: [B, V] of the last position of the prompt.
        compressor: records what the drafter's compressor does; None without one.
        linear_kernels: context of the loop, in which linear layers run in their fastest kernel.
        returns_dict: whether the call returns more than the sequences.
        returns_cache: whether it returns the cache, or its caller has it.
    """

    target: HFTarget
    loop: DecodeLoop
    prompt: Prompt
    prompt_logits: Tensor
    compressor: RecordingCompressor | None
    linear_kernels: AbstractContextManager[None]
    returns_dict: bool
    returns_cache: bool


def build_session(call: CallContext, inputs: PreparedInputs, prefilled: Prefilled) -> Session:
    """Build the parts of a call after its prefill."""
    target = prefilled.target
    sampler = _build_sampler(call, inputs, prefilled.logits)
    output = _build_output(call, inputs, target, sampler)
    private_draws = PrivateDraws(expected_state=None if sampler.noise is None else sampler.noise.expected_state)
    compressor = _build_compressor(call, private_draws)
    prompt = replace(_build_prompt(call, inputs, prefilled, output), compressor=compressor)
    assert prompt.chooser is not None
    call.stats.drafter = call.spec_config.drafter.label
    loop = DecodeLoop(
        target=target,
        drafter=call.spec_config.drafter,
        output=output,
        sampler=sampler,
        chooser=prompt.chooser,
        stats=call.stats,
        draftable=_draftable_ids(prompt, call.adapter, inputs.input_ids.device),
        start_time=call.start_time,
        warn=call.warn,
        observe=_build_observer(call, private_draws),
        isolation=None if is_builtin(call.spec_config.drafter) else private_draws,
    )
    use_c(call, target)
    return Session(
        target=target,
        loop=loop,
        prompt=prompt,
        prompt_logits=prefilled.logits,
        compressor=compressor,
        linear_kernels=use_linear_kernels(call, target),
        returns_dict=bool(inputs.generation_config.return_dict_in_generate),
        returns_cache=_returns_cache(inputs, target),
    )


def _build_observer(call: CallContext, private_draws: PrivateDraws) -> Observer | None:
    """Tells the user's observers, with generators of their own."""
    observers = call.spec_config.observers
    if not observers:
        return None

    def observe(one: ObservedRound) -> None:
        with private_draws:
            for observer in observers:
                observer(one)

    return observe


def _build_sampler(call: CallContext, inputs: PreparedInputs, prompt_logits: Tensor) -> TreeSampler:
    """The sampler, with noise if the call samples. User processors draw by transformers' own calls."""
    noise = None
    if inputs.generation_config.do_sample:
        batch, vocab = prompt_logits.shape
        window = max(2, min(NOISE_STEPS, NOISE_BYTES // (4 * batch * vocab)))
        noise = SamplingNoise(batch, vocab, inputs.input_ids.device, window)
    sampler = TreeSampler(inputs.processors, noise)
    if sampler.unknown_processors:
        names = ", ".join(sampler.unknown_processors)
        call.warn(f"{names}: called once per step as transformers does; not sped up")
        if noise is not None:
            noise.immediate = True
    return sampler


def _build_output(call: CallContext, inputs: PreparedInputs, target: HFTarget, sampler: TreeSampler) -> OutputBuffer:
    config = inputs.generation_config
    returns_dict = bool(config.return_dict_in_generate)
    pad_token = config._pad_token_tensor
    output = OutputBuffer(
        inputs.input_ids,
        inputs.criteria,
        pad_token_id=None if pad_token is None else int(pad_token),
        noise=sampler.noise,
        streamer=call.streamer,
        returns=ReturnFlags(
            scores=bool(returns_dict and config.output_scores),
            logits=bool(returns_dict and config.output_logits),
            cache=_returns_cache(inputs, target),
        ),
        stepwise=bool(sampler.unknown_processors),
        position_steps=target.position_steps,
        hooks=UserCodeHooks(before_user_code=target.sync_user_cache, cache_was_written=target.user_cache_view.written),
    )
    output.sync_finished_rows |= sampler.can_fail_at_padding
    return output


def _build_compressor(call: CallContext, private_draws: PrivateDraws) -> RecordingCompressor | None:
    """The call's compressor, recorded; a user's compressor draws from generators of its own."""
    if call.spec_config.active_compressor is None:
        return None
    compressor = RecordingCompressor(call.spec_config.active_compressor)
    if not is_builtin(compressor.inner):
        compressor.context_factory = lambda: private_draws
    return compressor


def _build_chooser(call: CallContext, num_rows: int) -> Chooser:
    drafter = call.spec_config.drafter
    return Chooser(
        call.economy,
        num_rows,
        sources=[] if drafter.name == "none" else [Source(drafter.name)],
        max_tree_size=drafter.requirements.max_tree_size,
        fixed_tree_size=call.spec_config.fixed_tree_size,
    )


def _build_prompt(call: CallContext, inputs: PreparedInputs, prefilled: Prefilled, output: OutputBuffer) -> Prompt:
    """The prompt as drafters see it, without the compressor."""
    target = prefilled.target
    input_ids = inputs.input_ids
    batch, length = input_ids.shape
    media_ids = torch.tensor(call.adapter.media_token_ids, device=input_ids.device)
    visual_mask = torch.isin(input_ids, media_ids)
    attention_mask = target.kwargs.get("attention_mask")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    spec_config = call.spec_config
    samples, needs = output.noise is not None, spec_config.drafter.requirements
    return Prompt(
        input_ids=input_ids.clone(),  # the user's own: a drafter may write into what it is given
        attention_mask=attention_mask[:, -length:].to(torch.bool, copy=True),
        visual_mask=visual_mask,
        position_ids=target.position_ids[..., -length:].clone(),
        grids=_visual_grids(call, input_ids) if prefilled.hidden_states else (),
        hidden_states=prefilled.hidden_states,
        vocab_size=prefilled.logits.shape[-1],
        banned_ids=_banned_ids(call, inputs.generation_config, prefilled.logits.shape[-1]),
        stop_ids=output.criteria.stop_id_set,
        reference_ids=reference_rows(
            spec_config.reference, spec_config.reference_ids, call.tokenizer, batch, call.num_return_sequences
        ),
        noise=output.noise_ahead if samples else None,
        temperature=float(inputs.generation_config.temperature or 1.0) if samples else 1.0,
        shared_embeddings=call.adapter.shared_embeddings,
        static_shapes=spec_config.fixed_tree_size is not None,
        max_new_tokens=target.max_new_tokens if target.max_new_tokens < UNLIMITED else None,
        visual_saliency=_visual_saliency(call, visual_mask),
        media_inputs=own_copies(call.media_inputs) if call.num_return_sequences == 1 else {},
        layer_subsets=open_layer_subsets(target, needs) if needs.layer_subsets else None,
        target_keys=TargetKeysReader.of(target) if spec_config.drafter.requirements.target_keys else None,
        chooser=_build_chooser(call, batch),
    )


def _visual_grids(call: CallContext, input_ids: Tensor) -> tuple[VisualGrid, ...]:
    """The grids of all rows. The visual inputs describe each prompt once, whatever `num_return_sequences`."""
    repeats = call.num_return_sequences
    grids = call.adapter.layout.grids(input_ids[::repeats], call.vision_inputs)
    return tuple(replace(grid, row=grid.row * repeats + repeat) for grid in grids for repeat in range(repeats))


def _visual_saliency(call: CallContext, visual_mask: Tensor) -> Tensor | None:
    """[B, L] float32 attention of the vision tower, computed once per prompt; None if it was not captured."""
    repeats = call.num_return_sequences
    saliency = call.adapter.layout.visual_saliency(call.attention_capture, visual_mask[::repeats], call.vision_inputs)
    return None if saliency is None else saliency.repeat_interleave(repeats, 0)


def _banned_ids(call: CallContext, config: Any, vocab_size: int) -> frozenset[int]:
    """Ids that a draft must not contain: placeholders, padding, ids beyond the tokenizer."""
    banned = set(call.adapter.media_token_ids)
    pad_token, eos_tokens = config._pad_token_tensor, config._eos_token_tensor
    if pad_token is not None and (eos_tokens is None or int(pad_token) not in eos_tokens.tolist()):
        banned.add(int(pad_token))
    if call.tokenizer is not None:
        banned.update(range(len(call.tokenizer), vocab_size))
    return frozenset(banned)


def _draftable_ids(prompt: Prompt, adapter: ModelAdapter, device: torch.device) -> Tensor:
    """[V] bool, ids that may be drafted: not banned, and with an embedding (the head may have more rows)."""
    draftable = torch.ones(prompt.vocab_size, dtype=torch.bool, device=device)
    draftable[[token for token in prompt.banned_ids if 0 <= token < prompt.vocab_size]] = False
    draftable[adapter.num_embeddings :] = False
    return draftable


def _returns_cache(inputs: PreparedInputs, target: HFTarget) -> bool:
    return bool(inputs.generation_config.return_dict_in_generate or target.keeps_cache)
