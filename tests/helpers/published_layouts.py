"""The layouts of published draft heads, and the keys of their configs, in small."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

H, INTERMEDIATE, HEADS, V, DRAFT_V = 32, 40, 2, 120, 50
"""Sizes of every head; `head_dim` is 16."""
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_act": "silu", "hidden_size": H, "intermediate_size": INTERMEDIATE,
    "num_attention_heads": HEADS, "num_hidden_layers": 1, "vocab_size": V, "rms_norm_eps": 1e-05,
    "max_position_embeddings": 2048, "initializer_range": 0.02, "tie_word_embeddings": False, "use_cache": True,
    "torch_dtype": "float16", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "transformers_version": "4.28.1",
}  # fmt: skip
QWEN: dict[str, Any] = LLAMA | {
    "attention_bias": False, "attention_dropout": 0.0, "head_dim": 16, "num_key_value_heads": 1, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000, "sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 28,
    "draft_vocab_size": DRAFT_V, "pretraining_tp": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """A published layout.

    Attributes:
        config: as published, in small.
        family: of a tiny target that such heads exist for.
        kind: "eagle", "msd", "vispec", "eagle3", "block" (DFlash and DSpark), "dflash2", "domino" or "lilicorr".
        options: what its tensors have: `bias` of `fc`, `qkv_bias`, `input_norm`, `final_norm`, `layer` (the prefix of
            the layer), `adaptor` (that of ViSpec's), `markov`, `pairs`, `convolution`, `gru`, `lattice`, `lm_head`,
            `map`; and what its code does, as arguments of `SlowBlock`, in `reader`.
    """

    config: Mapping[str, Any]
    family: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)


MSD_LLAVA = {
    "architectures": ["LlavaLlamaForCausalLM"],
    "model_type": "llava",
    "rope_scaling": None,
    "vocab_size": V - 4,
}
QWEN_VL_TOKENS = {"vision_start_token_id": 5, "vision_end_token_id": 6, "image_token_id": 3, "video_token_id": 4}
ANGELSLIM = (
    QWEN | {"architectures": ["Eagle3LlamaForCausalLM"], "modal_type": "VLM", "rope_theta": 5000000} | QWEN_VL_TOKENS
)
INTERLEAVED = {"type": "default", "rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]}
SPECULATORS_LAYER = {key: value for key, value in QWEN.items() if key not in ("draft_vocab_size", "torch_dtype")}
LAYOUTS: dict[str, Layout] = {
    "EAGLE-1/2, Vicuna": Layout(
        LLAMA | {"architectures": ["LlamaForCausalLM"], "rope_scaling": None}, "llava", "eagle"
    ),
    "EAGLE-1/2, LLaMA-3": Layout(
        LLAMA
        | {"architectures": ["LlamaForCausalLM"], "bias": False, "num_key_value_heads": 1, "rope_theta": 500000.0},
        "llava",
        "eagle",
        {"bias": False},
    ),
    "EAGLE-1/2, Qwen2": Layout(
        LLAMA
        | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "qkv_bias": True, "rope_theta": 1000000.0},
        "qwen2_5_vl",
        "eagle",
        {"qkv_bias": True},
    ),
    "MSD, LLaVA-1.5": Layout(LLAMA | MSD_LLAVA | {"image_token_index": -200}, "llava", "msd"),
    "MSD, Qwen2-VL": Layout(
        LLAMA
        | {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "num_key_value_heads": 1}
        | {"rope_theta": 1000000.0, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        "qwen2_5_vl",
        "msd",
        {"qkv_bias": True, "input_norm": True},
    ),
    "ViSpec, LLaVA-NeXT": Layout(
        LLAMA | {"model_type": "llava_next", "pretraining_tp": 1, "rope_scaling": None, "num_key_value_heads": HEADS},
        "llava_next",
        "vispec",
    ),
    "ViSpec, Qwen2.5-VL": Layout(
        LLAMA
        | {"model_type": "qwen2_5_vl", "qkv_bias": True, "rope_theta": 1000000.0, "num_key_value_heads": HEADS}
        | {"rms_norm_eps": 1e-6, "max_position_embeddings": 8192},
        "qwen2_5_vl",
        "vispec",
        {"qkv_bias": True, "queries": 3},
    ),
    "MSD, NeMo Automodel": Layout(
        QWEN
        | {"architectures": ["MultimodalEagleDraftModel"], "model_type": "qwen3_vl_text", "vocab_size": V}
        | {"draft_num_hidden_layers": 1, "fc_bias": False, "draft_vocab_size": None},
        "qwen3_vl",
        "msd",
        {"bias": False, "input_norm": True, "final_norm": True},
    ),
    "ViSpec, NeMo Automodel": Layout(
        QWEN
        | {"architectures": ["VispecDraftModel"], "model_type": "qwen2_5_vl_text", "num_key_value_heads": HEADS}
        | {"qkv_bias": True, "fc_bias": True, "vispec_num_query_tokens": 3, "draft_vocab_size": None},
        "qwen2_5_vl",
        "vispec",
        {"qkv_bias": True, "queries": 3, "input_norm": True, "final_norm": True, "adaptor": "img_adaptor"},
    ),
    "EAGLE-3, EAGLE code": Layout(
        LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_V, "num_key_value_heads": 1},
        "llava",
        "eagle3",
    ),
    "EAGLE-3, speculators": Layout(
        {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": DRAFT_V,
            "norm_before_residual": True,
            "target_hidden_size": None,
            "tie_word_embeddings": False,
            "transformer_layer_config": SPECULATORS_LAYER,
            "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy", "verifier": {}},
        },
        "llava",
        "eagle3",
        {"layer": "layers.0"},
    ),
    "EAGLE-3, speculators, with the section of its target": Layout(
        {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": DRAFT_V,
            "norm_before_residual": False,
            "transformer_layer_config": {key: value for key, value in SPECULATORS_LAYER.items() if key != "rope_theta"}
            | {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1000000.0,
                    "mrope_section": [2, 3, 3],
                    "partial_rotary_factor": 1.0,
                }
            },
        },
        "qwen3_vl",
        "eagle3",
        {"layer": "layers.0"},
    ),
    "EAGLE-3, speculators 0.7": Layout(
        {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": DRAFT_V,
            "norm_before_residual": True,
            "transformer_layer_config": SPECULATORS_LAYER
            | {
                "num_hidden_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 6,
                "use_sliding_window": True,
                "head_dim": 12,
            },
        },
        "llava",
        "eagle3",
        {"layer": "layers.0"},
    ),
    "EAGLE-3, SpecForge": Layout(
        QWEN | {"architectures": ["LlamaForCausalLMEagle3"], "rope_scaling": None}, "qwen3_vl", "eagle3"
    ),
    "EAGLE-3, SpecForge, M-RoPE": Layout(
        QWEN
        | {"architectures": ["LlamaForCausalLMEagle3"], "target_model_type": "qwen2_5_vl"}
        | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        "qwen2_5_vl",
        "eagle3",
    ),
    "EAGLE-3, SpecForge, M-RoPE in rope_parameters": Layout(
        {key: value for key, value in QWEN.items() if key != "rope_theta"}
        | {"architectures": ["LlamaForCausalLMEagle3"]}
        | {"rope_parameters": {"rope_type": "mrope", "mrope_section": [2, 3, 3], "rope_theta": 1000000}},
        "qwen2_5_vl",
        "eagle3",
    ),
    "EAGLE-3, AngelSlim, M-RoPE": Layout(
        ANGELSLIM | {"target_model_type": "qwen3_vl", "rope_scaling": INTERLEAVED}, "qwen3_vl", "eagle3"
    ),
    "EAGLE-3, AngelSlim, M-RoPE in rope_parameters": Layout(
        {key: value for key, value in ANGELSLIM.items() if key != "rope_theta"}
        | {"rope_parameters": INTERLEAVED | {"rope_theta": 5000000.0}},
        "qwen3_vl",
        "eagle3",
    ),
    "EAGLE-3, AngelSlim, M-RoPE without its key": Layout(
        ANGELSLIM | {"target_model_type": "qwen2_5_vl", "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        "qwen2_5_vl",
        "eagle3",
    ),
}
BLOCK: dict[str, Any] = {key: value for key, value in QWEN.items() if key != "draft_vocab_size"} | {
    "model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "num_target_layers": 8,
    "block_size": 4, "sliding_window": None, "max_window_layers": 2,
}  # fmt: skip
DFLASH2: dict[str, Any] = {
    "conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5, "input_embedding_scale": 1.0,
    "output_multiplier": 1.0, "final_logit_softcapping": None,
}  # fmt: skip
DOMINO: dict[str, Any] = {
    "projector_type": "domino", "emb_dim": 7, "gru_hidden_dim": 9, "pure_draft_prefix_len": 1, "shift_label": True,
}  # fmt: skip
LILICORR: dict[str, Any] = {
    "causal": False, "projector_type": "lilicorr", "lilicorr_enabled": True, "lilicorr_candidate_topk": 4,
    "lilicorr_hidden_size": 12, "lilicorr_num_layers": 2, "lilicorr_num_heads": 2, "lilicorr_mlp_ratio": 1.5,
    "lilicorr_factor_dim": 5, "lilicorr_vector_eps": 1e-4, "lilicorr_logit_scale": 8.0,
}  # fmt: skip
DSPARK: dict[str, Any] = {
    "attention_mode": "gqa", "confidence_head_alpha": 1.0, "confidence_head_with_markov": True,
    "enable_confidence_head": True, "markov_head_type": "vanilla", "markov_rank": 6, "projector_type": "dspark",
}  # fmt: skip
DEEPSPEC = BLOCK | {
    "architectures": ["Qwen3DSparkModel"], "mask_token_id": V - 1, "target_layer_ids": [0, 3, 6], "num_anchors": 512,
    "markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}  # fmt: skip
OUTPUTS_OF_LAYERS = {"layer_offset": 1, "is_neox": True}
INPUTS_OF_LAYERS = {"layer_offset": 0, "is_neox": True}


def _flat(name: str, section: Mapping[str, Any], kind: str, *, from_anchor: bool, **options: Any) -> Layout:
    """A layout with a section of the method beside the keys of a layer."""
    config = BLOCK | {
        "architectures": [f"{name}DraftModel"],
        "dflash_config": {"mask_token_id": V - 1, "target_layer_ids": [0, 3, 6], **section},
    }
    return Layout(config, "qwen3_vl", kind, options | {"reader": {"from_anchor": from_anchor, **OUTPUTS_OF_LAYERS}})


def _speculators_block(kind: str, num_tokens: int, **values: Any) -> dict[str, Any]:
    """A config of `speculators`, where the anchor predicts if a block has as many positions as tokens."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_tokens}
    return {
        "architectures": [f"{kind.upper()}Speculator"], "speculators_model_type": kind.lower(), "block_size": 4,
        "mask_token_id": V - 1, "aux_hidden_state_layer_ids": [1, 4, 7], "draft_vocab_size": DRAFT_V,
        "transformer_layer_config": {key: value for key, value in BLOCK.items() if key != "block_size"},
        "speculators_config": {"algorithm": kind.lower(), "proposal_methods": [proposal], "verifier": {}}, **values,
    }  # fmt: skip


LAYOUTS |= {
    "DFlash, z-lab": _flat("DFlash", {}, "block", from_anchor=False),
    "DFlash 2, NeMo Automodel": _flat("DFlash2", DFLASH2, "dflash2", from_anchor=False, pairs=6),
    "Domino, SpecForge": _flat("Domino", DOMINO, "domino", from_anchor=True, gru=9),
    "Domino, SpecForge, for SGLang": _flat(
        "DFlash", DOMINO | {"pure_draft_prefix_len": 0, "shift_label": False}, "domino", from_anchor=False, gru=9
    ),
    "LiLiCorr, Model-Optimizer": _flat("LiLiCorr", LILICORR, "lilicorr", from_anchor=False, lattice="numbered"),
    "LiLiCorr, Model-Optimizer, with convolution": _flat(
        "LiLiCorr",
        LILICORR | {"lilicorr_hidden_size": H, "conv_kernel_size": 2, "conv_group_size": 8},
        "lilicorr",
        from_anchor=False,
        lattice="named",
        convolution=True,
    ),
    "DSpark, SpecForge": _flat("DSpark", DSPARK, "block", from_anchor=True, markov=True),
    "DSpark, DeepSeek": Layout(
        DEEPSPEC, "llava", "block", {"markov": True, "lm_head": V, "reader": {"from_anchor": True, **OUTPUTS_OF_LAYERS}}
    ),
    "DFlash, DeepSeek": Layout(
        DEEPSPEC | {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
        "llava",
        "block",
        {"lm_head": V, "reader": {"from_anchor": True, **OUTPUTS_OF_LAYERS}},
    ),
    "DSpark, LiquidAI": Layout(
        DEEPSPEC | {"architectures": ["Lfm2DSparkDraftModel"], "rope_is_neox_style": False},
        "llava",
        "block",
        {"markov": True, "reader": {"from_anchor": True, **OUTPUTS_OF_LAYERS, "is_neox": False}},
    ),
    "DSpark, speculators": Layout(
        _speculators_block("DSpark", 4, markov_rank=6, markov_head_type="vanilla", enable_confidence_head=True),
        "llava",
        "block",
        {"markov": True, "lm_head": DRAFT_V, "map": True, "reader": {"from_anchor": True, **INPUTS_OF_LAYERS}},
    ),
    "DFlash, speculators": Layout(
        _speculators_block("DFlash", 3),
        "llava",
        "block",
        {"lm_head": DRAFT_V, "map": True, "reader": {"from_anchor": False, **INPUTS_OF_LAYERS}},
    ),
}
"""EAGLE-1/2 (yuhuili), MSD (lucylyn), ViSpec (JLKang), EAGLE-3 of the EAGLE code, speculators, SpecForge, AngelSlim;
DFlash and DSpark of z-lab, DeepSeek, LiquidAI and speculators; LiLiCorr under both names that its layers have."""
