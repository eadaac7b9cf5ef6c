"""`config.json` of a draft head: our own keys and their types, and those of published heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mmspec.drafters.checkpoints.rope import parse_rope
from mmspec.drafters.heads.base.config import HeadConfig
from mmspec.interfaces import TargetInfo

ACTIVATIONS = ("silu", "swish")
"""Names of the same function."""


def parse_head_config(values: Mapping[str, Any], config: type[HeadConfig]) -> HeadConfig:
    """A config from our own keys; unknown keys are ignored.

    Args:
        values: of the file.
        config: class of the config.

    Raises:
        ValueError: a value of another type than its key's, or a required key is missing.
    """
    fields = config.__dataclass_fields__
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
        return config(**found)
    except TypeError as error:
        raise ValueError(f"a draft head's config is incomplete: {error}") from error


def parse_published_config(
    values: Mapping[str, Any],
    target: TargetInfo,
    architectures: object = None,
    target_hidden_size: int | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> HeadConfig:
    """A `HeadConfig` from a config in transformers' Llama format; its vocabulary is the target's.

    Args:
        values: the config of the layer.
        target: facts about the target.
        architectures: value of that key in the head's config.
        target_hidden_size: of the hidden states that the head reads, if it may differ from its own.
        weights: its tensors, which have the `head_dim` of a config without one.

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
    head_dim = values.get("head_dim") or _head_dim(values, weights or {})
    return HeadConfig(
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_attention_heads=values["num_attention_heads"],
        num_key_value_heads=values.get("num_key_value_heads") or values["num_attention_heads"],
        vocab_size=target.vocab_size,
        head_dim=head_dim,
        rms_norm_eps=values.get("rms_norm_eps") or 1e-6,
        **parse_rope(values, head_dim, architectures),
    )


def _head_dim(values: Mapping[str, Any], weights: Mapping[str, Tensor]) -> int:
    """That of the query projection of the first layer; without one the hidden size over the heads."""
    heads: int = values["num_attention_heads"]
    weight = weights.get("layers.0.self_attn.q_proj.weight")
    if weight is not None and weight.dim() == 2 and weight.shape[0] and weight.shape[0] % heads == 0:
        return weight.shape[0] // heads
    if values["hidden_size"] % heads:
        raise ValueError(
            f"head_dim is missing, and hidden_size {values['hidden_size']} is no multiple of {heads} heads."
        )
    return int(values["hidden_size"] // heads)
