"""Requests that transformers decodes alone, and the reason: whatever the loop cannot reproduce exactly.

Reads settings only. A reason names the option, since it is logged once as a warning and stored in
`Stats.fallback_reason`. `mmspec.generate` asks for reasons in this order, the first one counts:

1. `reason_before_binding`: the model's class has a `generate` of its own.
2. `reason_before_prepare`: options and modules that are known before transformers prepares anything.
3. `reason_after_prepare`: the prepared generation config and model inputs.
4. `ModelAdapter.unsupported_reason`: attention, layer types and rotary scaling of the model.
5. `HFTarget.unsupported_reason`: the cache (`engine.tree_cache`) and the attention mask of the call.
6. `selftest.failure_reason`: modules of unknown classes, tested once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from mmspec.targets.module_scan import ModuleScan, callable_name, is_library_code, scan_modules

OptionGetter = Callable[[str], Any]
"""Name of a generation option -> its value in this call (keyword, else passed config, else the model's config)."""

_DECODING_MODES = {
    "num_beams": lambda value: value > 1,
    "num_beam_groups": lambda value: value > 1,
    "constraints": bool,
    "force_words_ids": bool,
    "penalty_alpha": lambda value: value > 0,
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


def option_getter(arguments: Mapping[str, Any], model: Any) -> OptionGetter:
    """A function that resolves options as transformers does: keyword, else the call's config, else the model's."""
    call_config = arguments.get("generation_config")

    def get_option(name: str) -> Any:
        if name in arguments:
            return arguments[name]
        value = getattr(call_config, name, None)
        return value if value is not None else getattr(model.generation_config, name, None)

    return get_option


def reason_before_binding(model: Any) -> str | None:
    """Reason to pass the call to the class's own `generate` unchanged, whatever its signature; or None."""
    generate = type(model).generate
    # Library models whose `generate` takes no prompt first (BLIP-2) run an inner model on embeddings.
    if is_library_code(generate) and "inputs" in inspect.signature(generate).parameters:
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
    if get_option("stop_strings") is not None and type(model).generate.__module__ != GENERATE_MODULE:
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
    if model.config.is_encoder_decoder:
        return "an encoder-decoder model"
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


def _is_transformers_method(model: Any, name: str) -> bool:
    """Whether a method is defined by a known library, for any model family."""
    method = getattr(type(model), name, None)
    own = model.__dict__.get(name)
    if own is not None and not (getattr(own, "__self__", None) is model and own.__func__ is method):
        return False  # PEFT restores a method as an attribute of the instance, which changes nothing
    return method is not None and is_library_code(method)
