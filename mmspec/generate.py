"""`generate` of a patched model.

    decide   the loop, or transformers alone, and why      `FallbackPolicy` (mmspec.fallback)
    run      transformers' own `generate`, with the loop   `PatchState.generate`; the loop is `decode` (mmspec.decode)
             in place of `_sample`

The wrapper calls the class's own `generate` with the decode loop as `custom_generate`: transformers prepares inputs,
encodes images and builds processors, mmspec replaces only the loop. Arguments that transformers does not pass to a
custom loop (streamer, tokenizer, stop strings, image sizes and grids) are passed in `CallPlan`.
"""

from __future__ import annotations

import copy
import functools
import logging
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from mmspec.arguments import bind_arguments, build_stop_string_criterion, media_inputs, option_getter
from mmspec.call import Call, CallPlan, FallbackRequired, PicturesRequired
from mmspec.config import PatchArguments, SpecConfig, resolve_call_config
from mmspec.costs import DrafterCosts, load_kernel_choices, store_kernel_choices
from mmspec.cpu.huge_pages import HugePages
from mmspec.cpu.linear import LinearAutotuner
from mmspec.decode import decode
from mmspec.engine.criteria import StepCriteria, max_steps
from mmspec.engine.prefix import PrefixStore
from mmspec.engine.revision import Revision
from mmspec.engine.sampler import user_code
from mmspec.engine.undo import undo_lost, undone
from mmspec.fallback import FallbackPolicy, reason_before_binding
from mmspec.forks import new_lock, note_threads
from mmspec.interfaces.target import own_copies
from mmspec.metrics.stats import Stats
from mmspec.resolve import DrafterCache
from mmspec.reuse import after_prompt, find_prefix
from mmspec.targets.base import ModelAdapter
from mmspec.targets.lanes import LanePool
from mmspec.targets.model_state import ModelState
from mmspec.targets.module_scan import ModuleScan
from mmspec.targets.patched_class import own_generate
from mmspec.targets.prompt_rows import PIXEL_INPUTS
from mmspec.targets.quantised_copy import drop_copies

