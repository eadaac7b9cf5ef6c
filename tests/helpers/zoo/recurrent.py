"""Model types whose layers keep a convolution or recurrent state."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import PreTrainedModel

from zoo import mrope
from zoo.base import NO_DOUBLE, VISION, Builder, Family, Media, noise, run_of, text_values, vision_model

STATE = "recurrent state"


def _mixed_layers(spec: Any, kind: str) -> list[str]:
    """Recurrent layers, with full attention in every second one, beginning from the second."""
    return ["full_attention" if index % 2 else kind for index in range(spec.layers)]


def gated_delta(spec: Any, ids: Any) -> dict[str, Any]:
    values = text_values(spec, ids) | {"layer_types": _mixed_layers(spec, "linear_attention")}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    return values | {
        "rope_parameters": rope,
        "linear_conv_kernel_dim": 3,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }


def _experts(spec: Any) -> dict[str, int]:
    return {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": spec.hidden,
        "shared_expert_intermediate_size": spec.hidden,
    }


def _qwen3_5(name: str) -> Builder:
    def build(spec: Any, ids: Any) -> PreTrainedModel:
        text = gated_delta(spec, ids) | (_experts(spec) if name.endswith("Moe") else {})
        text["rope_parameters"] |= {"mrope_section": mrope.mrope_section(spec), "mrope_interleaved": True}
        return vision_model(spec, ids, name, text, mrope.mrope_vision(spec, num_position_embeddings=64))

    return build


def _qwen3_next(spec: Any, ids: Any) -> PreTrainedModel:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(**gated_delta(spec, ids), **_experts(spec))
    return Qwen3NextForCausalLM._from_config(config, attn_implementation=spec.attention)


def _mamba(spec: Any) -> dict[str, int]:
    """Two groups of heads, and more tokens in a prompt than a chunk has."""
    sizes = {"n_heads": 4, "d_head": spec.hidden // 2, "n_groups": 2, "d_state": 8, "chunk_size": 8}
    return {f"mamba_{name}": size for name, size in sizes.items()}


def _bamba(spec: Any, ids: Any) -> PreTrainedModel:
    from transformers import BambaConfig, BambaForCausalLM

    attention = [index for index, kind in enumerate(_mixed_layers(spec, "")) if kind]
    config = BambaConfig(**text_values(spec, ids), **_mamba(spec), attn_layer_indices=attention)
    return BambaForCausalLM._from_config(config, attn_implementation=spec.attention)


def _granite_hybrid(spec: Any, ids: Any) -> PreTrainedModel:
    """Without experts, as the small ones of Granite 4, and without positions."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    factors = {"embedding_multiplier": 1.5, "residual_multiplier": 0.8, "logits_scaling": 0.7}
    values = text_values(spec, ids) | {"layer_types": _mixed_layers(spec, "linear_attention"), "num_local_experts": 0}
    config = GraniteMoeHybridConfig(
        **values, **_mamba(spec), **factors, attention_multiplier=0.4, shared_intermediate_size=2 * spec.hidden
    )
    return GraniteMoeHybridForCausalLM._from_config(config, attn_implementation=spec.attention)


def _lfm2_values(spec: Any, ids: Any) -> dict[str, Any]:
    values = text_values(spec, ids) | {"layer_types": _mixed_layers(spec, "conv"), "block_multiple_of": 8}
    del values["head_dim"]
    return values


def _lfm2(spec: Any, ids: Any) -> PreTrainedModel:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    return Lfm2ForCausalLM._from_config(Lfm2Config(**_lfm2_values(spec, ids)), attn_implementation=spec.attention)


def _lfm2_vl(spec: Any, ids: Any) -> PreTrainedModel:
    vision = VISION | {"patch_size": 4, "num_patches": 16, "vision_use_head": False}
    return vision_model(spec, ids, "Lfm2Vl", _lfm2_values(spec, ids), vision, projector_hidden_size=16)


def _lfm2_images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    """Images of different size in patches, padded to the largest, as the NaFlex processor does."""
    shapes = torch.tensor([[rng.choice((2, 4)), rng.choice((2, 4))] for _ in range(count)])
    sizes = shapes.prod(-1)
    longest = int(sizes.max())
    inputs = {
        "pixel_values": noise((count, longest, 48), seed, model),
        "spatial_shapes": shapes,
        "pixel_attention_mask": (torch.arange(longest) < sizes[:, None]).int(),
    }
    return inputs, [run_of(model, size // 4) for size in sizes.tolist()]


MROPE = mrope.grid_images, mrope.timed_videos, mrope.token_types, f"M-RoPE, {STATE}"
ROWS = (
    Family("qwen3_5", _qwen3_5("Qwen3_5"), *MROPE),
    Family("qwen3_5_moe", _qwen3_5("Qwen3_5Moe"), *MROPE, **NO_DOUBLE),
    Family("qwen3_next", _qwen3_next, traits=STATE, **NO_DOUBLE),
    Family("lfm2_vl", _lfm2_vl, _lfm2_images, traits=STATE),
    Family("lfm2", _lfm2, traits=STATE),
    Family("bamba", _bamba, traits=STATE),
    Family("granitemoehybrid", _granite_hybrid, traits=f"{STATE}, no positions"),
)
