"""Settings of published DSpark and DFlash heads: each key where its trainers write it, flat or in `dflash_config`.

`settings` are all keys of a config as one, those in `dflash_config` first.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mmspec.drafters.checkpoints.draft_vocab import hidden_state_indices, layer_windows, sliding_layers
from mmspec.drafters.checkpoints.rope import DEFAULT_THETA, LAYER_TYPES, rope_values
from mmspec.interfaces import TargetInfo

logger = logging.getLogger("mmspec")

ANCHORED_ARCHITECTURES = {
    "Lfm2DSparkDraftModel": True,
    "Qwen3DSparkModel": True,
    "Gemma4DSparkModel": True,
    "DSparkDraftModel": True,
    "DominoDraftModel": False,
    "DFlashDraftModel": False,
    "Qwen3DFlashDraftModel": False,
    "DFlash2DraftModel": False,
    "Qwen3DFlash2DraftModel": False,
    "LiLiCorrDraftModel": False,
}
"""Class in a flat config -> whether it samples from the anchor where the config does not say (LiquidAI; DeepSeek's
DSpark and DFlash for Qwen3 and Gemma 4; SpecForge; z-lab; NeMo Automodel; Model-Optimizer). The labels of SpecForge's
DSpark begin behind the anchor."""


def check_projector(settings: Mapping[str, Any], projectors: Sequence[str]) -> None:
    """Refuse a head on a block (`projector_type`, as SpecForge names it) that is none of `projectors`."""
    if (kind := settings.get("projector_type")) not in (None, *projectors):
        raise ValueError(
            f"projector_type {kind!r} is not supported in a head with these tensors; {' or '.join(projectors)} is."
        )


def samples_from_anchor(values: Mapping[str, Any], settings: Mapping[str, Any], block_size: int) -> bool:
    """Whether the first position of a block predicts a token, by the key or by what wrote the config.

    SGLang takes true where the key is missing, which is right for DSpark of DeepSeek, LiquidAI and SpecForge; blocks of
    DFlash are anchored on a token that predicts nothing. `speculators` has the key since its DFlash heads could predict
    from the anchor too; before, a config of DSpark has the number of tokens that a block drafts, and one of DFlash a
    number that was one too high at first.
    """
    if settings.get("sample_from_anchor") is not None:
        return bool(settings["sample_from_anchor"])
    if settings.get("projector_type") == "dspark":
        return True
    if settings.get("shift_label") is not None:  # Domino's
        return bool(settings["shift_label"])
    if (kind := values.get("speculators_model_type")) == "dflash":
        return False
    if kind is not None:
        methods = (values.get("speculators_config") or {}).get("proposal_methods") or [{}]
        num_tokens = methods[0].get("speculative_tokens") if isinstance(methods[0], Mapping) else None
        if num_tokens in (block_size, block_size - 1):
            return num_tokens == block_size
        name, assumed = f"speculators_model_type {kind!r}", kind == "dspark"
    else:
        architectures = values.get("architectures")
        name = architectures[0] if isinstance(architectures, list) and architectures else ""
        if name in ANCHORED_ARCHITECTURES:
            return ANCHORED_ARCHITECTURES[name]
        name, assumed = f"architectures {name!r}", False
    logger.warning(
        "mmspec: sample_from_anchor is missing, and readers disagree on its default; for %s it is taken as %s",
        name,
        str(assumed).lower(),
    )
    return assumed


def warn_missing_theta(values: Mapping[str, Any]) -> None:
    """One line where the config of a layer has no base of the rotary embedding."""
    if not rope_values(values).get("rope_theta"):
        logger.warning(
            "mmspec: rope_theta is missing, and readers disagree on its default (transformers 10000, vLLM 1000000); "
            "it is taken as %g",
            DEFAULT_THETA,
        )


def markov_rank(settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> int:
    """`DsparkConfig.markov_rank`: that of the table, which the key must name if it is there."""
    table, rank = weights.get("markov_head.markov_w1.weight"), settings.get("markov_rank")
    if table is None and rank:
        raise ValueError(f"markov_rank is {rank}, but markov_head.markov_w1.weight is missing.")
    if table is None:
        return 0
    found = table.shape[1] if table.dim() == 2 else 0
    if rank is not None and rank != found:
        raise ValueError(f"markov_rank is {rank}; markov_head.markov_w1.weight is {list(table.shape)}.")
    return found


def keep_confidence_head(weights: dict[str, Tensor], hidden_size: int) -> bool:
    """Whether the head estimates acceptance from feature and token; one of features alone is taken out of `weights`."""
    weight = weights.get("confidence_head.proj.weight")
    if weight is None or weight.shape != (1, hidden_size):
        return weight is not None
    logger.info("mmspec: a confidence head without Markov features is not used; it does not change what is drafted")
    del weights["confidence_head.proj.weight"]
    weights.pop("confidence_head.proj.bias", None)
    return False


def block_attention(settings: Mapping[str, Any], num_layers: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """`sliding_windows` and `causal_layers` of `DsparkConfig`.

    Layers with a window are causal within the block unless the config says otherwise (z-lab, vLLM, `speculators`).
    """
    slides = sliding_layers(settings.get("layer_types") or [LAYER_TYPES[0]] * num_layers, num_layers)
    if settings.get("use_swa") and not any(slides):
        slides, is_causal = [True] * num_layers, [False] * num_layers
    else:
        is_causal = list(slides) if not settings.get("sliding_window_non_causal") else [False] * num_layers
    override = next((settings[key] for key in ("is_causal", "causal") if settings.get(key) is not None), None)
    if override is not None:
        is_causal = [bool(override)] * num_layers
    windows = layer_windows(settings.get("swa_window_size") or settings.get("sliding_window"), slides)
    return windows, tuple(is_causal) if any(is_causal) else ()


def hidden_state_layers_of(settings: Mapping[str, Any], target: TargetInfo) -> tuple[int, ...]:
    """Indices of the hidden states: `aux_hidden_state_layer_ids` as they are, `target_layer_ids` one higher."""
    keys = {"aux_hidden_state_layer_ids": 0, "target_layer_ids": 1}
    layers = hidden_state_indices({key: (settings.get(key), offset) for key, offset in keys.items()}, target)
    if not layers:
        raise ValueError(f"{' (or '.join(keys)}) is missing in the config of a block drafter.")
    return layers
