"""One call of the decode loop: from what transformers prepared to what its own `_sample` would return.

`decode` runs the prefill, builds the parts of `DecodeLoop` (output buffer, sampler, drafter, controller), runs the loop
and returns the result.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.utils import GenerateDecoderOnlyOutput

from mmspec.call import CallContext, PrefixUse, PreparedInputs
from mmspec.control.tree_size import TreeSizeController
from mmspec.cpu.interception import operators_are_intercepted
from mmspec.cpu.linear import find_linear_layers, use_fast_linears
from mmspec.cpu.native import load_kernel
from mmspec.engine.criteria import UNLIMITED_STEPS
from mmspec.engine.draws import PrivateDraws
from mmspec.engine.loop import DecodeLoop
from mmspec.engine.output import OutputBuffer, ReturnFlags, UserCodeHooks
from mmspec.engine.rng import SamplingNoise
from mmspec.engine.sampler import TreeSampler
from mmspec.engine.tree_cache import CACHE_ARGUMENT
from mmspec.interfaces import Drafter, LearnableDrafter, Prompt, VisualGrid, drafter_label
from mmspec.learning.recording import RecordedDrafter
from mmspec.metrics.compression_stats import RecordingCompressor
from mmspec.metrics.stats import Stats
from mmspec.prefill import Prefilled, prefill
from mmspec.reference import reference_rows
from mmspec.targets.assistant import TargetKeysReader
from mmspec.targets.base import ModelAdapter
from mmspec.targets.hf import HFTarget
from mmspec.targets.layer_subset import open_layer_subsets
from mmspec.user_code import RngIsolatedDrafter, is_builtin

NOISE_BYTES = 256 << 20
"""Largest memory for the noise of the steps in flight; rows that are too far ahead wait."""
NOISE_STEPS = 128
"""Largest number of steps in flight when sampling."""
UNLIMITED = UNLIMITED_STEPS >> 1
"""A `max_new_tokens` from here on means that the call has no length limit."""


def decode(call: CallContext, inputs: PreparedInputs) -> Any:
    """Decode one call; returns what `GenerationMixin._sample` returns.

    Raises:
        FallbackRequired: the prefill shows that transformers must decode this call.
    """
    start = time.perf_counter()
    with ExitStack() as stack:
        with _fast_prompt_linears(call):
            prefilled = stack.enter_context(prefill(call, inputs))
        call.stats.prefill_s = time.perf_counter() - start
        try:
            return _run_loop(call, inputs, prefilled)
        except BaseException:
            prefilled.target.restore_user_cache()
            raise


def _run_loop(call: CallContext, inputs: PreparedInputs, prefilled: Prefilled) -> Any:
    """Build the loop, run it and return the result."""
    target = prefilled.target
    device = inputs.input_ids.device
    sampler = _build_sampler(call, inputs, prefilled.logits)
    output = _build_output(call, inputs, target, sampler)

    private_draws = PrivateDraws(expected_state=None if sampler.noise is None else sampler.noise.expected_state)
    drafter: Drafter = call.spec_config.drafter
    compressor = _build_compressor(call, private_draws)
    prompt = replace(_build_prompt(call, inputs, prefilled, output), compressor=compressor)
    if call.learner is not None and isinstance(drafter, LearnableDrafter):
        drafter = call.recording = RecordedDrafter(drafter, call.learner.wants_examples)
    if not is_builtin(call.spec_config.drafter):
        drafter = RngIsolatedDrafter(drafter, private_draws)
    call.stats.drafter = drafter_label(call.spec_config.drafter)
    loop = DecodeLoop(
        target=target,
        drafter=drafter,
        output=output,
        sampler=sampler,
        controller=_build_controller(call, num_rows=len(inputs.input_ids)),
        stats=call.stats,
        draftable=_draftable_ids(prompt, call.adapter, device),
        start_time=call.start_time,
        warn=call.warn,
    )
    _use_c(call, target)
    try:
        with target.decoding(), _fast_linears(call):
            loop.run(prefilled.logits, prompt)
    finally:
        if sampler.noise is not None:
            sampler.noise.close(output.steps - 1)
    if call.streamer is not None:
        call.streamer.end()
    _count_tokens(call.stats, output)
    if compressor is not None:
        call.stats.add_compression(compressor.records())
    if call.prefix_use is not None:
        _keep_prompt(call.prefix_use, output, prefilled, call.num_return_sequences)
    return _build_result(inputs.generation_config, output, target)


# --- the parts of a call ----------------------------------------------------------------------------------------------


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
    return OutputBuffer(
        inputs.input_ids,
        inputs.criteria,
        pad_token_id=None if pad_token is None else int(pad_token),
        noise=sampler.noise,
        streamer=call.streamer,
        returns=ReturnFlags(
            scores=bool(returns_dict and config.output_scores),
            logits=bool(returns_dict and config.output_logits),
            cache=_returns_cache(config, target),
        ),
        stepwise=bool(sampler.unknown_processors),
        hooks=UserCodeHooks(before_user_code=target.sync_user_cache, cache_was_written=target.user_cache_view.written),
    )


def _build_compressor(call: CallContext, private_draws: PrivateDraws) -> RecordingCompressor | None:
    """The call's compressor, recorded; a user's compressor draws from generators of its own."""
    if call.spec_config.active_compressor is None:
        return None
    compressor = RecordingCompressor(call.spec_config.active_compressor)
    if not is_builtin(compressor.inner):
        compressor.context_factory = lambda: private_draws
    return compressor


def _build_controller(call: CallContext, num_rows: int) -> TreeSizeController:
    drafter = call.spec_config.drafter
    return TreeSizeController(
        call.costs,
        num_rows,
        drafts=drafter.name != "none",
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
        input_ids=input_ids,
        attention_mask=attention_mask[:, -length:].bool(),
        visual_mask=visual_mask,
        position_ids=target.position_ids[..., -length:],
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
        media_inputs=call.media_inputs if call.num_return_sequences == 1 else {},
        layer_subsets=open_layer_subsets(target, needs.copy_bits) if needs.layer_subsets else None,
        recordings=target.recordings,
        target_keys=TargetKeysReader(target) if spec_config.drafter.requirements.target_keys else None,
    )


def _visual_grids(call: CallContext, input_ids: Tensor) -> tuple[VisualGrid, ...]:
    """The grids of all rows. The visual inputs describe each prompt once, whatever `num_return_sequences`."""
    repeats = call.num_return_sequences
    grids = call.adapter.grids(input_ids[::repeats], call.vision_inputs)
    return tuple(replace(grid, row=grid.row * repeats + repeat) for grid in grids for repeat in range(repeats))


def _visual_saliency(call: CallContext, visual_mask: Tensor) -> Tensor | None:
    """[B, L] float32 attention of the vision tower, computed once per prompt; None if it was not captured."""
    repeats = call.num_return_sequences
    saliency = call.adapter.visual_saliency(call.attention_capture, visual_mask[::repeats], call.vision_inputs)
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


def _use_c(call: CallContext, target: HFTarget) -> None:
    """Let the forwards of the target run in C where that is allowed and possible. With `backend="c"` says why not."""
    if not call.spec_config.may_use_c:
        return
    kernel, reason = None, _reason_against_c(call)
    if reason is None:
        kernel = load_kernel() if call.autotuner.allow_native else None
        reason = "there is no compiled kernel: it takes Linux on x86-64 and a C compiler"
    if kernel is not None and call.modules is not None:
        target.use_native_rounds(kernel, call.modules)
        reason = None if target.rounds is not None else "it does not compute this model, with these inputs"
    if reason is not None and call.spec_config.backend == "c":
        call.warn(f"backend='c': a call runs in torch ({reason})")


def _reason_against_c(call: CallContext) -> str | None:
    """Why nothing of a call may run in C, or None."""
    device = call.adapter.model.device
    if device.type != "cpu":
        return f"the model is on {device}, C computes on a CPU"
    if operators_are_intercepted():
        return "user code sees or replaces the operators of torch"
    return None


def _may_replace_linears(call: CallContext) -> bool:
    """Whether other kernels than torch's may compute the linear layers of this call."""
    return call.spec_config.backend != "torch" and _reason_against_c(call) is None


