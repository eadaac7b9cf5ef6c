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

from mmspec.config import Options, reference_rows
from mmspec.control.tree_size import Budget, Costs
from mmspec.cpu.linear import Packs, layers_of, packed
from mmspec.engine.loop import Loop
from mmspec.engine.output import ColumnClock, foreign
from mmspec.engine.sampler import Noise, Picker, Undo, unknown
from mmspec.engine.tree import DraftTree
from mmspec.interfaces import Drafter, Prompt, Verdict, Words
from mmspec.metrics.compression_stats import Watch
from mmspec.metrics.stats import Stats
from mmspec.targets.hf import Family, HFTarget
from mmspec.targets.module_scan import ModuleScan, scan
from mmspec.targets.vision_attention import Listening

NOISE_BYTES = 256 << 20
"""Most memory that the noise of columns in flight may take; rows too far ahead wait."""
NOISE_COLUMNS = 128
UNSAID = 1 << 39
"""Nobody said how many new tokens there may be, where there may be so many."""


class CannotServe(Exception):
    """Found out on the way: this call must be decoded by transformers alone. Nothing of it was touched."""


@dataclass
class Call:
    """What the wrapper knows of one call.

    Attributes:
        packs: how linear layers are computed fastest. costs: what rounds with this call's drafter cost.
        began: `time.perf_counter()` when `generate` was called.
        streamer, vision: arguments of `generate` that transformers does not pass on. repeats: rows per prompt.
        warn: tells the user something once. heard: what the vision tower was fed, if a compressor asks for it.
        modules: what the call's one pass over the modules found.
    """

    family: Family
    options: Options
    tokenizer: Any
    packs: Packs
    costs: Costs
    began: float
    streamer: Any
    vision: Mapping[str, Any]
    repeats: int
    warn: Callable[[str], None]
    heard: Listening | None = None
    modules: ModuleScan | None = None
    stats: Stats = field(default_factory=Stats)


@dataclass
class Prepared:
    """What transformers has made of the call: what its own `_sample` would be given."""

    input_ids: Tensor
    processors: Any
    criteria: Any
    config: Any
    model_kwargs: dict[str, Any]


def serve(call: Call, given: Prepared) -> Any:
    """Decode; returns what `GenerationMixin._sample` returns.

    Raises:
        CannotServe: the call has to go the plain way after all.
    """
    entered = time.perf_counter()
    watched = bool(call.streamer is not None or unknown(given.processors) or any(map(foreign, given.criteria)))
    modules = call.modules = call.modules or scan(call.family.model)
    target = HFTarget(
        call.family,
        given.input_ids,
        given.model_kwargs,
        given.config,
        _most(given),
        quiet=modules.quiet,
        watched=watched,
    )
    first, taps = _prefill(target, call.options.drafter)
    call.stats.prefill_s = time.perf_counter() - entered
    try:
        return _decode(call, given, target, first, taps)
    except BaseException:
        target.leave()
        raise


def _decode(call: Call, given: Prepared, target: HFTarget, first: Tensor, taps: dict[int, Tensor]) -> Any:
    """What follows the prefill, whose last logits [B, V] and states {index: [B, L, D]} are given."""
    input_ids, config = given.input_ids, given.config
    drafter, shows = call.options.drafter, call.options.shows
    most, watch = target.most, None if shows is None else Watch(shows)
    wants_dict = config.return_dict_in_generate
    keep_cache = bool(wants_dict or target.keeps_cache)
    noise = _noise(config, first, input_ids)
    picker = Picker(given.processors, noise)
    strangers = picker.unknown
    if strangers:
        call.warn(f"{', '.join(strangers)}: called once per column as transformers does; not sped up")
        if noise is not None:
            noise.live = True
    pad = config._pad_token_tensor
    clock = ColumnClock(
        input_ids,
        given.criteria,
        pad=None if pad is None else int(pad),
        noise=noise,
        streamer=call.streamer,
        keep_scores=bool(wants_dict and config.output_scores),
        keep_logits=bool(wants_dict and config.output_logits),
        keep_cache=keep_cache,
        lockstep=bool(strangers),
        show=target.show,
        written=target.lent.written,
    )

    def undo() -> Undo:
        return Undo(input_ids.device, target.device, noise=noise)

    if watch is not None and not _ours(watch.inner):
        watch.guard = undo
    prompt = _prompt(call, input_ids, target, taps, first.shape[-1], clock)
    prompt = replace(
        prompt,
        compressor=watch,
        answer=most if most < UNSAID else None,
        attended=_attended(call, prompt.visual),
    )
    loop = Loop(
        target=target,
        drafter=drafter if _ours(drafter) else _Quiet(drafter, undo),
        clock=clock,
        picker=picker,
        budget=Budget(
            call.costs,
            input_ids.shape[0],
            drafts=drafter.name != "none",
            most=drafter.needs.most,
            fixed=call.options.fixed,
        ),
        stats=call.stats,
        allowed=_allowed(prompt, call.family, input_ids.device),
        began=call.began,
        warn=call.warn,
    )
    try:
        fixed, copies = call.options.deterministic, bool(call.options.packed)
        with target.decoding(), packed(call.packs, _layers(call), fixed, copies):
            loop.run(first, prompt)
    finally:
        if noise is not None and not noise.live:
            noise.settle(clock.columns - 1)
    if call.streamer is not None:
        call.streamer.end()
    _count(call.stats, clock)
    if watch is not None:
        call.stats.saw(watch.rows())
    sequences, scores, logits = clock.output()
    cache = target.close(clock.columns) if keep_cache else None
    if not wants_dict:
        return sequences
    return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits, past_key_values=cache)