logger = logging.getLogger("mmspec")

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
        huge_pages: moves the weights into huge pages.
        model_state: what a scan of its modules has found.
        lanes: what recorded rounds share.
        prefixes: what calls with `reuse_prefix` leave to later ones.
        drafter_cache: drafters that calls selected by name.
        total, last: statistics of all calls and of the last call.
        policy: decides whether transformers must decode a call.
        lock: held while `total` and `last` change.
    """

    def __init__(self, adapter: ModelAdapter, config: SpecConfig, arguments: PatchArguments) -> None:
        self.adapter = adapter
        self.config = config
        self.arguments = arguments
        self.original_attention: str | None = None
        self.had_capture_hooks = False
        self.costs = DrafterCosts()
        self.autotuner = LinearAutotuner()
        self.huge_pages = HugePages()
        self.model_state = ModelState()
        self.lanes = LanePool(self._warn_once)
        self.drafter_cache = DrafterCache()
        self.prefixes = PrefixStore()
        self.total = Stats()
        self.last = Stats()
        self.policy = FallbackPolicy(adapter, arguments.processor)
        self.lock = new_lock()
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
        drop_copies(adapter)
        adapter.model = copy.deepcopy(self.model, memo)  # may be incomplete at this point: do not read from it
        twin = PatchState(adapter, copy.deepcopy(self.config, memo), self.arguments)
        twin.original_attention = self.original_attention
        twin.costs = copy.deepcopy(self.costs, memo)
        return twin

    @undone
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`model.generate` of the patched model."""
        undo_lost()
        note_threads()
        start_time = time.perf_counter()
        call_options = kwargs.pop("mmspec", None)
        plain_generate = functools.partial(own_generate(self.model), self.model)
        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        config, enabled = resolve_call_config(self.config, call_options, self.adapter, tokenizer, self.drafter_cache)
        if not enabled or _is_disabled(self.model):
            return plain_generate(*args, **kwargs)
        if (reason := reason_before_binding(self.model)) is not None:
            return self._fall_back(reason, start_time, functools.partial(plain_generate, *args, **kwargs))
        arguments = bind_arguments(plain_generate, args, kwargs)
        modules, revision = self.model_state.now(self.adapter)
        if (reason := self.policy.before_prepare(arguments, modules, revision, config.drafter)) is not None:
            return self._fall_back(reason, start_time, functools.partial(plain_generate, **arguments))
        load_kernel_choices(self.autotuner.choices)
        plan, stats = self._plan(config, arguments, modules, revision, tokenizer, start_time), Stats()
        arguments = build_stop_string_criterion(arguments, option_getter(arguments, self.model))
        given = arguments
        if plan.prefix_use is not None and plan.prefix_use.drops_media:
            given = {name: value for name, value in arguments.items() if name not in PIXEL_INPUTS}
        try:
            result = plain_generate(**given, custom_generate=self._custom_generate(plan, stats))
        except PicturesRequired as error:
            arguments["streamer"] = after_prompt(arguments.get("streamer"))
            return self._fall_back(str(error), start_time, functools.partial(plain_generate, **arguments))
        self._record_call(stats, start_time)
        store_kernel_choices(self.autotuner.choices)
        if config.fixed_tree_size is None:
            self.costs.count_call(config.drafter, self.adapter)
        return result

    def _plan(
        self,
        config: SpecConfig,
        arguments: dict[str, Any],
        modules: ModuleScan,
        revision: Revision,
        tokenizer: Any,
        start_time: float,
    ) -> CallPlan:
        """What is known of a call that the loop decodes."""
        vision_args, needs = self.adapter.layout.vision_args, config.drafter.requirements
        repeats = max(1, option_getter(arguments, self.model)("num_return_sequences") or 1)
        unknown = self.model_state.unknown_code(self.adapter, modules)
        return CallPlan(
            adapter=self.adapter,
            config=config,
            tokenizer=tokenizer,
            autotuner=self.autotuner,
            economy=self.costs.economy(config.drafter, self.adapter),
            lanes=self.lanes,
            start_time=start_time,
            streamer=arguments.get("streamer"),
            vision_inputs={name: arguments[name] for name in vision_args if arguments.get(name) is not None},
            num_return_sequences=repeats,
            warn=self._warn_once,
            modules=modules,
            revision=revision,
            unknown_code=unknown,
            media_inputs=own_copies(media_inputs(arguments, self.model)) if needs.media_inputs and repeats == 1 else {},
            prefix_use=None if unknown else find_prefix(self.prefixes, self.adapter, config, arguments, modules),
            huge_pages=self.huge_pages,
        )

    def _custom_generate(self, plan: CallPlan, stats: Stats) -> Any:
        """The function that transformers calls in place of its own loop (`custom_generate`)."""

        def mmspec_loop(
            model: Any,
            input_ids: Tensor,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            **model_kwargs: Any,
        ) -> Any:
            criteria, limit = StepCriteria(stopping_criteria, input_ids), generation_config.max_length
            call = Call(
                plan,
                input_ids,
                logits_processor,
                criteria,
                generation_config,
                model_kwargs,
                stats,
                min(criteria.max_steps, max_steps([] if limit is None else [limit], input_ids.shape[-1])),
                plan.streamer is not None or criteria.has_user_code or bool(user_code(logits_processor)),
            )
            reason = self.policy.after_prepare(call)
            if reason is None:
                try:
                    return decode(call)
                except FallbackRequired as error:
                    reason = str(error)
            if plan.prefix_use is not None and plan.prefix_use.drops_media:
                raise PicturesRequired(reason)
            self._record_fallback(reason, stats)
            return type(model)._sample(
                model,
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                streamer=plan.streamer,
                **model_kwargs,
            )

        return mmspec_loop

    def _fall_back(self, reason: str, start_time: float, plain_generate: Callable[[], Any]) -> Any:
        """Let transformers decode the whole call."""
        stats = self._record_fallback(reason, Stats())
        result = plain_generate()
        self._record_call(stats, start_time)
        return result

    def _record_fallback(self, reason: str, stats: Stats) -> Stats:
        self.warn_fallback(reason)
        stats.calls = stats.fallback_calls = 1
        stats.fallback_reason = reason
        return stats

    def _record_call(self, stats: Stats, start_time: float) -> None:
        stats.total_s = time.perf_counter() - start_time
        with self.lock:
            self.total.add(stats)
            self.last = stats

    def warn_fallback(self, reason: str) -> None:
        """Say once why transformers decodes a call, or all of them."""
        self._warn_once(f"{reason}: decoded by transformers alone")

    def _warn_once(self, message: str) -> None:
        with self.lock:
            is_new = message not in self._warned
            self._warned.add(message)
        if is_new:
            logger.warning("mmspec: %s", message)


def _is_disabled(model: Any) -> bool:
    disabled = DISABLED.get()
    return disabled is None or id(model) in disabled