def _fast_linears(call: CallContext) -> AbstractContextManager[None]:
    """Context in which linear layers of the decoding step and of the drafter run in their fastest kernel, on CPU."""
    spec_config = call.spec_config
    layers: list[nn.Linear] = []
    if _may_replace_linears(call):
        roots: list[nn.Module] = [] if call.modules is None else list(call.modules.linear_layers)
        roots += [part for part in vars(spec_config.drafter).values() if isinstance(part, nn.Module)]
        layers = find_linear_layers(roots)
    return use_fast_linears(call.autotuner, layers, spec_config.deterministic, not spec_config.may_use_c)


def _fast_prompt_linears(call: CallContext) -> AbstractContextManager[None]:
    """Context in which linear layers of the prompt's forward, vision tower included, run in their fastest kernel."""
    spec_config = call.spec_config
    layers = find_linear_layers(call.scanned_modules().prompt_linear_layers) if _may_replace_linears(call) else []
    return use_fast_linears(call.autotuner, layers, spec_config.deterministic)


def _keep_prompt(use: PrefixUse, output: OutputBuffer, prefilled: Prefilled, repeats: int) -> None:
    """Leave what was computed to later calls, unless the model has changed meanwhile."""
    if use.guard.is_unchanged():
        use.store.add(use.rows, output.sequences, prefilled.target.buffer, prefilled.hidden_states, repeats)


# --- the result -------------------------------------------------------------------------------------------------------


def _returns_cache(config: Any, target: HFTarget) -> bool:
    return bool(config.return_dict_in_generate or target.keeps_cache)


def _build_result(config: Any, output: OutputBuffer, target: HFTarget) -> Any:
    """The return value of `_sample`: sequences, or a `GenerateDecoderOnlyOutput`."""
    sequences, scores, logits = output.result()
    cache = target.export_cache(output.steps) if _returns_cache(config, target) else None
    if not config.return_dict_in_generate:
        return sequences
    return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits, **{CACHE_ARGUMENT: cache})


def _count_tokens(stats: Stats, output: OutputBuffer) -> None:
    """Count the call and its output tokens, without padding."""
    lengths = output.output_lengths()
    stats.calls = 1
    stats.row_tokens = lengths
    stats.tokens = sum(lengths)
    stats.first_tokens = len(lengths)
