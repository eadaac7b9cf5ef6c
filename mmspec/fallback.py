"""Which requests go the plain way, and why: what the loop cannot serve exactly, it does not serve.

Pure look-ups over settings; says the reason in the words of the option, so that the one warning names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

Setting = Callable[[str], Any]
"""Name of a generation option -> its value for this call (keyword, then passed config, then the model's config)."""

_MODES = {
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

_SAME_IN_TRAINING = (nn.Linear, nn.Embedding)
"""Modules that do the same in train mode; `resize_token_embeddings` leaves new ones in it."""

_METHODS = ("_sample", "_prefill", "_update_model_kwargs_for_generation", "prepare_inputs_for_generation")
"""What transformers' own loop calls and ours stands for, or calls in another order."""

_OUTPUTS = ("output_attentions", "output_hidden_states")


def settings(arguments: Mapping[str, Any], model: Any) -> Setting:
    """How transformers resolves an option: the call's keyword, else the call's config, else the model's."""
    passed = arguments.get("generation_config")

    def look(name: str) -> Any:
        if name in arguments:
            return arguments[name]
        value = getattr(passed, name, None)
        return value if value is not None else getattr(model.generation_config, name, None)

    return look


def before(arguments: Mapping[str, Any], model: Any, look: Setting) -> str | None:
    """Reason to leave the whole call to transformers, known before it prepares anything."""
    for name in ("custom_generate", "assistant_model", "inputs_embeds", "negative_prompt_ids"):
        if arguments.get(name) is not None:
            return name
    if arguments.get("synced_gpus"):
        return "synced_gpus"
    if any(module.training and type(module) not in _SAME_IN_TRAINING for module in model.modules()):
        return "train mode (call model.eval())"
    replaced = [name for name in _METHODS if not _is_transformers_own(model, name)]
    if replaced:
        return f"a {replaced[0]} of its own"
    if any(_is_compiled(module) for module in model.modules()):
        return "a compiled forward"
    for name, active in _MODES.items():
        value = look(name)
        if value is not None and active(value):
            return f"{name}={value!r}" if isinstance(value, (int, float, str)) else name
    if look("cache_implementation") == "paged":
        return "cache_implementation='paged'"
    return None


def inside(config: Any, model: Any, model_kwargs: Mapping[str, Any], pads: bool) -> str | None:
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
    module = getattr(getattr(type(model), name, None), "__module__", None) or ""
    return module.startswith("transformers.")


def _is_compiled(module: Any) -> bool:
    """Whether `module.compile()` or `torch.compile` was called: trees of many sizes would be compiled each time."""
    forward = module.__dict__.get("forward")
    return module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable")
