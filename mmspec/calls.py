"""Serves the calls of a patched model. The one place where all parts meet.

The wrapper calls the class's own `generate` with our decode loop as `custom_generate`, so that transformers prepares
inputs, encodes images and builds processors, and we own only the loop. What transformers drops on that path (streamer,
tokenizer, stop strings, the sizes and grids of images) is carried around it.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from mmspec import fallback
from mmspec.budget import Budget, Costs
from mmspec.columns import ColumnClock
from mmspec.engine import Loop
from mmspec.interfaces import Prompt
from mmspec.options import Options, per_call, reference_rows
from mmspec.sampling import Noise, Picker
from mmspec.stats import Stats
from mmspec.target_hf import Family, HFTarget
from mmspec.tree import BUCKETS

logger = logging.getLogger("mmspec")

NOISE_BYTES = 256 << 20
"""Most memory that the noise of columns in flight may take; rows too far ahead wait."""
NOISE_COLUMNS = 128

OFF: ContextVar[frozenset[int] | None] = ContextVar("mmspec_off", default=frozenset())
"""Ids of the models whose patch is out of force in this context; None: all."""


@dataclass
class Call:
    """What the wrapper knows of one call and transformers does not pass on."""

    options: Options
    began: float
    streamer: Any
    vision: Mapping[str, Any]
    repeats: int
    stats: Stats = field(default_factory=Stats)


class Patch:
    """The state of one patched model. Nothing here belongs to a call, so that threads may share the model."""

    def __init__(self, family: Family, options: Options, spec: Any, processor: Any) -> None:
        self.family, self.options, self.spec, self.processor = family, options, spec, processor
        self.attention: str | None = None  # the text model's kernel before `patch` switched it
        self.costs = Costs()
        self.total, self.last = Stats(), Stats()
        self.lock = threading.Lock()
        self._warned: set[str] = set()

    @property
    def model(self) -> Any:
        """The patched model."""
        return self.family.model

    def __deepcopy__(self, memo: dict[int, Any]) -> Patch:
        family = copy.copy(self.family)
        family.model = copy.deepcopy(self.model, memo)  # perhaps only half made yet, so nothing is asked of it
        twin = Patch(family, copy.deepcopy(self.options, memo), self.spec, self.processor)
        twin.attention, twin.costs = self.attention, copy.deepcopy(self.costs, memo)
        return twin

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """What `model.generate` does while patched."""
        began = time.perf_counter()
        chosen = kwargs.pop("mmspec", None)
        plain = functools.partial(type(self.model).generate, self.model)
        options, enabled = per_call(self.options, chosen, self.family)
        if not enabled or _is_off(self.model):
            return plain(*args, **kwargs)
        bound = inspect.signature(plain).bind(*args, **kwargs)
        arguments = {**bound.arguments, **bound.arguments.pop("kwargs", {})}
        look = fallback.settings(arguments, self.model)
        reason = fallback.before(arguments, self.model, look) or _distributed(self.model)
        if reason:
            stats = self._went_plain(reason, Stats())
            result = plain(**arguments)
            self._account(stats, began)
            return result
        call = Call(
            options=options,
            began=began,
            streamer=arguments.get("streamer"),
            vision={name: arguments[name] for name in self.family.vision_args if arguments.get(name) is not None},
            repeats=look("num_return_sequences") or 1,
        )
        result = plain(**_with_stop_strings(arguments, look), custom_generate=self._loop_of(call))
        self._account(call.stats, began)
        return result

    def _loop_of(self, call: Call) -> Any:
        """The function that transformers calls instead of its own loop."""

        def mmspec_loop(
            model: Any,
            input_ids: Tensor,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            **model_kwargs: Any,
        ) -> Any:
            pads = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
            reason = (
                fallback.inside(generation_config, model, model_kwargs, pads)
                or self.family.refusal()
                or HFTarget.refusal(self.family, model_kwargs)
            )
            if reason:
                self._went_plain(reason, call.stats)
                return type(model)._sample(
                    model,
                    input_ids,
                    logits_processor=logits_processor,
                    stopping_criteria=stopping_criteria,
                    generation_config=generation_config,
                    streamer=call.streamer,
                    **model_kwargs,
                )
            return self._decode(call, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)

        return mmspec_loop

    def _decode(
        self, call: Call, input_ids: Tensor, processors: Any, criteria: Any, config: Any, model_kwargs: dict[str, Any]
    ) -> Any:
        drafter = call.options.drafter
        entered = time.perf_counter()
        kind = "cpu" if self.model.device.type == "cpu" else "other"
        if self.costs.device != kind:  # the model was moved
            self.costs = Costs(kind)
        target = HFTarget(self.family, input_ids, model_kwargs, config, room=_room(config, input_ids))
        first, taps = target.prefill(drafter.needs.taps)
        call.stats.prefill_s = time.perf_counter() - entered
        wants_dict = config.return_dict_in_generate
        keep_cache = wants_dict or getattr(target.user_cache, "_is_user_defined", False)
        noise = _noise(config, first, input_ids)
        picker = Picker(processors, noise)
        strangers = picker.unknown
        if strangers:
            self._warn_once(f"{', '.join(strangers)}: called once per column as transformers does; not sped up")
            if noise is not None:
                noise.live = True
        pad = config._pad_token_tensor
        clock = ColumnClock(
            input_ids,
            criteria,
            pad=None if pad is None else int(pad),
            noise=noise,
            streamer=call.streamer,
            keep_scores=bool(wants_dict and config.output_scores),
            keep_logits=bool(wants_dict and config.output_logits),
            keep_cache=keep_cache,
            lockstep=bool(strangers),
        )
        prompt = self._prompt(call, input_ids, target, taps, first.shape[-1], clock, pad)
        allowed = torch.ones(first.shape[-1], dtype=torch.bool, device=input_ids.device)
        allowed[[token for token in prompt.banned if 0 <= token < allowed.shape[0]]] = False
        budget = Budget(
            self.costs,
            input_ids.shape[0],
            drafts=drafter.name != "none",
            fixed=call.options.fixed,
        )
        loop = Loop(target, drafter, clock, picker, budget, call.stats, allowed, call.began)
        try:
            loop.run(first, prompt)
        finally:
            if noise is not None and not noise.live:
                noise.settle(clock.columns - 1)
        if call.streamer is not None:
            call.streamer.end()
        self._count(call.stats, clock)
        sequences, scores, logits = clock.output()
        cache = target.close(clock.columns) if keep_cache else None
        if not wants_dict:
            return sequences
        return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits, past_key_values=cache)

    def _prompt(
        self, call: Call, input_ids: Tensor, target: HFTarget, taps: Any, vocab: int, clock: ColumnClock, pad: Any
    ) -> Prompt:
        family, batch = self.family, input_ids.shape[0]
        mask = target.kwargs.get("attention_mask")
        full = torch.ones_like(input_ids, dtype=torch.bool)
        visual = torch.isin(input_ids, torch.tensor(family.placeholders, device=input_ids.device))
        segments = family.segments(input_ids[:: call.repeats], call.vision) if taps else ()
        banned = set(family.placeholders)
        if pad is not None and int(pad) not in _ids(self.model.generation_config.eos_token_id):
            banned.add(int(pad))
        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        if tokenizer is not None:
            banned.update(range(len(tokenizer), vocab))
        return Prompt(
            ids=input_ids,
            padding=full if mask is None else mask[:, -input_ids.shape[1] :].bool(),
            visual=visual,
            positions=target.positions[..., -input_ids.shape[1] :],
            segments=tuple(
                replace(segment, row=segment.row * call.repeats + again)
                for segment in segments
                for again in range(call.repeats)
            ),
            taps=taps,
            vocab_size=vocab,
            banned=frozenset(banned),
            reference=reference_rows(call.options, tokenizer, batch, call.repeats),
            noise=None if clock.noise is None else clock.noise_ahead,
        )

    def _count(self, stats: Stats, clock: ColumnClock) -> None:
        """Tokens of the output, padding after a row's end not counted."""
        ends = clock.ends()
        stats.calls = 1
        stats.row_tokens = ends
        stats.tokens = sum(ends)
        stats.first_tokens = len(ends)

    def _went_plain(self, reason: str, stats: Stats) -> Stats:
        self._warn_once(f"{reason}: this call is decoded by transformers alone")
        stats.calls = stats.plain_calls = 1
        stats.fallback = reason
        return stats

    def _account(self, stats: Stats, began: float) -> None:
        stats.total_s = time.perf_counter() - began
        with self.lock:
            self.total.add(stats)
            self.last = stats

    def _warn_once(self, message: str) -> None:
        with self.lock:
            new = message not in self._warned
            self._warned.add(message)
        if new:
            logger.warning("mmspec: %s", message)


