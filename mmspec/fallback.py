"""Requests that transformers decodes alone, and the reason: whatever the loop cannot reproduce exactly.

A reason names the option, since it is logged once as a warning (one that holds for all calls at `patch`) and stored in
`Stats.fallback_reason`. `FallbackPolicy` asks for reasons in this order, the first one counts:

1. `reason_before_binding`, asked by `PatchState.generate`: the model's class has a `generate` of its own.
2. `reason_before_prepare`: options and modules that are known before transformers prepares anything.
3. `distributed_reason`: ranks that must decode in lockstep.
4. The self-test, run once for each state of the model (`mmspec.targets.selftest`).
5. `missing_hidden_states`: layers that the drafter reads and the model has no more.
6. `ModelAdapter.unsupported_reason`: attention, layer types and rotary scaling of the model.
7. `reason_after_prepare`: the prepared generation config and model inputs.
8. `HFTarget.unsupported_reason`: cache (`engine.tree_cache`), attention mask, and a length beyond what one mask serves.
9. `mmspec.prefill`, by `FallbackRequired`: a forward that draws random numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mmspec.arguments import OptionGetter, option_getter, prompt_inputs, signature_of
from mmspec.call import Call
from mmspec.engine.revision import Revision
from mmspec.forks import new_lock
from mmspec.interfaces import Drafter
from mmspec.resolve import missing_hidden_states
from mmspec.targets import selftest
from mmspec.targets.base import ModelAdapter
from mmspec.targets.module_scan import ModuleScan, callable_name, is_library_code, scan_modules
from mmspec.targets.patched_class import own_generate
from mmspec.targets.recurrent import target_class
from mmspec.targets.selftest import SelfTestResult, judge

_DECODING_MODES = {
    "num_beams": lambda value: value != 1,
    "num_beam_groups": lambda value: value != 1,
    "constraints": bool,
    "force_words_ids": bool,
    "penalty_alpha": lambda value: value != 0,
    "dola_layers": bool,
    "prompt_lookup_num_tokens": lambda value: True,
    "assistant_early_exit": lambda value: True,
    "use_mtp": bool,
    "token_healing": bool,
    "guidance_scale": lambda value: value != 1,
    "watermarking_config": bool,
}
"""Options that select another decoding method, and the values that do."""

_METHODS = ("_sample", "_prefill", "_update_model_kwargs_for_generation", "prepare_inputs_for_generation")
"""Methods that the loop replaces or calls in another order; overridden ones might behave differently."""

GENERATE_MODULE = "transformers.generation.utils"
"""Python module of `GenerationMixin.generate`."""

_OUTPUTS = ("output_attentions", "output_hidden_states")


class FallbackPolicy:
    """Decides who decodes the calls of one patched model: the loop, or transformers alone, and why."""

    def __init__(self, adapter: ModelAdapter, processor: Any) -> None:
        """
        Args:
            adapter: of the model.
            processor: the model's processor or tokenizer, for the self-test; or None.
        """
        self._adapter = adapter
        self._processor = processor
        self._lock = new_lock()

    def before_prepare(
        self, arguments: dict[str, Any], modules: ModuleScan, revision: Revision, drafter: Drafter
    ) -> str | None:
        """Why transformers must decode a call, or None, before it prepares the call.

        Args:
            arguments: bound arguments of `generate`.
            modules: result of the scan over the model's modules.
            revision: of the model.
            drafter: of the call.
        """
        model = self._adapter.model
        return (
            reason_before_prepare(arguments, model, option_getter(arguments, model), modules)
            or distributed_reason(model)
            or self._selftest_failure_reason(modules, revision, arguments)
            or missing_hidden_states(drafter, self._adapter)  # a model may be cut after `patch`
        )

    def after_prepare(self, call: Call) -> str | None:
        """The same, once transformers has prepared the call."""
        adapter, model_kwargs = self._adapter, call.model_kwargs
        pads = call.criteria.has_eos
        return (
            adapter.unsupported_reason()
            or reason_after_prepare(call.generation_config, adapter.model, model_kwargs, pads)
            or (_padding_reason(call, adapter) if pads else None)
            or target_class(adapter).unsupported_reason(adapter, call.input_ids, model_kwargs, call.max_new_tokens)
        )

    def standing_reason(self) -> str | None:
        """Why transformers decodes every call of the model as it is now; None if it does not."""
        return reason_before_binding(self._adapter.model) or self._adapter.unsupported_reason()

    def run_first_selftest(self) -> SelfTestResult | None:
        """The verdict on the model as it is now; None if calls would be decoded by transformers anyway, so that the
        test waits for a call that is not."""
        model = self._adapter.model
        if self.standing_reason() or model.device.type == "meta":
            return None
        modules = scan_modules(model)
        if reason_before_prepare({}, model, option_getter({}, model), modules) or distributed_reason(model):
            return None
        return None if modules.foreign else judge(self._adapter, self._processor)

    def _selftest_failure_reason(
        self, modules: ModuleScan, revision: Revision, arguments: dict[str, Any]
    ) -> str | None:
        """Why the self-test failed on the model in its present state, or None. Runs once for each state."""
        if "self-test" not in revision and self._adapter.unsupported_reason():  # it falls back with that
            return None
        with self._lock:
            return revision.cached("self-test", lambda: self._find_selftest_failure(modules, arguments))

    def _find_selftest_failure(self, modules: ModuleScan, arguments: dict[str, Any]) -> str | None:
        inputs = prompt_inputs(arguments, self._adapter.model)
        if modules.foreign:
            return selftest.foreign_failure(self._adapter, modules.foreign, inputs)
        result = judge(self._adapter, self._processor)
        if not result.is_conclusive:  # the model rejects a prompt without an image: use the user's
            result = selftest.run_selftest(self._adapter, inputs)
        return None if result.passed else f"a failed self-test ({result.failure})"


def reason_before_binding(model: Any) -> str | None:
    """Reason to pass the call to the class's own `generate` unchanged, whatever its signature; or None."""
    generate = own_generate(model)
    # Library models whose `generate` takes no prompt first (BLIP-2) run an inner model on embeddings.
    if is_library_code(generate) and "inputs" in signature_of(generate).parameters:
        return None
    return f"a generate of its own ({type(model).__name__})"


