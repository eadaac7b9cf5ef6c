"""EAGLE-3 heads in the layouts of the EAGLE code and of `speculators` (vLLM)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mmspec.drafters.checkpoints.draft_vocab import parse_draft_ids
from mmspec.drafters.checkpoints.head_config import parse_published_config
from mmspec.drafters.checkpoints.rope import ANGELSLIM_CLASS, LAYER_TYPES, order_rotated_rows
from mmspec.drafters.checkpoints.state_dict import drop_unused, read_head
from mmspec.drafters.heads.eagle3.drafter import Eagle3Drafter
from mmspec.drafters.heads.eagle3.head import Eagle3Config, Eagle3Head, eagle3_layers
from mmspec.drafters.heads.eagle3.mrope import parse_mrope
from mmspec.interfaces import TargetInfo

TRAINERS_VISUAL_MODE = "placeholder"
"""What SpecForge, AngelSlim and speculators train with and vLLM serves: the placeholder token's embedding."""
WITHOUT_WINDOWS = (["LlamaForCausalLMEagle3"], [ANGELSLIM_CLASS])
"""`architectures` of heads whose own layers see all positions, whatever `layer_types` were copied from the target."""
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
    num_layers = _num_layers(values, weights)
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
        num_hidden_layers=num_layers,
        sliding_windows=_windows(values, layer_values, num_layers),
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
    layers and read the latter. DeepSpec's `target_layer_ids` are outputs of layers too.
    """
    key, offset = "eagle_aux_hidden_state_layer_ids", 0
    layers = values.get(key)
    if not layers and values.get("target_layer_ids"):  # DeepSpec, which counts outputs of layers
        key, offset, layers = "target_layer_ids", 1, values["target_layer_ids"]
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


def _windows(values: Mapping[str, Any], layer_values: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """`Eagle3Config.sliding_windows`; the layers of the EAGLE code, SpecForge and AngelSlim have none.

    Raises:
        ValueError: `layer_types` is of other layers, or a window is no number of positions.
    """
    types = layer_values.get("layer_types")
    if (
        types is None
        or values.get("architectures") in WITHOUT_WINDOWS
        or layer_values.get("use_sliding_window") is False
    ):
        return ()
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= set(LAYER_TYPES):
        raise ValueError(
            f"layer_types must be one of {', '.join(LAYER_TYPES)} for each of {num_layers} layers; got {types!r:.80}."
        )
    window = layer_values.get("sliding_window")
    if LAYER_TYPES[1] not in types:
        return ()
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ValueError(f"sliding_window must be a number of positions for layer_types {types!r:.80}; got {window!r}.")
    return tuple(window if kind == LAYER_TYPES[1] else 0 for kind in types)


def _num_layers(values: Mapping[str, Any], weights: Mapping[str, Tensor]) -> int:
    """Layers of which there are tensors, which a config of `speculators` must not contradict."""
    number = max(len({name.split(".")[1] for name in weights if name.startswith("layers.")}), 1)
    named = (values.get("transformer_layer_config") or {}).get("num_hidden_layers")
    if named not in (None, number):
        raise ValueError(f"num_hidden_layers is {named}; there are tensors of {number}.")
    return number


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
