"""One call, from what transformers has prepared to what it would have returned: builds the parts and runs the loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from mmspec.config import SpecConfig, reference_rows
from mmspec.control.tree_size import CostModel, TreeSizeController
from mmspec.cpu.linear import LinearAutotuner, find_linear_layers, use_fast_linears
from mmspec.engine.loop import DecodeLoop
from mmspec.engine.output import OutputBuffer, is_user_code
from mmspec.engine.rng import RngGuard, SamplingNoise
from mmspec.engine.sampler import TreeSampler, unknown
from mmspec.engine.tree import DraftTree
from mmspec.interfaces import Drafter, Prompt, SharedEmbeddings, VerifyResult
from mmspec.metrics.compression_stats import RecordingCompressor
from mmspec.metrics.stats import Stats
from mmspec.targets.hf import HFTarget, ModelAdapter
from mmspec.targets.module_scan import ModuleScan, scan_modules
from mmspec.targets.vision_attention import AttentionCapture

NOISE_BYTES = 256 << 20
"""Most memory that the noise of columns in flight may take; rows too far ahead wait."""
NOISE_COLUMNS = 128
UNLIMITED = 1 << 39
"""Nobody said how many new tokens there may be, where there may be so many."""


class FallbackRequired(Exception):
    """Found out on the way: this call must be decoded by transformers alone. Nothing of it was touched."""


@dataclass
class CallContext:
    """What the wrapper knows of one call.

    Attributes:
        packs: how linear layers are computed fastest. costs: what rounds with this call's drafter cost.
        began: `time.perf_counter()` when `generate` was called.
        streamer, vision: arguments of `generate` that transformers does not pass on. repeats: rows per prompt.
        warn: tells the user something once. heard: what the vision tower was fed, if a compressor asks for it.
        modules: what the call's one pass over the modules found.
    """

    adapter: ModelAdapter
    config: SpecConfig
    tokenizer: Any
    autotuner: LinearAutotuner
    costs: CostModel
    start_time: float
    streamer: Any
    vision_inputs: Mapping[str, Any]
    num_return_sequences: int
    warn: Callable[[str], None]
    attention_capture: AttentionCapture | None = None
    modules: ModuleScan | None = None
    stats: Stats = field(default_factory=Stats)


@dataclass
class PreparedInputs:
    """What transformers has made of the call: what its own `_sample` would be given."""

    input_ids: Tensor
    processors: Any
    criteria: Any
    config: Any
    model_kwargs: dict[str, Any]


def decode(call: CallContext, given: PreparedInputs) -> Any:
    """Decode; returns what `GenerationMixin._sample` returns.

    Raises:
        CannotServe: the call has to go the plain way after all.
    """
    entered = time.perf_counter()
    watched = bool(call.streamer is not None or unknown(given.processors) or any(map(is_user_code, given.criteria)))
    modules = call.modules = call.modules or scan_modules(call.adapter.model)
    target = HFTarget(
        call.adapter,
        given.input_ids,
        given.model_kwargs,
        given.config,
        _most(given),
        inference_mode=modules.can_use_inference_mode,
        cache_is_observed=watched,
    )
    first, taps = _prefill(target, call.config.drafter)
    call.stats.prefill_s = time.perf_counter() - entered
    try:
        return _decode(call, given, target, first, taps)
    except BaseException:
        target.leave()
        raise


def _decode(call: CallContext, given: PreparedInputs, target: HFTarget, first: Tensor, taps: dict[int, Tensor]) -> Any:
    """What follows the prefill, whose last logits [B, V] and states {index: [B, L, D]} are given."""
    input_ids, config = given.input_ids, given.config
    drafter, shows = call.config.drafter, call.config.active_compressor
    most, watch = target.max_new_tokens, None if shows is None else RecordingCompressor(shows)
    wants_dict = config.return_dict_in_generate
    keep_cache = bool(wants_dict or target.keeps_cache)
    noise = _noise(config, first, input_ids)
    picker = TreeSampler(given.processors, noise)
    strangers = picker.unknown_processors
    if strangers:
        call.warn(f"{', '.join(strangers)}: called once per column as transformers does; not sped up")
        if noise is not None:
            noise.immediate = True
    pad = config._pad_token_tensor
    clock = OutputBuffer(
        input_ids,
        given.criteria,
        pad_token_id=None if pad is None else int(pad),
        noise=noise,
        streamer=call.streamer,
        return_scores=bool(wants_dict and config.output_scores),
        return_logits=bool(wants_dict and config.output_logits),
        return_cache=keep_cache,
        stepwise=bool(strangers),
        show=target.show,
        written=target.lent.written,
    )

    def undo() -> RngGuard:
        return RngGuard(input_ids.device, target.device, noise=noise)

    if watch is not None and not is_builtin(watch.inner):
        watch.context_factory = undo
    prompt = _prompt(call, input_ids, target, taps, first.shape[-1], clock)
    prompt = replace(
        prompt,
        compressor=watch,
        max_new_tokens=most if most < UNLIMITED else None,
        visual_saliency=_attended(call, prompt.visual_mask),
    )
    loop = DecodeLoop(
        target=target,
        drafter=drafter if is_builtin(drafter) else RngIsolatedDrafter(drafter, undo),
        output=clock,
        sampler=picker,
        controller=TreeSizeController(
            call.costs,
            input_ids.shape[0],
            drafts=drafter.name != "none",
            max_tree_size=drafter.requirements.max_tree_size,
            fixed_tree_size=call.config.fixed_tree_size,
        ),
        stats=call.stats,
        draftable=_allowed(prompt, call.adapter, input_ids.device),
        start_time=call.start_time,
        warn=call.warn,
    )
    try:
        fixed, copies = call.config.deterministic, bool(call.config.cpu_pack_weights)
        with target.decoding(), use_fast_linears(call.autotuner, _layers(call), fixed, copies):
            loop.run(first, prompt)
    finally:
        if noise is not None and not noise.immediate:
            noise.restore_rng(clock.steps - 1)
    if call.streamer is not None:
        call.streamer.end()
    _count(call.stats, clock)
    if watch is not None:
        call.stats.add_compression(watch.records())
    sequences, scores, logits = clock.result()
    cache = target.export_cache(clock.steps) if keep_cache else None
    if not wants_dict:
        return sequences
    return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits, past_key_values=cache)


def _prefill(target: HFTarget, drafter: Drafter) -> tuple[Tensor, dict[int, Tensor]]:
    with RngGuard(target.device, target.input_ids.device) as undo:
        result = target.prefill(drafter.requirements.hidden_state_indices)
    if undo.rng_was_used:
        raise FallbackRequired("a forward that draws random numbers")
    return result


def _prompt(
    call: CallContext, input_ids: Tensor, target: HFTarget, taps: Any, vocab: int, clock: OutputBuffer
) -> Prompt:
    family, repeats = call.adapter, call.num_return_sequences
    mask = target.kwargs.get("attention_mask")
    full = torch.ones_like(input_ids, dtype=torch.bool)
    segments = family.grids(input_ids[::repeats], call.vision_inputs) if taps else ()
    banned = set(family.media_token_ids)
    if target.config._pad_token_tensor is not None and clock.pad_token_id not in _ids(target.config.eos_token_id):
        banned.add(clock.pad_token_id)
    if call.tokenizer is not None:
        banned.update(range(len(call.tokenizer), vocab))
    return Prompt(
        input_ids=input_ids,
        attention_mask=full if mask is None else mask[:, -input_ids.shape[1] :].bool(),
        visual_mask=torch.isin(input_ids, torch.tensor(family.media_token_ids, device=input_ids.device)),
        position_ids=target.position_ids[..., -input_ids.shape[1] :],
        grids=tuple(
            replace(segment, row=segment.row * repeats + again) for segment in segments for again in range(repeats)
        ),
        hidden_states=taps,
        vocab_size=vocab,
        banned_ids=frozenset(banned),
        reference_ids=reference_rows(call.config, call.tokenizer, input_ids.shape[0], repeats),
        noise=None if clock.noise is None else clock.noise_ahead,
        temperature=float(target.config.temperature or 1.0) if clock.noise is not None else 1.0,
        static_shapes=call.config.fixed_tree_size is not None,
        shared_embeddings=SharedEmbeddings(family.model.get_input_embeddings(), family.model.get_output_embeddings()),
    )


def _attended(call: CallContext, visual: Tensor) -> Tensor | None:
    """Of the rows of visual [B, L], of which each prompt has several; pictures were read once for each prompt."""
    found = call.adapter.visual_saliency(
        call.attention_capture, visual[:: call.num_return_sequences], call.vision_inputs
    )
    return None if found is None else found.repeat_interleave(call.num_return_sequences, 0)


def _layers(call: CallContext) -> list[nn.Linear]:
    """The linear layers that the loop runs through and that may be computed in other ways (`mmspec.cpu.linear`)."""
    if call.config.cpu_pack_weights is False or call.adapter.model.device.type != "cpu":
        return []
    roots: list[nn.Module] = [] if call.modules is None else list(call.modules.linear_layers)
    roots += [part for part in vars(call.config.drafter).values() if isinstance(part, nn.Module)]
    return find_linear_layers(roots)


def _allowed(prompt: Prompt, family: ModelAdapter, device: torch.device) -> Tensor:
    """[V] bool, ids that may be drafted: not banned, and with an embedding (the head may have more rows)."""
    allowed = torch.ones(prompt.vocab_size, dtype=torch.bool, device=device)
    allowed[[token for token in prompt.banned_ids if 0 <= token < prompt.vocab_size]] = False
    allowed[family.num_embeddings :] = False
    return allowed


def _noise(config: Any, first: Tensor, input_ids: Tensor) -> SamplingNoise | None:
    if not config.do_sample:
        return None
    batch, vocab = first.shape
    window = max(2, min(NOISE_COLUMNS, NOISE_BYTES // (4 * batch * vocab)))
    return SamplingNoise(batch, vocab, input_ids.device, window)


def _most(given: PreparedInputs) -> int:
    """New tokens that any row may be given."""
    lengths = [criterion.max_length for criterion in given.criteria if type(criterion) is MaxLengthCriteria]
    if given.config.max_length is not None:
        lengths.append(given.config.max_length)
    return max(1, ceil(min(lengths, default=1 << 40)) - given.input_ids.shape[1])


def _count(stats: Stats, clock: OutputBuffer) -> None:
    """Tokens of the output, padding after a row's end not counted."""
    ends = clock.output_lengths()
    stats.calls = 1
    stats.row_tokens = ends
    stats.tokens = sum(ends)
    stats.first_tokens = len(ends)


def _ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def is_builtin(part: object) -> bool:
    return type(part).__module__.startswith("mmspec.")


class RngIsolatedDrafter:
    """Someone else's drafter, which must not leave a trace in the generator that tokens are sampled with."""

    def __init__(self, drafter: Drafter, undo: Callable[[], RngGuard]) -> None:
        self.drafter, self.undo = drafter, undo
        self.name, self.requirements, self.vocab_size = drafter.name, drafter.requirements, drafter.vocab_size

    def begin(self, prompt: Prompt) -> Any:
        with self.undo():
            return self.drafter.begin(prompt)

    def propose(self, state: Any, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        with self.undo():
            return self.drafter.propose(state, max_nodes, active)

    def observe(self, state: Any, result: VerifyResult, hidden_states: Mapping[int, Tensor]) -> None:
        with self.undo():
            self.drafter.observe(state, result, hidden_states)
