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
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from mmspec import fallback
from mmspec.config import DrafterCache, SpecConfig, resolve_call_config
from mmspec.control.tree_size import CostModel
from mmspec.cpu.linear import LinearAutotuner
from mmspec.decode import CallContext, FallbackRequired, PreparedInputs, decode
from mmspec.interfaces import Drafter
from mmspec.metrics.stats import Stats
from mmspec.targets import selftest
from mmspec.targets.hf import HFTarget, ModelAdapter
from mmspec.targets.module_scan import ModuleScan, scan_modules

logger = logging.getLogger("mmspec")

DISABLED: ContextVar[frozenset[int] | None] = ContextVar("mmspec_off", default=frozenset())
"""Ids of the models whose patch is out of force in this context; None: all."""


class PatchState:
    """The state of one patched model. Nothing here belongs to a call, so that threads may share the model."""

    def __init__(self, family: ModelAdapter, options: SpecConfig, spec: Any, processor: Any) -> None:
        self.adapter, self.config, self.spec, self.processor = family, options, spec, processor
        self.original_attention: str | None = None  # the text model's kernel before `patch` switched it
        self.costs: dict[str, CostModel] = {}
        self.autotuner = LinearAutotuner()
        self.drafter_cache = DrafterCache()
        self.total, self.last = Stats(), Stats()
        self.lock = threading.Lock()
        self._testing = threading.Lock()
        self._tested: tuple[Any, str | None] | None = None
        self._warned: set[str] = set()

    @property
    def model(self) -> Any:
        """The patched model."""
        return self.adapter.model

    def __deepcopy__(self, memo: dict[int, Any]) -> PatchState:
        family = copy.copy(self.adapter)
        family.model = copy.deepcopy(self.model, memo)  # perhaps only half made yet, so nothing is asked of it
        twin = PatchState(family, copy.deepcopy(self.config, memo), self.spec, self.processor)
        twin.original_attention, twin.costs = self.original_attention, copy.deepcopy(self.costs, memo)
        return twin

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """What `model.generate` does while patched."""
        began = time.perf_counter()
        chosen = kwargs.pop("mmspec", None)
        plain = functools.partial(type(self.model).generate, self.model)
        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        options, enabled = resolve_call_config(self.config, chosen, self.adapter, tokenizer, self.drafter_cache)
        if not enabled or _is_off(self.model):
            return plain(*args, **kwargs)
        if (reason := fallback.reason_before_binding(self.model)) is not None:
            return self._plainly(reason, began, functools.partial(plain, *args, **kwargs))
        bound = inspect.signature(plain).bind(*args, **kwargs)
        more = bound.arguments.pop("kwargs", {})
        arguments = {**bound.arguments, **more}
        if arguments.get("custom_generate") is None:
            arguments.pop("custom_generate", None)
        look = fallback.option_getter(arguments, self.model)
        modules = scan_modules(self.model)
        reason = fallback.reason_before_prepare(arguments, self.model, look, modules) or _distributed(self.model)
        if reason:
            return self._plainly(reason, began, functools.partial(plain, **arguments))
        # Pictures are encoded before the loop starts, so what they are fed as is to be heard from here on.
        heard = self.adapter.attention_capture() if getattr(options.active_compressor, "attends", False) else None
        call = CallContext(
            adapter=self.adapter,
            config=options,
            tokenizer=tokenizer,
            autotuner=self.autotuner,
            costs=self.cost_model(options.drafter),
            start_time=began,
            streamer=arguments.get("streamer"),
            vision_inputs={
                name: arguments[name] for name in self.adapter.vision_args if arguments.get(name) is not None
            },
            num_return_sequences=look("num_return_sequences") or 1,
            warn=self._warn_once,
            attention_capture=heard,
            modules=modules,
        )
        with nullcontext() if heard is None else heard.active():
            result = plain(**_with_stop_strings(arguments, look), custom_generate=self._loop_of(call))
        self._account(call.stats, began)
        return result

    def _loop_of(self, call: CallContext) -> Any:
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
            given = PreparedInputs(input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
            reason: str | None = (
                fallback.reason_after_prepare(generation_config, model, model_kwargs, pads)
                or self.adapter.unsupported_reason()
                or HFTarget.unsupported_reason(self.adapter, input_ids, model_kwargs)
                or self._test(call.modules, model_kwargs, generation_config)
            )
            if reason is None:
                try:
                    return decode(call, given)
                except FallbackRequired as refusal:
                    reason = str(refusal)
            self._record_fallback(reason, call.stats)
            return type(model)._sample(
                model,
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                streamer=call.streamer,
                **model_kwargs,
            )

        return mmspec_loop

    def cost_model(self, drafter: Drafter) -> CostModel:
        """What this drafter and the rounds with its trees cost here."""
        kind = "cpu" if self.model.device.type == "cpu" else "other"
        with self.lock:
            costs = self.costs.get(drafter.name)
            if costs is None or costs.device != kind:  # the model was moved
                costs = self.costs[drafter.name] = CostModel(kind)
            return costs

    def _test(self, modules: ModuleScan | None, model_kwargs: dict[str, Any], config: Any) -> str | None:
        """The self-test of modules of unknown kind, once for each state of the model; why it failed, or None."""
        if modules is None or not modules.foreign:
            return None
        key = str(self.model.device), self.model.dtype, selftest.modules_fingerprint(modules.foreign)
        with self._testing:
            if self._tested is None or self._tested[0] != key:
                self._tested = key, selftest.failure_reason(self.adapter, modules.foreign, model_kwargs, config)
            return self._tested[1]

    def _plainly(self, reason: str, began: float, plain: Callable[[], Any]) -> Any:
        stats = self._record_fallback(reason, Stats())
        result = plain()
        self._account(stats, began)
        return result

    def _record_fallback(self, reason: str, stats: Stats) -> Stats:
        self._warn_once(f"{reason}: this call is decoded by transformers alone")
        stats.calls = stats.fallback_calls = 1
        stats.fallback_reason = reason
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
    off = DISABLED.get()
    return off is None or id(model) in off


def _with_stop_strings(arguments: dict[str, Any], look: fallback.OptionGetter) -> dict[str, Any]:
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


def _distributed(model: Any) -> str | None:
    """Why ranks must decode in step, or None."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    from transformers.integrations import is_deepspeed_zero3_enabled
    from transformers.integrations.fsdp import is_fsdp_managed_module

    if torch.distributed.get_world_size() > 1 and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)):
        return "synced_gpus"
    return None
