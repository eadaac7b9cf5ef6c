"""Names of a head's tensors on disk: those of the EAGLE and MSD code, one tensor per projection.

The modules in memory fuse the query, key and value projections and the gate and up projections. Modules that other
methods add may have other names on disk (`DraftHead.stored_names`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mmspec.drafters.heads.base.config import HeadConfig
from mmspec.drafters.heads.base.head import DraftHead

FUSED_PROJECTIONS = {
    "layers.0.self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "layers.0.mlp.gate_up_proj": ("gate_proj", "up_proj"),
}
"""Fused module on disk -> the projections that it consists of."""
RENAMED_MODULES = {
    "fc": "fc",
    "layer.o_proj": "layers.0.self_attn.o_proj",
    "layer.down_proj": "layers.0.mlp.down_proj",
    "layer.input_norm": "layers.0.input_layernorm",
    "layer.hidden_norm": "layers.0.hidden_norm",
    "layer.post_norm": "layers.0.post_attention_layernorm",
    "layer.q_norm": "layers.0.self_attn.q_norm",
    "layer.k_norm": "layers.0.self_attn.k_norm",
}
"""Module of an `EagleHead` -> module on disk."""


def _rename(name: str, names: Mapping[str, str]) -> str:
    """`name` with the module prefix replaced that is listed in `names`, if any."""
    for old, new in names.items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return name


def to_eagle_state_dict(head: DraftHead) -> dict[str, Tensor]:
    """The weights of a head under their names on disk."""
    config, result = head.config, dict[str, Tensor]()
    num_q, num_kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    sizes = {"qkv_proj": [num_q, num_kv, num_kv], "gate_up_proj": [config.intermediate_size] * 2}
    for name, value in head.state_dict().items():
        module, _, suffix = name.rpartition(".")
        if module in RENAMED_MODULES:
            result[f"{RENAMED_MODULES[module]}.{suffix}"] = value
        elif not module.startswith("layer."):
            result[_rename(name, head.stored_names)] = value
        else:
            prefix, projections = _fused(module)
            pieces = value.split(sizes[module.removeprefix("layer.")])
            for projection, piece in zip(projections, pieces, strict=True):
                result[f"{prefix}{projection}.{suffix}"] = piece.contiguous()
    return result


def _fused(module: str) -> tuple[str, tuple[str, ...]]:
    """(prefix on disk, projections) of a fused module of the layer."""
    name = module.removeprefix("layer.")
    fused = next(key for key in FUSED_PROJECTIONS if key.endswith(name))
    return fused.removesuffix(name), FUSED_PROJECTIONS[fused]


def from_eagle_state_dict(
    config: HeadConfig, weights: Mapping[str, Tensor], build: Callable[[Any], DraftHead]
) -> dict[str, Tensor]:
    """The inverse of `to_eagle_state_dict`: a state dict for the head that `build` constructs.

    Args:
        config: shape of the head.
        weights: tensors under their names on disk.
        build: constructor of the head.

    Raises:
        ValueError: tensors are missing, unexpected, of another shape or not finite; the message names them.
    """
    with torch.device("meta"):
        empty = build(config)
    check_tensors(weights, {name: value.shape for name, value in to_eagle_state_dict(empty).items()}, "a draft head")
    result = {}
    for name in empty.state_dict():
        module, _, suffix = name.rpartition(".")
        if module in RENAMED_MODULES:
            result[name] = weights[f"{RENAMED_MODULES[module]}.{suffix}"]
        elif not module.startswith("layer."):
            result[name] = weights[_rename(name, empty.stored_names)]
        else:
            prefix, projections = _fused(module)
            result[name] = torch.cat([weights[f"{prefix}{projection}.{suffix}"] for projection in projections])
    return result


def check_tensors(weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], what: str) -> None:
    """Compare tensors with the expected names and shapes.

    Args:
        weights: the tensors.
        shapes: expected name -> shape.
        what: the kind of head, for the message.

    Raises:
        ValueError: tensors are missing, unexpected, of another shape or not finite; the message names them.
    """
    missing, unexpected = sorted(set(shapes) - set(weights)), sorted(set(weights) - set(shapes))
    if missing:
        raise ValueError(f"{what} lacks {', '.join(missing[:4])}.")
    if unexpected:
        raise ValueError(f"{what} has unexpected tensors {', '.join(unexpected[:4])}.")
    for name, shape in shapes.items():
        if weights[name].shape != shape:
            raise ValueError(f"{name} must be {list(shape)} for this config; got {list(weights[name].shape)}.")
        if not torch.isfinite(weights[name]).all():
            raise ValueError(f"{name} holds values that are not finite.")


def drop_unused(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Published tensors without those that a head does not use: rotary buffers and its copy of the embeddings."""
    return {key: value for key, value in weights.items() if "rotary" not in key and key != "embed_tokens.weight"}
