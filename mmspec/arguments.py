"""The arguments of one call of `generate`, by name, and those that transformers does not pass to a custom loop."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers import GenerationConfig
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from mmspec.engine.tree_cache import CACHE_ARGUMENT
from mmspec.targets.patched_class import own_generate

OptionGetter = Callable[[str], Any]
"""Name of a generation option -> its value in this call (keyword, else passed config, else the model's config)."""
PER_CALL_INPUTS = ("use_cache", "cache_position", "logits_to_keep", "custom_generate")
"""Arguments of a model's forward that describe neither text nor media."""


@functools.lru_cache(maxsize=64)
def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """`inspect.signature`, found once for a function."""
    return inspect.signature(function)


def bind_arguments(
    plain_generate: functools.partial[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of `generate` by name, without a `custom_generate` of None."""
    bound = signature_of(plain_generate.func).bind(*plain_generate.args, *args, **kwargs).arguments
    bound.pop(next(iter(bound)))  # the model
    var_kwargs = bound.pop("kwargs", {})
    arguments = {**bound, **var_kwargs}
    if arguments.get("custom_generate") is None:
        arguments.pop("custom_generate", None)
    return arguments


def prompt_inputs(arguments: dict[str, Any], model: Any) -> dict[str, Any]:
    """The arguments of `generate` that describe the prompt."""
    cache_names = {CACHE_ARGUMENT, "past_key_values"}  # the older name is still accepted by newer transformers
    options = {*signature_of(own_generate(model)).parameters, *cache_names, *vars(GenerationConfig())}
    inputs = {name: value for name, value in arguments.items() if name not in options and value is not None}
    if arguments.get("inputs") is not None:
        inputs["input_ids"] = arguments["inputs"]
    return inputs


def media_inputs(arguments: dict[str, Any], model: Any) -> dict[str, Any]:
    """The arguments of `generate` that describe images and videos: those of the prompt that are not its text."""
    text = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "token_type_ids", *PER_CALL_INPUTS)
    return {name: value for name, value in prompt_inputs(arguments, model).items() if name not in text}


def build_stop_string_criterion(arguments: dict[str, Any], get_option: OptionGetter) -> dict[str, Any]:
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


def option_getter(arguments: Mapping[str, Any], model: Any) -> OptionGetter:
    """A function that resolves options as transformers does: keyword, else the call's config, else the model's."""
    call_config = arguments.get("generation_config")

    def get_option(name: str) -> Any:
        if name in arguments:
            return arguments[name]
        value = getattr(call_config, name, None)
        return value if value is not None else getattr(model.generation_config, name, None)

    return get_option
