"""EAGLE-3 heads in published layouts, of the EAGLE code and of `speculators` (vLLM): read, and written for engines.

`rope_scaling` is the key of transformers before version 5, `rope_parameters` that of later ones; either may hold the
`mrope_section`. vLLM and SGLang count positions on three axes wherever a config has one, whatever its `rope_type`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mmspec.drafters.checkpoints.draft_vocab import (
    draft_vocabulary_tensors,
    hidden_state_indices,
    layer_keys,
    layer_windows,
    sliding_layers,
    speculators_section,
    take_draft_ids,
)
from mmspec.drafters.checkpoints.format import compact, write_checkpoint
from mmspec.drafters.checkpoints.head_config import parse_published_config
from mmspec.drafters.checkpoints.rope import ANGELSLIM_CLASS, has_mrope, order_rotated_rows, rope_values
from mmspec.drafters.checkpoints.state_dict import drop_unused, read_head, to_stored
from mmspec.drafters.heads.base.drafter import HeadDrafter
from mmspec.drafters.heads.eagle3.drafter import Eagle3Drafter
from mmspec.drafters.heads.eagle3.head import Eagle3Config, Eagle3Head, eagle3_layers
from mmspec.drafters.training.batch import MIXED, MIXED_DRAFTS_AS
from mmspec.interfaces import TargetInfo

logger = logging.getLogger("mmspec")

INTERLEAVED_SECTION = (24, 20, 20)
"""Section of a config with `mrope_interleaved` and without one, in AngelSlim and in Qwen3-VL of transformers."""


def parse_mrope(values: Mapping[str, Any], head_values: Mapping[str, Any]) -> tuple[tuple[int, ...], bool]:
    """`mrope_section` and `mrope_interleaved` of `HeadConfig`; an empty section for a head of one axis.

    Args:
        values: the config of the layer.
        head_values: the head's config, which names the code that trained it. That of `speculators` takes a section over
            from the target, and counts on one axis.

    Raises:
        ValueError: no section where one is needed.
    """
    rope, architectures = rope_values(values), head_values.get("architectures")
    if head_values.get("speculators_model_type") is not None:
        return (), False
    is_interleaved = rope.get("mrope_interleaved")
    if not has_mrope(rope):
        return (), False
    if is_interleaved is None and architectures == [ANGELSLIM_CLASS]:  # it knows no other layout, and has no key for it
        logger.warning(
            "mmspec: mrope_interleaved is missing and taken as true: %s of AngelSlim interleaves the position axes",
            ANGELSLIM_CLASS,
        )
        is_interleaved = True
    section = rope.get("mrope_section")
    if section is None and is_interleaved:
        section = list(INTERLEAVED_SECTION)
    if section is None:
        raise ValueError("rope_scaling of type 'mrope' needs a mrope_section, a list of three integers; got none.")
    return tuple(section), bool(is_interleaved)


def mrope_keys(section: tuple[int, ...], interleaved: bool) -> dict[str, Any]:
    """`rope_scaling` of an exported head, as SpecForge and AngelSlim write it; empty for a head of one axis."""
    if not section:
        return {}
    scaling: dict[str, Any] = {"type": "mrope", "rope_type": "mrope", "mrope_section": list(section)}
    if interleaved:  # transformers and vLLM take the type "default" along with this key
        scaling |= {"type": "default", "rope_type": "default", "mrope_interleaved": True}
    return {"rope_scaling": scaling}


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
    if "speculators_model_type" in values and values.get("norm_before_residual") is None:
        raise ValueError(
            "norm_before_residual is missing, and readers disagree on its default: add true or false to config.json."
        )
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
    draft_ids = take_draft_ids(weights, vocab_size, target)
    fc = weights.get("fc.weight")
    if fc is not None and fc.dim() == 2 and fc.shape[1] != len(layers) * target.hidden_size:
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids names {len(layers)} hidden states of {target.hidden_size}; fc.weight "
            f"reads {fc.shape[1]} numbers."
        )
    weights = order_rotated_rows(drop_unused(weights), {**layer_values, **values}, config.head_dim, config.rotary_dim)
    head = read_head(lambda: Eagle3Head(config), weights, "an EAGLE-3 head")
    return Eagle3Drafter(
        head, _visual_mode(values), num_layers=target.num_layers, name=name, draft_ids=draft_ids, max_depth=5
    )


def _hidden_state_layers(values: Mapping[str, Any], target: TargetInfo) -> tuple[int, ...]:
    """Those of the config as they are, those of `eagle_config` one higher.

    vLLM reads the former, SGLang and TensorRT-LLM the latter. DeepSpec's `target_layer_ids` are outputs of layers too.
    """
    key, own = "eagle_aux_hidden_state_layer_ids", values.get("eagle_config") or {}
    named = {
        key: (values.get(key), 0),
        "target_layer_ids": (values.get("target_layer_ids"), 1),
        f"eagle_config.{key}": (own.get(key), 1),
    }
    return hidden_state_indices(named, target) or eagle3_layers(target.num_layers)


def _windows(values: Mapping[str, Any], layer_values: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """`Eagle3Config.sliding_windows`; the layers of the EAGLE code, SpecForge and AngelSlim have none."""
    types, uses_windows = layer_values.get("layer_types"), layer_values.get("use_sliding_window")
    if types is None or uses_windows is False or values.get("architectures") in WITHOUT_WINDOWS:
        return ()
    return layer_windows(layer_values.get("sliding_window"), sliding_layers(types, num_layers))


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


ENGINE_VISUAL_MODES = {"vllm": "placeholder", "speculators": "placeholder", "sglang": "coupled"}
"""Format -> what the engine feeds an EAGLE-3 head at image positions, a key of `VISUAL_MODES`."""
NO_SGLANG_HOOKS = ("llava", "llava_next", "llava_next_video", "llava_onevision", "vipllava")
"""Model types whose SGLang classes have no method that captures hidden states for EAGLE-3."""


def eagle3_refusal(drafter: HeadDrafter, target: TargetInfo, format_name: str) -> str | None:
    """See `HeadMethod.export_refusal`."""
    fed, trained = ENGINE_VISUAL_MODES[format_name], _trained_visual_mode(drafter)
    if trained not in (MIXED, fed):
        return (
            f"{'SGLang' if format_name == 'sglang' else 'vLLM'} feeds image positions of an EAGLE-3 head as "
            f"--set visual_mode={fed} does; this one was trained with {trained}. Train with mixed (the default) "
            f"or {fed}."
        )
    if isinstance(drafter.head, Eagle3Head) and drafter.head.config.is_layered:
        return "a head of several layers is read from where it was published, not exported; serve those files."
    if format_name == "speculators" and drafter.head.config.mrope_section:
        return "the code of speculators counts positions on one axis, this head on three (M-RoPE); use --format vllm."
    if format_name == "sglang":
        if target.model_type in NO_SGLANG_HOOKS:
            return f"SGLang captures no hidden states of {target.model_type!r} models; vLLM does (--format vllm)."
        if isinstance(drafter.head, Eagle3Head) and drafter.head.config.norm_before_residual:
            return "SGLang's EAGLE-3 layer has no norm_before_residual, with which this head was trained."
    return None


def _trained_visual_mode(drafter: HeadDrafter) -> str:
    """How visual tokens entered a head in training; heads without a record draft as `MIXED` ones do, the default."""
    mode = drafter.trained_visual_mode or drafter.visual_mode
    return MIXED if drafter.trained_visual_mode is None and mode == MIXED_DRAFTS_AS else mode


def export_eagle3(folder: Path, drafter: HeadDrafter, target: TargetInfo, format_name: str) -> None:
    """See `HeadMethod.export`: the layout of `speculators`, or the flat one of the EAGLE code."""
    head = drafter.head
    assert isinstance(head, Eagle3Head)
    weights = to_stored(head)
    if format_name == "speculators":
        values = _speculators_config(head, drafter, target)
    else:
        values = _flat_config(head, drafter, target, format_name)
        weights = {name.replace("layers.0.", "midlayer."): value for name, value in weights.items()}
    weights |= draft_vocabulary_tensors(drafter.draft_ids, target.vocab_size)
    write_checkpoint(folder, compact(weights), values)


def _speculators_config(head: Eagle3Head, drafter: HeadDrafter, target: TargetInfo) -> dict[str, Any]:
    config = head.config
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": head.lm_head.out_features,
        "norm_before_residual": config.norm_before_residual,
        "visual_mode": TRAINERS_VISUAL_MODE,
        "target_hidden_size": target.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(drafter.hidden_state_indices),
        "transformer_layer_config": layer_keys(config, target, "llama"),
        "speculators_config": speculators_section("eagle3", 3, target),
    }


def _flat_config(head: Eagle3Head, drafter: HeadDrafter, target: TargetInfo, format_name: str) -> dict[str, Any]:
    """The flat config that vLLM and SGLang read."""
    config, layers = head.config, drafter.hidden_state_indices
    values: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_keys(config, target, "llama"),
        "target_hidden_size": target.hidden_size,
        "draft_vocab_size": config.draft_vocab_size,
        **mrope_keys(config.mrope_section, config.mrope_interleaved),
        "norm_before_residual": config.norm_before_residual,
        "visual_mode": ENGINE_VISUAL_MODES[format_name],
        "eagle_config": {"use_aux_hidden_state": True},
    }
    if layers != eagle3_layers(target.num_layers):
        # Both engines default to those. vLLM counts hidden states as transformers does, SGLang outputs of layers.
        offset = 1 if format_name == "sglang" else 0
        ids = [layer - offset for layer in layers]
        values["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids
        if format_name == "vllm":
            values["eagle_aux_hidden_state_layer_ids"] = ids
    return values