def _prefill(target: HFTarget, drafter: Drafter) -> tuple[Tensor, dict[int, Tensor]]:
    with Undo(target.device, target.input_ids.device) as undo:
        result = target.prefill(drafter.needs.taps)
    if undo.drew:
        raise CannotServe("a forward that draws random numbers")
    return result


def _prompt(call: Call, input_ids: Tensor, target: HFTarget, taps: Any, vocab: int, clock: ColumnClock) -> Prompt:
    family, repeats = call.family, call.repeats
    mask = target.kwargs.get("attention_mask")
    full = torch.ones_like(input_ids, dtype=torch.bool)
    segments = family.segments(input_ids[::repeats], call.vision) if taps else ()
    banned = set(family.placeholders)
    if target.config._pad_token_tensor is not None and clock.pad not in _ids(target.config.eos_token_id):
        banned.add(clock.pad)
    if call.tokenizer is not None:
        banned.update(range(len(call.tokenizer), vocab))
    return Prompt(
        ids=input_ids,
        padding=full if mask is None else mask[:, -input_ids.shape[1] :].bool(),
        visual=torch.isin(input_ids, torch.tensor(family.placeholders, device=input_ids.device)),
        positions=target.positions[..., -input_ids.shape[1] :],
        segments=tuple(
            replace(segment, row=segment.row * repeats + again) for segment in segments for again in range(repeats)
        ),
        taps=taps,
        vocab_size=vocab,
        banned=frozenset(banned),
        reference=reference_rows(call.options, call.tokenizer, input_ids.shape[0], repeats),
        noise=None if clock.noise is None else clock.noise_ahead,
        temperature=float(target.config.temperature or 1.0) if clock.noise is not None else 1.0,
        fixed=call.options.fixed is not None,
        words=Words(family.model.get_input_embeddings(), family.model.get_output_embeddings()),
    )


def _attended(call: Call, visual: Tensor) -> Tensor | None:
    """Of the rows of visual [B, L], of which each prompt has several; pictures were read once for each prompt."""
    found = call.family.attention_of(call.heard, visual[:: call.repeats], call.vision)
    return None if found is None else found.repeat_interleave(call.repeats, 0)


def _layers(call: Call) -> list[nn.Linear]:
    """The linear layers that the loop runs through and that may be computed in other ways (`mmspec.cpu.linear`)."""
    if call.options.packed is False or call.family.model.device.type != "cpu":
        return []
    roots: list[nn.Module] = [] if call.modules is None else list(call.modules.linears)
    roots += [part for part in vars(call.options.drafter).values() if isinstance(part, nn.Module)]
    return layers_of(roots)


def _allowed(prompt: Prompt, family: Family, device: torch.device) -> Tensor:
    """[V] bool, ids that may be drafted: not banned, and with an embedding (the head may have more rows)."""
    allowed = torch.ones(prompt.vocab_size, dtype=torch.bool, device=device)
    allowed[[token for token in prompt.banned if 0 <= token < prompt.vocab_size]] = False
    allowed[family.embedded :] = False
    return allowed


def _noise(config: Any, first: Tensor, input_ids: Tensor) -> Noise | None:
    if not config.do_sample:
        return None
    batch, vocab = first.shape
    window = max(2, min(NOISE_COLUMNS, NOISE_BYTES // (4 * batch * vocab)))
    return Noise(batch, vocab, input_ids.device, window)


def _most(given: Prepared) -> int:
    """New tokens that any row may be given."""
    lengths = [criterion.max_length for criterion in given.criteria if type(criterion) is MaxLengthCriteria]
    if given.config.max_length is not None:
        lengths.append(given.config.max_length)
    return max(1, ceil(min(lengths, default=1 << 40)) - given.input_ids.shape[1])


def _count(stats: Stats, clock: ColumnClock) -> None:
    """Tokens of the output, padding after a row's end not counted."""
    ends = clock.ends()
    stats.calls = 1
    stats.row_tokens = ends
    stats.tokens = sum(ends)
    stats.first_tokens = len(ends)


def _ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _ours(part: object) -> bool:
    return type(part).__module__.startswith("mmspec.")


class _Quiet:
    """Someone else's drafter, which must not leave a trace in the generator that tokens are sampled with."""

    def __init__(self, drafter: Drafter, undo: Callable[[], Undo]) -> None:
        self.drafter, self.undo = drafter, undo
        self.name, self.needs, self.vocab_size = drafter.name, drafter.needs, drafter.vocab_size

    def begin(self, prompt: Prompt) -> Any:
        with self.undo():
            return self.drafter.begin(prompt)

    def propose(self, state: Any, budget: int, live: Sequence[bool]) -> DraftTree:
        with self.undo():
            return self.drafter.propose(state, budget, live)

    def observe(self, state: Any, verdict: Verdict, taps: Mapping[int, Tensor]) -> None:
        with self.undo():
            self.drafter.observe(state, verdict, taps)
