"""Drafters published by the authors of MSD, EAGLE-1/2, ViSpec, EAGLE-3, DFlash and DSpark, read from their own files.

Reads `config.json` and the weights (`mmspec.weight_files`). Every tensor and every setting is checked against the
target. EAGLE-3 layouts are in `speculators`, those of DFlash and DSpark in `dspark`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmspec.drafters.checkpoints.format import CONFIG_NAME, read_config
from mmspec.drafters.checkpoints.head_config import parse_published_config
from mmspec.drafters.checkpoints.own_embeddings import own_embeddings
from mmspec.drafters.checkpoints.published_heads import hub_id_of, published_heads
from mmspec.drafters.checkpoints.rope import order_rotated_rows
from mmspec.drafters.checkpoints.state_dict import drop_unused, from_eagle_state_dict
from mmspec.drafters.heads.base.drafter import HeadDrafter
from mmspec.drafters.heads.dspark.checkpoint import load_dspark
from mmspec.drafters.heads.eagle.drafter import EagleDrafter
from mmspec.drafters.heads.eagle.head import EagleHead
from mmspec.drafters.heads.eagle3.checkpoint import load_eagle3
from mmspec.drafters.heads.vispec.drafter import VispecDrafter, build_vispec_head
from mmspec.interfaces import TargetInfo
from mmspec.weight_files import load_weights

logger = logging.getLogger("mmspec")


def detect_format(values: Mapping[str, Any], weights: Mapping[str, Tensor]) -> str:
    """The method of a published drafter: "eagle3", "dspark" (and DFlash), "vispec", "msd" or "eagle".

    Raises:
        ValueError: the weights are not a draft head's.
    """
    kind = values.get("speculators_model_type", "eagle3")
    if kind not in ("eagle3", "dflash", "dspark"):
        raise ValueError(f"speculators_model_type {kind!r} is not supported; eagle3, dflash and dspark are.")
    if kind != "eagle3" or ("hidden_norm.weight" in weights and "layers.0.self_attn.q_norm.weight" in weights):
        return "dspark"
    is_eagle3 = "d2t" in weights or any(name.startswith(("midlayer.", "layers.0.hidden_norm.")) for name in weights)
    if "speculators_model_type" in values or is_eagle3:
        return "eagle3"
    if "imadpt.q" in weights:
        return "vispec"
    if "fc.weight" not in weights:
        raise ValueError("these are not the weights of a draft head: fc.weight is missing.")
    model_type = values.get("model_type")
    if model_type == "qwen2_5_vl" and "layers.0.input_layernorm.weight" in weights:
        logger.warning(
            "mmspec: a head of model_type 'qwen2_5_vl' with an input_layernorm in its layer is taken as MSD's, whose "
            "code for 'qwen2_vl' has one; EAGLE's has none"
        )
        return "msd"
    return "msd" if model_type in ("llava", "qwen2_vl") else "eagle"


def load_published(folder: str | os.PathLike[str], target: TargetInfo, name: str | None = None) -> HeadDrafter:
    """The drafter in a folder, in the layout in which it was published.

    Args:
        folder: with the files.
        target: facts about the target.
        name: of the drafter, such as its hub id; by default the folder's.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, does not fit the target, or the head is known to be unlike its layout.
    """
    folder = Path(folder)
    name = name or hub_id_of(folder) or folder.name
    if (known := published_heads().get(name)) is not None and known.refused is not None:
        raise ValueError(f"{name} is not read: {known.refused}.")
    values, weights = read_config(folder), load_weights(folder)
    try:
        _check_image_token(values, target)
        format_name = detect_format(values, weights)
        drafter: HeadDrafter
        if format_name == "eagle3":
            drafter = load_eagle3(values, weights, target, name)
        elif format_name == "dspark":
            drafter = load_dspark(values, weights, target, name)
        else:
            drafter = _load_eagle(format_name, values, weights, target, name)
        drafter.own_embeddings = own_embeddings(weights, target, drafter.head.config.hidden_size)
        return drafter
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def _check_image_token(values: Mapping[str, Any], target: TargetInfo) -> None:
    """Refuse a drafter that was trained with another media token id, where both are known."""
    for name in ("image_token_id", "image_token_index"):
        token = values.get(name)
        if not isinstance(token, int) or token < 0:  # the original LLaVA code writes -200, which is not an id
            continue
        if target.media_token_ids and token not in target.media_token_ids:
            ids = ", ".join(map(str, target.media_token_ids))
            raise ValueError(f"this drafter was trained with {name} {token}; the target's media token ids are {ids}.")


def _load_eagle(
    format_name: str, values: Mapping[str, Any], weights: dict[str, Tensor], target: TargetInfo, name: str
) -> EagleDrafter:
    """A drafter of EAGLE-1/2, MSD or ViSpec."""
    config = replace(
        parse_published_config(values, target, values.get("architectures")),
        bias="fc.bias" in weights,
        qkv_bias="layers.0.self_attn.q_proj.bias" in weights,
        input_norm="layers.0.input_layernorm.weight" in weights,
    )
    vocab_limit = _vocab_limit(values, weights, target)
    weights = order_rotated_rows(drop_unused(weights), values, config.head_dim, config.rotary_dim)
    if format_name == "vispec":
        vispec_head, eagle_weights = build_vispec_head(config, weights)
        _assign(vispec_head, from_eagle_state_dict(config, eagle_weights), weights)
        return VispecDrafter(vispec_head, num_layers=target.num_layers, name=name, vocab_limit=vocab_limit)
    with torch.device("meta"):  # an initialisation would advance the user's random generator
        head = EagleHead(config)
    _assign(head, from_eagle_state_dict(config, weights), {})
    visual_mode = "decoupled" if format_name == "msd" else "coupled"
    return EagleDrafter(head, visual_mode, num_layers=target.num_layers, name=name, vocab_limit=vocab_limit)


def _assign(head: torch.nn.Module, state_dict: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Load a head.

    Args:
        head: on the meta device.
        state_dict: of the part that is EAGLE's.
        weights: holds the tensors of its other modules under their own names.

    Raises:
        ValueError: tensors are missing, of another shape or not finite.
    """
    own = head.state_dict()
    others = {name: weights[name] for name in own if name not in state_dict and name in weights}
    for name, value in others.items():
        if value.shape != own[name].shape or not torch.isfinite(value).all():
            raise ValueError(f"{name} must be finite and {list(own[name].shape)}; got {list(value.shape)}.")
    missing = sorted(set(own) - set(state_dict) - set(others))
    if missing:
        raise ValueError(f"a draft head lacks {', '.join(missing[:4])}.")
    head.load_state_dict({name: value.float() for name, value in {**state_dict, **others}.items()}, assign=True)


def _vocab_limit(values: Mapping[str, Any], weights: Mapping[str, Tensor], target: TargetInfo) -> int | None:
    """The drafter's vocabulary size if the target's is larger (LLaVA: 32,000 of 32,064), else None."""
    size = values.get("vocab_size") or target.vocab_size
    embedding = weights.get("embed_tokens.weight")
    if embedding is not None and (embedding.dim() != 2 or embedding.shape[1] != values["hidden_size"]):
        raise ValueError(f"embed_tokens.weight must be [V, {values['hidden_size']}]; got {list(embedding.shape)}.")
    if embedding is not None and embedding.shape[0] != size:
        raise ValueError(f"embed_tokens.weight has {embedding.shape[0]} rows; {CONFIG_NAME} says vocab_size {size}.")
    if size > target.vocab_size + 64 or size < target.vocab_size - 1024:
        raise ValueError(f"this drafter has {size} ids, the target {target.vocab_size}: not the same vocabulary.")
    return size if size < target.vocab_size else None
