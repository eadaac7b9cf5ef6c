"""`config.json` of a draft head: the native keys and their types, those of the first release, and published ones."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from mmspec.drafters.checkpoints.rope import parse_rope
from mmspec.drafters.eagle.head import HeadConfig
from mmspec.drafters.eagle.visual_inputs import LEGACY_VISUAL_MODES
from mmspec.interfaces import TargetInfo

LEGACY_KEYS = {
    "kind": "architecture",
    "rule": "visual_mode",
    "wide": "eagle3_input",
    "block": "block_size",
    "inner": "block_ffn_size",
    "chain": "markov_rank",
}
"""Key of the first release -> current key; read for one release."""
ACTIVATIONS = ("silu", "swish")
"""Names of the same function."""


def convert_legacy(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A head's config with current keys and values, and the former names that it used.

    Raises:
        ValueError: a former and the current key of one setting with different values.
    """
    config = dict(values)
    former = [key for key in LEGACY_KEYS if key in config]
    for key in former:
        value, current = config.pop(key), LEGACY_KEYS[key]
        if config.setdefault(current, value) != value:
            raise ValueError(f"{key!r} is the former name of {current!r}; got both, {value!r} and {config[current]!r}.")
    target = config.get("target")
    if isinstance(target, dict) and "layers" in target:
        target = dict(target)
        target.setdefault("num_layers", target.pop("layers"))
        config["target"] = target
        former.append("target.layers")
    mode = config.get("visual_mode")
    if isinstance(mode, str) and mode in LEGACY_VISUAL_MODES:
        config["visual_mode"] = LEGACY_VISUAL_MODES[mode]
        former.append(mode)
    return config, former


def upgrade_config(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """As `convert_legacy`, with one FutureWarning if anything was converted.

    Args:
        values: the JSON object.
        source: its file, for the warning.

    Raises:
        ValueError: a former and the current key of one setting with different values.
    """
    config, former = convert_legacy(values)
    if former:
        warnings.warn(
            f"{source} uses names of an earlier release ({', '.join(former)}), which the next one will not read. "
            "Save the head again to convert it.",
            FutureWarning,
            stacklevel=3,
        )
    return config


def parse_head_config(values: Mapping[str, Any]) -> HeadConfig:
    """A `HeadConfig` from current keys; unknown keys are ignored.

    Raises:
        ValueError: a value of another type than its key's, or a required key is missing.
    """
    fields = HeadConfig.__dataclass_fields__
    found = {name: values[name] for name in fields if values.get(name) is not None}
    found.setdefault("num_key_value_heads", found.get("num_attention_heads"))
    for name in fields:
        if str(fields[name].type).startswith("tuple") and isinstance(found.get(name), list):
            found[name] = tuple(found[name])
    for name, value in found.items():
        expected = str(fields[name].type).partition("[")[0]  # the annotation's text, as annotations are not evaluated
        if type(value).__name__ not in {"float": ("float", "int")}.get(expected, (expected,)):
            raise ValueError(f"a draft head's {name} must be of type {expected}; got {value!r}.")
    try:
        return HeadConfig(**found)
    except TypeError as error:
        raise ValueError(f"a draft head's config is incomplete: {error}") from error


def parse_published_config(
    values: Mapping[str, Any],
    target: TargetInfo,
    architectures: object = None,
    target_hidden_size: int | None = None,
) -> HeadConfig:
    """A `HeadConfig` from a config in transformers' Llama format; its vocabulary is the target's.

    Args:
        values: the config of the layer.
        target: facts about the target.
        architectures: value of that key in the head's config.
        target_hidden_size: of the hidden states that the head reads, if it may differ from its own.

    Raises:
        ValueError: a required key is missing, the hidden size is not the target's, or a setting is not implemented.
    """
    required = ("hidden_size", "intermediate_size", "num_attention_heads")
    missing = [name for name in required if not isinstance(values.get(name), int)]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}.")
    own_size = values["hidden_size"]
    target_size = target_hidden_size or own_size
    if target_size != target.hidden_size:
        sizes = f"{target_size}" if own_size == target_size else f"{target_size} (its own: {own_size})"
        raise ValueError(f"this drafter is for a target of hidden_size {sizes}; the target has {target.hidden_size}.")
    key = "hidden_act" if values.get("hidden_act") is not None else "hidden_activation"  # of Gemma
    if (activation := values.get(key)) not in (None, *ACTIVATIONS):
        raise ValueError(f"{key} {activation!r} is not supported in a draft head; {' and '.join(ACTIVATIONS)} are.")
    head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    return HeadConfig(
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_attention_heads=values["num_attention_heads"],
        num_key_value_heads=values.get("num_key_value_heads") or values["num_attention_heads"],
        vocab_size=target.vocab_size,
        head_dim=head_dim,
        rms_norm_eps=values.get("rms_norm_eps") or 1e-6,
        target_hidden_size=0 if own_size == target_size else target_size,
        **parse_rope(values, head_dim, architectures),
    )


__all__ = ["LEGACY_KEYS", "convert_legacy", "parse_head_config", "parse_published_config", "upgrade_config"]