def reason_before_prepare(
    arguments: Mapping[str, Any], model: Any, get_option: OptionGetter, modules: ModuleScan | None = None
) -> str | None:
    """Reason that is known before transformers prepares the call; or None.

    Args:
        arguments: bound arguments of `generate`.
        model: the patched model.
        get_option: of `option_getter`.
        modules: result of `scan_modules(model)`; computed if None.
    """
    for name in ("custom_generate", "assistant_model", "inputs_embeds", "negative_prompt_ids"):
        if arguments.get(name) is not None:
            return name
    if arguments.get("synced_gpus"):
        return "synced_gpus"
    reason = _model_reason(model, scan_modules(model) if modules is None else modules)
    if reason is not None:
        return reason
    for name, is_active in _DECODING_MODES.items():
        value = get_option(name)
        if value is not None and is_active(value):
            return f"{name}={value!r}" if isinstance(value, (int, float, str)) else name
    if get_option("stop_strings") is not None and own_generate(model).__module__ != GENERATE_MODULE:
        return "stop_strings with a generate of its own"  # the wrapper replaces them, which it might undo
    if get_option("cache_implementation") == "paged":
        return "cache_implementation='paged'"
    return None


def _model_reason(model: Any, modules: ModuleScan) -> str | None:
    """Reason that lies in the model's methods or modules; or None."""
    if modules.training is not None:
        return f"train mode of {modules.training}; call model.eval()"
    overridden = [name for name in _METHODS if not _is_transformers_method(model, name)]
    if overridden:
        return f"a {overridden[0]} of its own ({callable_name(getattr(model, overridden[0]))})"
    if modules.compiled:  # every tree size would be compiled anew
        return "a compiled forward"
    if modules.hook is not None:
        return f"{modules.hook}, which may act on a position or count its calls"
    if modules.distributed is not None:  # trees of another size on each rank
        return f"distributed weights of {modules.distributed}"
    if modules.quantised_activations is not None:
        return f"quantised activations of {modules.quantised_activations}, which amplify differences of rounding"
    return None


def reason_after_prepare(config: Any, model: Any, model_kwargs: Mapping[str, Any], pads: bool) -> str | None:
    """Reason that is known once transformers has prepared the call; or None.

    Args:
        config: the prepared generation config.
        model: the patched model.
        model_kwargs: the prepared model inputs.
        pads: whether finished rows emit padding (there is an eos criterion).
    """
    if getattr(config, "is_assistant", False):
        return "an assistant model"
    if not config.use_cache:
        return "use_cache=False"
    if config.prefill_chunk_size is not None:
        return "prefill_chunk_size"
    for name in _OUTPUTS:
        if getattr(config, name, None) or model_kwargs.get(name):
            return name
    if model_kwargs.get("inputs_embeds") is not None:
        return "inputs_embeds"
    if model_kwargs.get("position_ids") is None:
        return "a model without position ids"
    if pads and getattr(config, "_pad_token_tensor", None) is None:
        return "an eos criterion without a pad token"
    return None


def _padding_reason(call: Call, adapter: ModelAdapter) -> str | None:
    """Why finished rows cannot be padded while others go on, which ends plain `generate`; or None."""
    pad_token = int(call.generation_config._pad_token_tensor)
    if len(call.input_ids) == 1 or 0 <= pad_token < adapter.num_embeddings:
        return None
    return f"pad_token_id={pad_token}, which has no embedding"


def _is_transformers_method(model: Any, name: str) -> bool:
    """Whether a method is defined by a known library, for any model family."""
    method = getattr(type(model), name, None)
    own = model.__dict__.get(name)
    if own is not None and not (getattr(own, "__self__", None) is model and own.__func__ is method):
        return False  # PEFT restores a method as an attribute of the instance, which changes nothing
    return method is not None and is_library_code(method)


def tensor_parallel_module(model: Any) -> str | None:
    """The first module whose weights are spread over ranks that compute it together, or None.

    Those of FSDP are gathered before a forward, and such calls have a reason of their own.
    """
    return None if distributed_reason(model) else scan_modules(model).distributed


def distributed_reason(model: Any) -> str | None:
    """Why the ranks must decode in lockstep (`synced_gpus`), or None."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    from transformers.integrations import is_deepspeed_zero3_enabled
    from transformers.integrations.fsdp import is_fsdp_managed_module

    if torch.distributed.get_world_size() > 1 and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)):
        return "synced_gpus"
    return None
