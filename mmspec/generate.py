"""`generate` of a patched model.

The wrapper calls the class's own `generate` with the decode loop as `custom_generate`: transformers prepares inputs,
encodes images and builds processors, mmspec replaces only the loop. Arguments that transformers does not pass to a
custom loop (streamer, tokenizer, stop strings, image sizes and grids) are passed in `CallContext`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from mmspec import fallback
from mmspec.call import CallContext, FallbackRequired, PicturesRequired, PrefixUse, PreparedInputs
from mmspec.config import DrafterCache, PatchArguments, SpecConfig, missing_hidden_states, resolve_call_config
from mmspec.costs import DrafterCosts
from mmspec.cpu.linear import LinearAutotuner
from mmspec.decode import decode
from mmspec.engine.guard import describe_code
from mmspec.engine.prefix import PrefixStore
from mmspec.engine.tree_cache import CACHE_ARGUMENT
from mmspec.interfaces import LearnableDrafter, SaliencyCompressor
from mmspec.learning.budget import DEFAULT_SHARE
from mmspec.learning.learner import Learner
from mmspec.learning.store import LearnedStore, model_fingerprint
from mmspec.metrics.learning_stats import LearningStats, SpeedCurve
from mmspec.metrics.stats import Stats
from mmspec.targets import selftest
from mmspec.targets.base import ModelAdapter
from mmspec.targets.hf import HFTarget
from mmspec.targets.lanes import LanePool
from mmspec.targets.module_scan import ModuleScan, scan_modules
from mmspec.targets.prompt_rows import PIXEL_INPUTS, describe_rows
from mmspec.targets.recurrent import target_class
from mmspec.targets.selftest import SelfTestResult, judge

logger = logging.getLogger("mmspec")

PER_CALL_INPUTS = ("use_cache", "cache_position", "logits_to_keep", "custom_generate")
"""Arguments of a model's forward that describe neither text nor media."""
DISABLED: ContextVar[frozenset[int] | None] = ContextVar("mmspec_off", default=frozenset())
"""`id()` of the models whose patch is disabled in this context; None: all."""


