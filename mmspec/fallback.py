"""Which requests go the plain way, and why: what the loop cannot serve exactly, it does not serve.

Pure look-ups over settings; says the reason in the words of the option, so that the one warning names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mmspec.targets.module_scan import ModuleScan, is_library_code, scan_modules

OptionGetter = Callable[[str], Any]
"""Name of a generation option -> its value for this call (keyword, then passed config, then the model's config)."""

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
"""Options that choose another way of decoding, and when."""

_METHODS = ("_sample", "_prefill", "_update_model_kwargs_for_generation", "prepare_inputs_for_generation")
"""What transformers' own loop calls and ours stands for, or calls in another order."""

_OUTPUTS = ("output_attentions", "output_hidden_states")


def option_getter(arguments: Mapping[str, Any], model: Any) -> OptionGetter:
    """How transformers resolves an option: the call's keyword, else the call's config, else the model's."""
    passed = arguments.get("generation_config")

    def look(name: str) -> Any:
        if name in arguments:
            return arguments[name]
        value = getattr(passed, name, None)
        return value if value is not None else getattr(model.generation_config, name, None)

    return look


def reason_before_binding(model: Any) -> str | None:
    """Reason to call the class's `generate` with the arguments just as they are, whatever its signature; or None."""
    return None if is_library_code(type(model).generate) else f"a generate of its own ({type(model).__name__})"


def reason_before_prepare(
    arguments: Mapping[str, Any], model: Any, look: OptionGetter, modules: ModuleScan | None = None
) -> str | None:
    """Reason to leave the whole call to transformers, known before it prepares anything.

    Args:
        modules: what a pass over the model's modules found; made here if not given.
    """
    for name in ("custom_generate", "assistant_model", "inputs_embeds", "negative_prompt_ids"):
        if arguments.get(name) is not None:
            return name
    if arguments.get("synced_gpus"):
        return "synced_gpus"
    modules = scan_modules(model) if modules is None else modules
    if modules.training is not None:
        return f"train mode of {modules.training}; call model.eval()"
    replaced = [name for name in _METHODS if not _is_transformers_own(model, name)]
    if replaced:
        return f"a {replaced[0]} of its own"
    if modules.compiled:  # trees of many sizes would be compiled each time
        return "a compiled forward"
    if modules.hook is not None:
        return f"{modules.hook}, which may act on a position or count its calls"
    for name, active in _DECODING_MODES.items():
        value = look(name)
        if value is not None and active(value):
            return f"{name}={value!r}" if isinstance(value, (int, float, str)) else name
    if look("cache_implementation") == "paged":
        return "cache_implementation='paged'"
    return None


def reason_after_prepare(config: Any, model: Any, model_kwargs: Mapping[str, Any], pads: bool) -> str | None:
    """Reason to hand what transformers has prepared to its own loop.

    Args:
        config: the prepared generation config. pads: whether finished rows emit padding (an eos criterion exists).
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


def _is_transformers_own(model: Any, name: str) -> bool:
    """Whether a method is as transformers wrote it, for any family."""
    if name in model.__dict__:
        return False
    method = getattr(type(model), name, None)
    return method is not None and is_library_code(method)
