"""Types and ranges of a drafter's `config.json`, checked before any of it is used; errors name the key.

A config is data from elsewhere: a value of another type, a huge number or deep nesting must end as a `ValueError`, not
as whatever the code behind it runs into. Knows JSON values only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

MAX_SIZE = 1 << 24
"""Largest dimension: larger ones cannot belong to a head, and products of two of them still fit into 64 bits."""
MAX_LAYERS = 4096
MAX_DEPTH = 32
"""Levels of objects and lists in a config; published ones have 4."""

_SIZE = (1, MAX_SIZE)
_OPTIONAL_SIZE = (0, MAX_SIZE)
INTEGERS: dict[str, tuple[int, int]] = {
    "hidden_size": _SIZE,
    "intermediate_size": _OPTIONAL_SIZE,
    "num_attention_heads": _SIZE,
    "num_key_value_heads": _SIZE,
    "vocab_size": _SIZE,
    "draft_vocab_size": _OPTIONAL_SIZE,
    "target_hidden_size": _OPTIONAL_SIZE,
    "head_dim": _OPTIONAL_SIZE,
    "block_size": (1, MAX_SIZE),
    "block_ffn_size": _OPTIONAL_SIZE,
    "markov_rank": _OPTIONAL_SIZE,
    "max_tokens": (1, MAX_SIZE),
    "layers": (0, MAX_LAYERS),
    "num_layers": (0, MAX_LAYERS),
    "num_hidden_layers": (1, MAX_LAYERS),
}
"""Key -> smallest and largest value."""
FLOATS: dict[str, tuple[float, float]] = {
    "rms_norm_eps": (0.0, 1.0),
    "input_embedding_scale": (1e-6, 1e6),
    "partial_rotary_factor": (1e-6, 1.0),
    "rope_theta": (1e-6, 1e18),
}
OBJECTS = (
    "target", "facts", "compressor", "rope_scaling", "rope_parameters", "transformer_layer_config", "dflash_config",
    "eagle_config", "speculators_config",
)  # fmt: skip
STRINGS = (
    "model_type", "kind", "rule", "architecture", "visual_mode", "speculators_model_type", "tokenizer", "rope_type",
    "type", "name",
)  # fmt: skip
BOOLEANS = (
    "bias", "qkv_bias", "input_norm", "norm_before_residual", "layer_mixture",
    "confidence_head", "sample_from_anchor", "use_swa", "causal", "is_causal", "sliding_window_non_causal",
    "rope_is_neox_style", "is_neox_style", "norm_before_fc", "fc_norm", "norm_output",
    "mrope_interleaved",
)  # fmt: skip
LAYER_LISTS = (
    "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids", "hidden_state_layers",
    "mrope_section",
)  # fmt: skip
MAY_BE_EMPTY = ("hidden_state_layers", "mrope_section")
"""Of these, for the default."""
NESTED = (
    "target", "rope_scaling", "rope_parameters", "transformer_layer_config", "compressor", "dflash_config",
    "eagle_config",
)  # fmt: skip
"""Objects whose keys are checked by the same rules."""


def parse_json(text: str) -> object:
    """`json.loads` whose errors are all a `ValueError`, also for deep nesting and numbers of many digits.

    Raises:
        ValueError: no JSON, or nested deeper than `MAX_DEPTH`.
    """
    try:
        values: object = json.loads(text)
        if _depth(values) <= MAX_DEPTH:
            return values
    except RecursionError:
        pass
    raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")


def _depth(value: object) -> int:
    """Levels of objects and lists."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if children is None else 1 + max(map(_depth, children), default=0)


def check_config(values: Mapping[str, Any], prefix: str = "") -> None:
    """Check the type and range of every known key; unknown keys and None are left alone.

    Args:
        prefix: the path of keys to `values`, for messages.

    Raises:
        ValueError: names the key, the rule and the value.
    """
    for key, value in values.items():
        if value is None:
            continue
        if (rule := _broken_rule(key, value, not prefix)) is not None:
            raise ValueError(f"{prefix}{key} must be {rule}; got {_short(value)}.")
        if key in NESTED:
            check_config(value, f"{prefix}{key}.")
        if key == "compressor":
            _check_compressor(prefix + key, value)


def check_head_shape(values: Mapping[str, Any]) -> None:
    """Check keys against each other: whole heads, and a size that such a head can have.

    Raises:
        ValueError: names the keys.
    """
    hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int):
        return  # missing keys are reported where they are read
    if not (size := values.get("head_dim") or 0) and hidden % heads == 0:
        size = hidden // heads
    if size % 2:
        raise ValueError(f"head_dim must be even for rotary positions; got {size}.")
    if heads * size > MAX_SIZE:
        raise ValueError(f"num_attention_heads times head_dim must be at most {MAX_SIZE}; got {heads} and {size}.")


def _broken_rule(key: str, value: Any, is_top: bool) -> str | None:
    """What the value of a key must be, if it is not; `is_top`: it is in no other object."""
    if key in INTEGERS:
        low, high = INTEGERS[key]
        return None if type(value) is int and low <= value <= high else f"an integer from {low} to {high}"
    if key in FLOATS:
        smallest, largest = FLOATS[key]
        is_good = type(value) in (int, float) and smallest <= value <= largest and math.isfinite(value)
        return None if is_good else f"a number from {smallest:g} to {largest:g}"
    if key in LAYER_LISTS:
        least = 0 if is_top and key in MAY_BE_EMPTY else 1
        is_good = isinstance(value, list) and least <= len(value) <= MAX_LAYERS
        is_good = is_good and all(type(index) is int and abs(index) <= MAX_LAYERS for index in value)
        what = "integers, one per axis" if key == "mrope_section" else "layer indices"
        return None if is_good else f"a list of {what}"
    kinds = ((OBJECTS, dict, "an object"), (STRINGS, str, "a string"), (BOOLEANS, bool, "true or false"))
    return next((rule for keys, kind, rule in kinds if key in keys and not isinstance(value, kind)), None)


def _check_compressor(key: str, value: Mapping[str, Any]) -> None:
    if value.get("name") is None:
        raise ValueError(f"{key}.name is missing; got {_short(value)}.")
    if value.get("max_tokens") is None:
        raise ValueError(f"{key}.max_tokens is missing; got {_short(value)}.")


def _short(value: object) -> str:
    """A value for a message; a huge integer by its number of bits, since Python refuses to print one."""
    if isinstance(value, int) and abs(value) > 10**30:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