def _is_off(model: Any) -> bool:
    off = OFF.get()
    return off is None or id(model) in off


def _with_stop_strings(arguments: dict[str, Any], look: fallback.Setting) -> dict[str, Any]:
    """Turn stop strings, wherever they stand, into the criterion that transformers would have built."""
    strings, tokenizer = look("stop_strings"), arguments.get("tokenizer")
    if strings is None or tokenizer is None:
        return arguments
    own = list(arguments.get("stopping_criteria") or [])
    if not any(type(criterion) is StopStringCriteria for criterion in own):
        own.insert(0, StopStringCriteria(stop_strings=strings, tokenizer=tokenizer))
    arguments = arguments | {"stopping_criteria": StoppingCriteriaList(own), "stop_strings": None}
    if getattr(arguments.get("generation_config"), "stop_strings", None) is not None:
        arguments["generation_config"] = copy.deepcopy(arguments["generation_config"])
        arguments["generation_config"].stop_strings = None
    return arguments


def _noise(config: Any, first: Tensor, input_ids: Tensor) -> Noise | None:
    if not config.do_sample:
        return None
    batch, vocab = first.shape
    window = max(2, min(NOISE_COLUMNS, NOISE_BYTES // (4 * batch * vocab)))
    return Noise(batch, vocab, input_ids.device, window)


def _room(config: Any, input_ids: Tensor) -> int:
    """New positions that may be needed: to the length limit, and one tree."""
    most = config.max_length - input_ids.shape[1] if config.max_length is not None else 0
    return max(1, most) + BUCKETS[-1]


def _ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _distributed(model: Any) -> str | None:
    """Why ranks must decode in step, or None."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    from transformers.integrations import is_deepspeed_zero3_enabled
    from transformers.integrations.fsdp import is_fsdp_managed_module

    if torch.distributed.get_world_size() > 1 and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)):
        return "synced_gpus"
    return None
