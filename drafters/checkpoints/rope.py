"""The rotary embedding of a published head, from the keys that its trainers write.

`rope_scaling` is the key of transformers before version 5, `rope_parameters` that of later ones, which may have one set
per type of layer. A config may have several of them, as long as they agree. Heads whose dimensions are paired or left
out otherwise have the rows of their projections moved.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmspec.drafters.heads.base.rope import OPTIONAL_SETTINGS, REQUIRED_SETTINGS

logger = logging.getLogger("mmspec")

UNSCALED_TYPES = (None, "default", "mrope")
"""Values of `rope_type` without a scaling; the axes of M-RoPE are read elsewhere."""
DEFAULT_THETA = 10000.0
ANGELSLIM_CLASS = "Eagle3LlamaForCausalLM"
"""Its layer reads `rope_theta` and `partial_rotary_factor` with M-RoPE alone: else the base is `DEFAULT_THETA`."""
LAYER_TYPES = ("full_attention", "sliding_attention")
NEOX_KEYS = ("rope_is_neox_style", "is_neox_style")
ROTATED = re.compile(r"(.*\.)?self_attn\.(q|k)_(proj\.weight|proj\.bias|norm\.weight)")
"""Tensors with a row for each dimension of queries or keys."""


def rope_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_scaling`, `rope_parameters` and `rope_theta` of a config as one.

    Raises:
        ValueError: they name different values, or the layers have different ones.
    """
    found: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for key in ("rope_scaling", "rope_parameters"):
        for name, value in _of_layers(values.get(key) or {}, values, key).items():
            _add(found, origins, "rope_type" if name == "type" else name, value, f"{key}.{name}")
    _add(found, origins, "rope_theta", values.get("rope_theta"), "rope_theta")
    return found


def _add(found: dict[str, Any], origins: dict[str, str], name: str, value: Any, origin: str) -> None:
    """Enter a value, which an earlier key must not contradict; "default" says nothing beside "mrope"."""
    other = found.get(name)
    if value is None or (name == "rope_type" and value == "default" and other is not None and other in UNSCALED_TYPES):
        return
    if other is not None and other != value and not (name == "rope_type" and other == "default" and value == "mrope"):
        raise ValueError(
            f"{origins[name]} is {other!r}, {origin} {value!r}: they must agree; delete the one that is wrong."
        )
    found[name], origins[name] = value, origin


def _of_layers(rope: Mapping[str, Any], values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The parameters of the head's layers, where there is a set for each type (Gemma, Laguna)."""
    nested = {kind: rope[kind] for kind in LAYER_TYPES if isinstance(rope.get(kind), Mapping)}
    if not nested:
        return rope
    layer_types = values.get("layer_types")
    kinds = set(layer_types) if isinstance(layer_types, list) and layer_types else {LAYER_TYPES[0]}
    chosen = [nested[kind] for kind in kinds if kind in nested] or list(nested.values())
    if any(one != chosen[0] for one in chosen):
        raise ValueError(f"{key} must be the same for all layers of a draft head; got {nested!r:.160}.")
    return chosen[0]


def parse_rope(values: Mapping[str, Any], head_dim: int, architectures: object = None) -> dict[str, Any]:
    """`rope_theta`, `rope_scaling` and `rotary_dim` of `HeadConfig`.

    `partial_rotary_factor` comes from the target's config, and trainers rotate the whole head all the same; that of an
    M-RoPE head of AngelSlim counts.

    Args:
        values: the config of the layer.
        head_dim: d.
        architectures: value of that key in the head's config, which names the code that trained it.

    Raises:
        ValueError: a scaling that is not implemented, or a setting of it is missing, or keys contradict each other.
    """
    rope = rope_values(values)
    theta, rotary_dim = float(rope.get("rope_theta") or DEFAULT_THETA), 0
    if architectures == [ANGELSLIM_CLASS]:
        has_keys = "rope_scaling" in values or "rope_parameters" in values
        if has_mrope(rope):
            rotary_dim = _rotary_dim(values, rope, head_dim)
        elif has_keys and theta != DEFAULT_THETA:
            logger.warning(
                "mmspec: rope_theta %g is taken as %g: AngelSlim's %s without M-RoPE does not read it; if other code "
                "trained this head, change its architectures",
                theta,
                DEFAULT_THETA,
                ANGELSLIM_CLASS,
            )
            theta = DEFAULT_THETA
    return {"rope_theta": theta, "rope_scaling": _scaling(rope), "rotary_dim": rotary_dim}


def has_mrope(rope: Mapping[str, Any]) -> bool:
    """Whether these values (`rope_values`) are of several position axes."""
    return bool(rope.get("mrope_section") or rope.get("mrope_interleaved") or rope.get("rope_type") == "mrope")


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """`HeadConfig.rope_scaling`."""
    rope_type = rope.get("rope_type")
    if rope_type in UNSCALED_TYPES:
        return None
    if rope_type not in REQUIRED_SETTINGS:
        raise ValueError(
            f"rope_scaling of type {rope_type!r} is not supported in a draft head; {', '.join(REQUIRED_SETTINGS)} are."
        )
    scaling: dict[str, Any] = {"rope_type": rope_type}
    for key in (*REQUIRED_SETTINGS[rope_type], *OPTIONAL_SETTINGS):
        value = rope.get(key)
        if value is None and key not in REQUIRED_SETTINGS[rope_type]:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(f"rope_scaling.{key} of type {rope_type!r} must be a positive number; got {value!r}.")
        scaling[key] = value
    if rope_type == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise ValueError("rope_scaling.low_freq_factor must be below high_freq_factor.")
    if "truncate" in rope:
        scaling["truncate"] = bool(rope["truncate"])
    return scaling


def _rotary_dim(values: Mapping[str, Any], rope: Mapping[str, Any], head_dim: int) -> int:
    """`HeadConfig.rotary_dim`."""
    share = rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if share is None:
        return 0
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise ValueError(f"partial_rotary_factor must be a number above 0 and at most 1; got {share!r}.")
    size = int(head_dim * share)
    if size < 2 or size % 2:
        raise ValueError(f"partial_rotary_factor {share} of head_dim {head_dim} must be an even size; got {size}.")
    return size


def order_rotated_rows(
    weights: Mapping[str, Tensor], values: Mapping[str, Any], head_dim: int, rotary_dim: int
) -> dict[str, Tensor]:
    """The weights with the dimensions of queries and keys as `rotate_half` pairs them: i with i + d / 2.

    Others pair 2 i with 2 i + 1 (`rope_is_neox_style` false), or rotate the first dimensions only, in halves of those.

    Args:
        weights: by name on disk.
        values: the config, with the key if it has one.
        head_dim: d.
        rotary_dim: dimensions that are rotated; 0 for all.
    """
    is_neox = next((bool(values[key]) for key in NEOX_KEYS if values.get(key) is not None), True)
    size = rotary_dim or head_dim
    if is_neox and size == head_dim:
        return dict(weights)
    rotated, rest = torch.arange(size), torch.arange(size, head_dim)
    pairs = rotated.view(2, -1) if is_neox else rotated.view(-1, 2).T
    order = torch.cat((pairs, rest.view(2, -1)), dim=1).flatten()
    result = {}
    for name, value in weights.items():
        is_rotated = ROTATED.fullmatch(name) is not None and value.dim() > 0 and value.shape[0] % head_dim == 0
        result[name] = value.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1) if is_rotated else value
    return result
