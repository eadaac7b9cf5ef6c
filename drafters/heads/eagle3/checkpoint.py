"""EAGLE-3 heads in the layouts of the EAGLE code and of `speculators` (vLLM)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mmspec.drafters.checkpoints.draft_vocab import parse_draft_ids
from mmspec.drafters.checkpoints.head_config import parse_published_config
from mmspec.drafters.checkpoints.rope import order_rotated_rows
from mmspec.drafters.checkpoints.state_dict import drop_unused, read_head
from mmspec.drafters.heads.eagle3.config import Eagle3Config
from mmspec.drafters.heads.eagle3.drafter import Eagle3Drafter
from mmspec.drafters.heads.eagle3.head import Eagle3Head, eagle3_layers
from mmspec.drafters.heads.eagle3.mrope import parse_mrope
from mmspec.interfaces import TargetInfo

TRAINERS_VISUAL_MODE = "placeholder"
"""What SpecForge, AngelSlim and speculators train with and vLLM serves: the placeholder token's embedding."""
EAGLE3_VISUAL_MODES = ("placeholder", "coupled", "text_only")
"""Visual modes in which every input has an embedding and a hidden state, which the layer reads."""


def load_eagle3(
    values: Mapping[str, Any], weights: Mapping[str, Tensor], target: TargetInfo, name: str
) -> Eagle3Drafter:
    """The drafter of an EAGLE-3 head.

    Args:
        values: its config, flat (EAGLE code) or with a `transformer_layer_config` (`speculators`).
        weights: its tensors.
        target: facts about the target.
        name: of the drafter.

    Raises:
        ValueError: the head does not fit the target, is incomplete, or uses an unsupported setting.
    """
    layer_values = dict(values.get("transformer_layer_config") or values)
    weights = {key.replace("midlayer.", "layers.0."): value for key, value in weights.items()}
    vocab_size = int(values.get("draft_vocab_size") or layer_values.get("vocab_size") or target.vocab_size)
    _check_eagle3_values(values)
    layers, settings = _hidden_state_layers(values, target), {**values, **(values.get("eagle_config") or {})}
    _check_one_layer(layer_values, weights)
    section, is_interleaved = parse_mrope(layer_values, values)
    target_size = values.get("target_hidden_size") or layer_values.get("hidden_size")
    shape = parse_published_config(layer_values, target, values.get("architectures"), target_size, weights)
    config = Eagle3Config.of(
        shape,
        target_hidden_size=0 if target_size == shape.hidden_size else target_size,
        mrope_section=section,
        mrope_interleaved=is_interleaved,
        hidden_state_layers=tuple(layers),
        draft_vocab_size=vocab_size,
        norm_before_residual=bool(values.get("norm_before_residual", False)),
        qkv_bias="layers.0.self_attn.q_proj.bias" in weights,
        qk_norm="layers.0.self_attn.q_norm.weight" in weights,
        norm_before_fc=bool(settings.get("norm_before_fc")),
        fc_norm=bool(settings.get("fc_norm")),
        norm_output=bool(settings.get("norm_output")),
    )
    has_map = "d2t" in weights
    if vocab_size < target.vocab_size and not has_map:
        raise ValueError(f"draft_vocab_size is {vocab_size} of {target.vocab_size}, but the map d2t is missing.")
    fc = weights.get("fc.weight")
    if fc is not None and fc.dim() == 2 and fc.shape[1] != len(layers) * target.hidden_size:
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids names {len(layers)} hidden states of {target.hidden_size}; fc.weight "
            f"reads {fc.shape[1]} numbers."
        )
    draft_ids = parse_draft_ids(weights.pop("d2t", None), weights.pop("t2d", None), vocab_size, target.vocab_size)
    weights = order_rotated_rows(drop_unused(weights), {**layer_values, **values}, config.head_dim, config.rotary_dim)
    head = read_head(lambda: Eagle3Head(config), weights, "an EAGLE-3 head")
    return Eagle3Drafter(
        head,
        _visual_mode(values),
        num_layers=target.num_layers,
        name=name,
        draft_ids=draft_ids if has_map else None,
        max_depth=5,
    )


def _hidden_state_layers(values: Mapping[str, Any], target: TargetInfo) -> tuple[int, ...]:
    """Indices of the hidden states: those of the config as they are, those of `eagle_config` one higher.

    vLLM counts hidden states as transformers does and reads the former, SGLang and TensorRT-LLM count the outputs of
    layers and read the latter.
    """
    key, offset = "eagle_aux_hidden_state_layer_ids", 0
    layers = values.get(key)
    if not layers:
        layers, offset = (values.get("eagle_config") or {}).get(key), 1
        key = f"eagle_config.{key}"
    if not layers:
        return eagle3_layers(target.num_layers)
    indices = tuple(layer + offset for layer in layers)
    if min(indices) < 0 or max(indices) > target.num_layers:
        raise ValueError(
            f"{key} {list(layers)} are not all hidden states of this target, which has 0 to {target.num_layers}."
        )
    return indices


def _check_one_layer(values: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Refuse heads of several layers, and a layer with a window."""
    if "layers.1.input_layernorm.weight" in weights:
        raise ValueError(
            f"num_hidden_layers {values.get('num_hidden_layers')} is not supported in an EAGLE head; 1 is."
        )
    if "sliding_attention" in (layer_types := values.get("layer_types") or ()):
        raise ValueError(f"layer_types {layer_types} is not supported in an EAGLE head; full_attention is.")


def _visual_mode(values: Mapping[str, Any]) -> str:
    """What stands for the embedding of a visual token: of the placeholder, unless the config names another visual mode.

    SpecForge, AngelSlim and speculators train with the placeholder's, and vLLM serves it; SGLang feeds the projected
    features ("coupled").

    Raises:
        ValueError: a visual mode that an EAGLE-3 head does not have.
    """
    mode = values.get("visual_mode") or TRAINERS_VISUAL_MODE
    if mode not in EAGLE3_VISUAL_MODES:
        raise ValueError(
            f"visual_mode of an EAGLE-3 head must be one of {', '.join(EAGLE3_VISUAL_MODES)}; got {mode!r}."
        )
    return str(mode)


def _check_eagle3_values(values: Mapping[str, Any]) -> None:
    """Refuse settings that change the network, or whose meaning differs between readers."""
    if "speculators_model_type" in values and values.get("norm_before_residual") is None:
        raise ValueError(
            "norm_before_residual is missing, and readers disagree on its default: add true or false to config.json."
        )
