"""EAGLE-1/2 and MSD heads in the layout of their authors."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mmspec.drafters.checkpoints.format import CONFIG_NAME
from mmspec.drafters.checkpoints.head_config import parse_published_config
from mmspec.drafters.checkpoints.rope import order_rotated_rows
from mmspec.drafters.checkpoints.state_dict import drop_unused, read_head
from mmspec.drafters.heads.eagle.drafter import EagleDrafter
from mmspec.drafters.heads.eagle.head import EagleConfig, EagleHead
from mmspec.interfaces import TargetInfo

logger = logging.getLogger("mmspec")

AUTOMODEL_MSD = "MultimodalEagleDraftModel"
"""MSD of NeMo Automodel; its layer and its output are normalised."""


def load_eagle(values: Mapping[str, Any], weights: Mapping[str, Tensor], target: TargetInfo, name: str) -> EagleDrafter:
    """The drafter of a head; arguments and errors as `HeadMethod.load_published`."""
    config, weights, vocab_limit = read_eagle(values, weights, target)
    head = read_head(lambda: EagleHead(config), weights)
    visual_mode = "decoupled" if is_msd(values, weights) else "coupled"
    return EagleDrafter(head, visual_mode, num_layers=target.num_layers, name=name, vocab_limit=vocab_limit)


def is_msd(values: Mapping[str, Any], weights: Mapping[str, Tensor]) -> bool:
    """Whether a head was trained by MSD's code, for its visual mode."""
    model_type = values.get("model_type")
    if model_type == "qwen2_5_vl" and "norm.weight" not in weights and "layers.0.input_layernorm.weight" in weights:
        logger.warning(
            "mmspec: a head of model_type 'qwen2_5_vl' with an input_layernorm in its layer is taken as MSD's, whose "
            "code for 'qwen2_vl' has one; EAGLE's has none"
        )
        return True
    return model_type in ("llava", "qwen2_vl") or values.get("architectures") == [AUTOMODEL_MSD]


def read_eagle(
    values: Mapping[str, Any], weights: Mapping[str, Tensor], target: TargetInfo
) -> tuple[EagleConfig, dict[str, Tensor], int | None]:
    """The config, the tensors without those that are not used, and `vocab_limit` of `HeadDrafter`.

    Raises:
        ValueError: the config does not fit the target or the weights.
    """
    config = EagleConfig.of(
        parse_published_config(values, target, values.get("architectures"), weights=weights),
        bias="fc.bias" in weights,
        qkv_bias="layers.0.self_attn.q_proj.bias" in weights,
        input_norm="layers.0.input_layernorm.weight" in weights,
        final_norm="norm.weight" in weights,
    )
    vocab_limit = _vocab_limit(values, weights, target)
    return config, order_rotated_rows(drop_unused(weights), values, config.head_dim, config.rotary_dim), vocab_limit


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