class PatchState:
    """The state of one patched model. It holds nothing of a single call, so that threads can share the model.

    Attributes:
        adapter: the model and its family.
        config: the options of `patch`.
        arguments: those of `patch`.
        original_attention: attention kernel of the text model before `patch` changed it, or None.
        had_capture_hooks: whether transformers had installed its hooks for hidden states before `patch`.
        costs: the measured costs of each drafter.
        autotuner: chooses the kernels of linear layers on CPU.
        lanes: what recorded rounds share.
        drafter_cache: drafters that calls selected by name.
        total, last: statistics of all calls and of the last call.
        curve: speed over the calls.
        learner: learns the drafter from the calls, or None.
        lock: held while `total`, `last` and `curve` change.
    """

    def __init__(self, adapter: ModelAdapter, config: SpecConfig, arguments: PatchArguments) -> None:
        self.adapter = adapter
        self.config = config
        self.arguments = arguments
        self.original_attention: str | None = None
        self.had_capture_hooks = False
        self.costs = DrafterCosts()
        self.autotuner = LinearAutotuner()
        self.lanes = LanePool(self._warn_once)
        self.drafter_cache = DrafterCache()
        self.prefixes = PrefixStore()
        self.total = Stats()
        self.last = Stats()
        self.curve = SpeedCurve()
        self.learner: Learner | None = None
        self.lock = threading.Lock()
        self._selftest_lock = threading.Lock()
        self._selftest_verdict: tuple[Any, str | None] | None = None  # (state of the model, reason of the failure)
        self._quiet_states: set[Hashable] = set()
        self._warned: set[str] = set()

    @property
    def model(self) -> Any:
        """The patched model."""
        return self.adapter.model

    @property
    def processor(self) -> Any:
        """The processor or tokenizer that was passed to `patch`, or None."""
        return self.arguments.processor

    def __deepcopy__(self, memo: dict[int, Any]) -> PatchState:
        adapter = copy.copy(self.adapter)
        adapter.model = copy.deepcopy(self.model, memo)  # may be incomplete at this point: do not read from it
        twin = PatchState(adapter, copy.deepcopy(self.config, memo), self.arguments)
        twin.original_attention = self.original_attention
        twin.costs = copy.deepcopy(self.costs, memo)
        return twin

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`model.generate` of the patched model."""
        start_time = time.perf_counter()
        call_options = kwargs.pop("mmspec", None)
        plain_generate = functools.partial(type(self.model).generate, self.model)
        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        config, enabled = resolve_call_config(self.config, call_options, self.adapter, tokenizer, self.drafter_cache)
        if not enabled or _is_disabled(self.model):
            return plain_generate(*args, **kwargs)
        if (reason := fallback.reason_before_binding(self.model)) is not None:
            return self._fall_back(reason, start_time, functools.partial(plain_generate, *args, **kwargs))
        arguments = _bind(plain_generate, args, kwargs)
        get_option = fallback.option_getter(arguments, self.model)
        modules = scan_modules(self.model)
        reason = fallback.reason_before_prepare(arguments, self.model, get_option, modules)
        reason = reason or _distributed_reason(self.model) or self._selftest_failure_reason(modules, arguments)
        reason = reason or missing_hidden_states(config.drafter, self.adapter)  # a model may be cut after `patch`
        if reason:
            return self._fall_back(reason, start_time, functools.partial(plain_generate, **arguments))
        use = self._find_prefix(config, arguments, modules)
        vision_args = self.adapter.vision_args
        # transformers encodes the images before it calls the loop, so attention is captured from here on.
        compressor = config.active_compressor
        uses_attention = isinstance(compressor, SaliencyCompressor) and compressor.attends
        capture = self.adapter.attention_capture() if uses_attention else None
        call = CallContext(
            adapter=self.adapter,
            spec_config=config,
            tokenizer=tokenizer,
            autotuner=self.autotuner,
            costs=self.costs.model(config.drafter, self.adapter),
            lanes=self.lanes,
            start_time=start_time,
            streamer=arguments.get("streamer"),
            vision_inputs={name: arguments[name] for name in vision_args if arguments.get(name) is not None},
            num_return_sequences=get_option("num_return_sequences") or 1,
            warn=self._warn_once,
            attention_capture=capture,
            modules=modules,
            quiet_states=self._quiet_states,
            media_inputs=_media_inputs(arguments, self.model) if config.drafter.requirements.media_inputs else {},
            learner=self.learner if config.learn and config.drafter is self.config.drafter else None,
            prefix_use=use,
        )
        with nullcontext() if capture is None else capture.active():
            arguments = _build_stop_string_criterion(arguments, get_option)
            given = arguments
            if use is not None and use.drops_media:
                given = {name: value for name, value in arguments.items() if name not in PIXEL_INPUTS}
            try:
                result = plain_generate(**given, custom_generate=self._custom_generate(call))
            except PicturesRequired as error:
                if arguments.get("streamer") is not None:
                    arguments["streamer"] = _AfterPrompt(arguments["streamer"])
                return self._fall_back(str(error), start_time, functools.partial(plain_generate, **arguments))
        self._record_call(call.stats, start_time)
        if config.fixed_tree_size is None:
            self.costs.count_call(config.drafter, self.adapter)
        if call.learner is not None:
            saved_s = call.costs.saved_s(len(call.stats.row_forwards), call.stats.drafted_rounds)
            num_updates = call.learner.num_updates
            call.learner.after_call(call.recording, call.stats.total_s, saved_s)
            if call.learner.num_updates > num_updates:
                call.costs.retry()
        return result

    def _find_prefix(self, config: SpecConfig, arguments: dict[str, Any], modules: ModuleScan) -> PrefixUse | None:
        """What earlier calls have computed of this call's prompts; None if it shares nothing with others."""
        model, adapter = self.model, self.adapter
        compressor = config.active_compressor
        if config.reuse_prefix is False or (isinstance(compressor, SaliencyCompressor) and compressor.attends):
            return None
        if modules.hook is not None or modules.foreign or torch.is_autocast_enabled(model.device.type):
            return None  # what they compute may change from call to call
        if target_class(adapter) is not HFTarget:
            return None
        scope = "" if config.reuse_prefix is True else str(config.reuse_prefix)
        rows = describe_rows(adapter, arguments, _media_inputs(arguments, model), scope)
        if rows is None:
            return None
        guard = self.prefixes.check(model)
        prefix = self.prefixes.find(rows, config.drafter.requirements.hidden_state_indices)
        verdict = None if prefix is None else self.prefixes.verdicts.get(prefix.needs_media)
        return PrefixUse(self.prefixes, rows, guard, None if verdict is False else prefix, verdict is True)

    def _custom_generate(self, call: CallContext) -> Any:
        """The function that transformers calls in place of its own loop (`custom_generate`)."""

        def mmspec_loop(
            model: Any,
            input_ids: Tensor,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            **model_kwargs: Any,
        ) -> Any:
            inputs = PreparedInputs(input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
            reason = self._reason_after_prepare(inputs)
            if reason is None:
                try:
                    return decode(call, inputs)
                except FallbackRequired as error:
                    reason = str(error)
            if call.prefix_use is not None and call.prefix_use.drops_media:
                raise PicturesRequired(reason)
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

    def _reason_after_prepare(self, inputs: PreparedInputs) -> str | None:
        """Why transformers must decode the prepared call, or None."""
        model_kwargs = inputs.model_kwargs
        pads = any(hasattr(criterion, "eos_token_id") for criterion in inputs.criteria)
        return (
            fallback.reason_after_prepare(inputs.generation_config, self.model, model_kwargs, pads)
            or self.adapter.unsupported_reason()
            or target_class(self.adapter).unsupported_reason(self.adapter, inputs.input_ids, model_kwargs)
        )

    def run_first_selftest(self) -> SelfTestResult | None:
        """The verdict on the model as it is now; None if calls would be decoded by transformers anyway, so that the
        test waits for a call that is not."""
        model = self.model
        if fallback.reason_before_binding(model) or model.device.type == "meta":
            return None
        modules = scan_modules(model)
        get_option = fallback.option_getter({}, model)
        reason = fallback.reason_before_prepare({}, model, get_option, modules) or _distributed_reason(model)
        if reason or modules.foreign or self.adapter.unsupported_reason():
            return None
        result = judge(self.adapter, self.processor)
        if result.is_conclusive:
            self._selftest_verdict = self._selftest_key(modules), result.failure
        return result

    def _selftest_key(self, modules: ModuleScan) -> tuple[Any, ...]:
        """What a verdict depends on, as far as it may change after `patch`."""
        # The code alone: what known modules do is known, and their weights and buffers are no matter of trees.
        return str(self.model.device), self.model.dtype, self.adapter.attention, describe_code(modules.foreign)

    def _selftest_failure_reason(self, modules: ModuleScan, arguments: dict[str, Any]) -> str | None:
        """Why the self-test failed on the model in its present state, or None. Runs once for each state."""
        if self.adapter.unsupported_reason():  # the call is decoded by transformers, with that reason
            return None
        key = self._selftest_key(modules)
        with self._selftest_lock:
            if self._selftest_verdict is None or self._selftest_verdict[0] != key:
                reason = self._find_selftest_failure(modules, arguments)
                self._selftest_verdict = self._selftest_key(modules), reason  # a first forward may pack weights
            return self._selftest_verdict[1]

    def _find_selftest_failure(self, modules: ModuleScan, arguments: dict[str, Any]) -> str | None:
        inputs = _prompt_inputs(arguments, self.model)
        if modules.foreign:
            return selftest.foreign_failure(self.adapter, modules.foreign, inputs)
        result = judge(self.adapter, self.processor)
        if not result.is_conclusive:  # the model rejects a prompt without an image: use the user's
            result = selftest.run_selftest(self.adapter, inputs)
        return None if result.passed else f"a failed self-test ({result.failure})"

    def _fall_back(self, reason: str, start_time: float, plain_generate: Callable[[], Any]) -> Any:
        """Let transformers decode the whole call."""
        stats = self._record_fallback(reason, Stats())
        result = plain_generate()
        self._record_call(stats, start_time)
        return result

    def _record_fallback(self, reason: str, stats: Stats) -> Stats:
        self._warn_once(f"{reason}: this call is decoded by transformers alone")
        stats.calls = stats.fallback_calls = 1
        stats.fallback_reason = reason
        return stats

    def _record_call(self, stats: Stats, start_time: float) -> None:
        stats.total_s = time.perf_counter() - start_time
        with self.lock:
            self.total.add(stats)
            self.last = stats
            self.curve.add(stats)

    def learning_stats(self) -> LearningStats:
        """State of online learning, and the speed over all calls."""
        learned = LearningStats() if self.learner is None else self.learner.stats()
        with self.lock:
            return replace(learned, curve=self.curve.points())

    def start_learning(self) -> None:
        """Learn the drafter of `patch` from the calls, from where an earlier process stopped.

        Only speed depends on it, so whatever prevents it is one warning.
        """
        drafter = self.config.drafter
        assert isinstance(drafter, LearnableDrafter)
        share = DEFAULT_SHARE if self.config.learn is True else float(self.config.learn)
        try:
            store = LearnedStore(model_fingerprint(self.model))
            self.learner = Learner(drafter, self.adapter.shared_embeddings, store, self._warn_once, share)
        except Exception as error:  # such as weights of a class that cannot be read one by one
            self._warn_once(f"the drafter does not learn ({type(error).__name__}: {error})")

    def _warn_once(self, message: str) -> None:
        with self.lock:
            is_new = message not in self._warned
            self._warned.add(message)
        if is_new:
            logger.warning("mmspec: %s", message)


class _AfterPrompt:
    """A streamer that has got the prompt already, for a call that is begun again."""

    def __init__(self, streamer: Any) -> None:
        self._streamer, self._has_prompt = streamer, False

    def put(self, value: Any) -> None:
        """Pass on all but the first, which is the prompt."""
        if self._has_prompt:
            self._streamer.put(value)
        self._has_prompt = True

    def end(self) -> None:
        """Pass on."""
        self._streamer.end()


def _is_disabled(model: Any) -> bool:
    disabled = DISABLED.get()
    return disabled is None or id(model) in disabled


@functools.lru_cache(maxsize=64)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def _bind(plain_generate: functools.partial[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `generate` by name, without a `custom_generate` of None."""
    bound = _signature(plain_generate.func).bind(*plain_generate.args, *args, **kwargs).arguments
    bound.pop(next(iter(bound)))  # the model
    var_kwargs = bound.pop("kwargs", {})
    arguments = {**bound, **var_kwargs}
    if arguments.get("custom_generate") is None:
        arguments.pop("custom_generate", None)
    return arguments


def _prompt_inputs(arguments: dict[str, Any], model: Any) -> dict[str, Any]:
    """The arguments of `generate` that describe the prompt."""
    cache_names = {CACHE_ARGUMENT, "past_key_values"}  # the older name is still accepted by newer transformers
    options = {*inspect.signature(type(model).generate).parameters, *cache_names, *vars(GenerationConfig())}
    inputs = {name: value for name, value in arguments.items() if name not in options and value is not None}
    if arguments.get("inputs") is not None:
        inputs["input_ids"] = arguments["inputs"]
    return inputs


def _media_inputs(arguments: dict[str, Any], model: Any) -> dict[str, Any]:
    """The arguments of `generate` that describe images and videos: those of the prompt that are not its text."""
    text = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "token_type_ids", *PER_CALL_INPUTS)
    return {name: value for name, value in _prompt_inputs(arguments, model).items() if name not in text}


def _build_stop_string_criterion(arguments: dict[str, Any], get_option: fallback.OptionGetter) -> dict[str, Any]:
    """Replace `stop_strings` by the criterion that transformers would build; it needs the tokenizer."""
    stop_strings = get_option("stop_strings")
    tokenizer = arguments.get("tokenizer")
    if stop_strings is None or tokenizer is None:
        return arguments
    criteria = list(arguments.get("stopping_criteria") or [])
    if not any(type(criterion) is StopStringCriteria for criterion in criteria):
        criteria.insert(0, StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer))
    arguments = arguments | {"stopping_criteria": StoppingCriteriaList(criteria), "stop_strings": None}
    if getattr(arguments.get("generation_config"), "stop_strings", None) is not None:
        arguments["generation_config"] = copy.deepcopy(arguments["generation_config"])
        arguments["generation_config"].stop_strings = None
    return arguments


def tensor_parallel_module(model: Any) -> str | None:
    """The first module whose weights are spread over ranks that compute it together, or None.

    Those of FSDP are gathered before a forward, and such calls have a reason of their own.
    """
    return None if _distributed_reason(model) else scan_modules(model).distributed


def _distributed_reason(model: Any) -> str | None:
    """Why the ranks must decode in lockstep (`synced_gpus`), or None."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    from transformers.integrations import is_deepspeed_zero3_enabled
    from transformers.integrations.fsdp import is_fsdp_managed_module

    if torch.distributed.get_world_size() > 1 and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)):
        return "synced_gpus"
    return None
