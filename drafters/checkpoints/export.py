"""Draft heads written for serving engines: vLLM, SGLang, and the `speculators` library.

An engine feeds a head in its own way, so some heads cannot be served there; `refusal` says which and why. The layouts
are in `speculators` (EAGLE-3) and `dspark`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mmspec.drafters.checkpoints.format import compact, write_checkpoint
from mmspec.drafters.heads.base.drafter import HeadDrafter
from mmspec.drafters.heads.dspark.checkpoint import export_dspark
from mmspec.drafters.heads.dspark.drafter import DsparkDrafter
from mmspec.drafters.heads.dspark.head import DsparkHead
from mmspec.drafters.heads.eagle.drafter import EagleDrafter
from mmspec.drafters.heads.eagle3.checkpoint import draft_vocabulary_tensors, eagle3_tensors, export_speculators
from mmspec.drafters.heads.eagle3.head import Eagle3Head, eagle3_layers
from mmspec.drafters.heads.eagle3.mrope import mrope_keys
from mmspec.drafters.training.batch import MIXED, MIXED_DRAFTS_AS
from mmspec.interfaces import SharedEmbeddings, TargetInfo

EXPORT_FORMATS = ("vllm", "sglang", "speculators")
ENGINE_VISUAL_MODES = {"vllm": "placeholder", "speculators": "placeholder", "sglang": "coupled"}
"""Format -> what the engine feeds an EAGLE-3 head at image positions, a key of `VISUAL_MODES`."""
NO_SGLANG_HOOKS = ("llava", "llava_next", "llava_next_video", "llava_onevision", "vipllava")
"""Model types whose SGLang classes have no method that captures hidden states for EAGLE-3."""
PUBLISHED_SETTINGS = (
    "rope_scaling", "rotary_dim", "qk_norm", "norm_before_fc", "fc_norm", "norm_output", "target_hidden_size",
    "sliding_windows", "causal_layers",
)  # fmt: skip
"""Fields of `HeadConfig` that heads trained here do not have."""
HEAD_MAX_POSITIONS = 1 << 17
"""`max_position_embeddings` of a head: RoPE has no limit, engines ask for one."""


def export_head(
    folder: str | os.PathLike[str],
    drafter: HeadDrafter,
    target: TargetInfo,
    format_name: str,
    shared_embeddings: SharedEmbeddings | None = None,
) -> None:
    """Write a drafter's head as an engine reads it: `config.json` and `model.safetensors`.

    Args:
        folder: to write to.
        drafter: a trained drafter, on the CPU.
        target: facts about its target.
        format_name: one of `EXPORT_FORMATS`.
        shared_embeddings: of the target; needed for DSpark heads.

    Raises:
        ValueError: the engine cannot serve such a head, or it needs the target's embeddings.
    """
    if (reason := refusal(drafter, target, format_name)) is not None:
        raise ValueError(reason)
    if isinstance(drafter, DsparkDrafter):
        if shared_embeddings is None:
            raise ValueError("a dspark head is exported with the target's embeddings: name the target (--target).")
        mask_token_id = next(iter(target.media_token_ids), 0)  # never drafted, so its row is free
        export_dspark(Path(folder), drafter, target, shared_embeddings, mask_token_id)
        return
    assert isinstance(drafter, EagleDrafter)
    if format_name == "speculators":
        export_speculators(folder, drafter, target)
        return
    head = drafter.head
    assert isinstance(head, Eagle3Head)
    weights = {name.replace("layers.0.", "midlayer."): value for name, value in eagle3_tensors(head).items()}
    weights |= draft_vocabulary_tensors(drafter.draft_ids, target.vocab_size)
    write_checkpoint(Path(folder), compact(weights), _eagle3_config(head, drafter, target, format_name))


def refusal(drafter: HeadDrafter, target: TargetInfo, format_name: str) -> str | None:
    """Why an engine cannot serve a head; None if it can."""
    if format_name not in EXPORT_FORMATS:
        return f"the format must be one of {', '.join(EXPORT_FORMATS)}; got {format_name!r}."
    if (setting := _unwritten_setting(drafter)) is not None:
        return f"a head with {setting} is read from where it was published, not exported; serve those files."
    layers = drafter.hidden_state_indices
    if isinstance(drafter.head, (Eagle3Head, DsparkHead)) and (
        list(layers) != sorted(set(layers)) or layers[0] < 1 or layers[-1] >= target.num_layers
    ):
        return (
            f"engines read the inputs of layers 1 to {target.num_layers - 1}, in increasing order; this head was "
            f"trained with --layers {','.join(map(str, layers))}."
        )
    if isinstance(drafter, DsparkDrafter):
        return _dspark_refusal(drafter, format_name)
    if not isinstance(drafter.head, Eagle3Head):
        if drafter.visual_mode == "decoupled" and type(drafter) is EagleDrafter:
            return (
                "MSD feeds a visual token as its projected embedding alone, without a hidden state; no engine does. "
                "Train --drafter eagle3."
            )
        return f"no engine serves the architecture of {drafter.name!r}; eagle3 and dspark heads can be exported."
    fed, trained = ENGINE_VISUAL_MODES[format_name], _trained_visual_mode(drafter)
    if trained not in (MIXED, fed):
        return (
            f"{'SGLang' if format_name == 'sglang' else 'vLLM'} feeds image positions of an EAGLE-3 head as "
            f"--visual-mode {fed} does; this one was trained with {trained}. Train with mixed, the default, or {fed}."
        )
    if format_name == "sglang":
        if target.model_type in NO_SGLANG_HOOKS:
            return f"SGLang captures no hidden states of {target.model_type!r} models; vLLM does (--format vllm)."
        if drafter.head.config.norm_before_residual:
            return "SGLang's EAGLE-3 layer has no norm_before_residual, with which this head was trained."
    return None


def _dspark_refusal(drafter: DsparkDrafter, format_name: str) -> str | None:
    if format_name == "sglang":
        return "SGLang has a layout of its own for DSpark heads, which is not written; use --format vllm."
    if drafter.visual_mode != "coupled":
        return f"engines give a DSpark head all positions as context; this one was trained {drafter.visual_mode!r}."
    return None


def _trained_visual_mode(drafter: HeadDrafter) -> str:
    """How visual tokens entered a head in training; heads without a record draft as `MIXED` ones do, the default."""
    mode = drafter.trained_visual_mode or drafter.visual_mode
    return MIXED if drafter.trained_visual_mode is None and mode == MIXED_DRAFTS_AS else mode


def _unwritten_setting(drafter: HeadDrafter) -> str | None:
    """A setting of published heads that the exported configs have no key for here; None if there is none."""
    if drafter.own_embeddings is not None:
        return "embeddings of its own"
    config = drafter.head.config
    return next((name for name in PUBLISHED_SETTINGS if getattr(config, name)), None)


def _eagle3_config(head: Eagle3Head, drafter: EagleDrafter, target: TargetInfo, format_name: str) -> dict[str, Any]:
    """The flat config that vLLM and SGLang read."""
    config, layers = head.config, drafter.hidden_state_indices
    values: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "target_hidden_size": target.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        **mrope_keys(config.mrope_section, config.mrope_interleaved),
        "max_position_embeddings": HEAD_MAX_POSITIONS,
        "norm_before_residual": config.norm_before_residual,
        "visual_mode": ENGINE_VISUAL_MODES[format_name],
        "tie_word_embeddings": False,
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
