"""EAGLE-3 heads written for vLLM, SGLang and `speculators`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmspec.drafters.checkpoints.draft_vocab import draft_vocabulary_tensors, layer_keys, speculators_section
from mmspec.drafters.checkpoints.format import compact, write_checkpoint
from mmspec.drafters.checkpoints.state_dict import to_stored
from mmspec.drafters.heads.base.drafter import HeadDrafter
from mmspec.drafters.heads.eagle3.checkpoint import TRAINERS_VISUAL_MODE
from mmspec.drafters.heads.eagle3.head import Eagle3Head, eagle3_layers
from mmspec.drafters.heads.eagle3.mrope import mrope_keys
from mmspec.drafters.training.batch import MIXED, MIXED_DRAFTS_AS
from mmspec.interfaces import TargetInfo

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
