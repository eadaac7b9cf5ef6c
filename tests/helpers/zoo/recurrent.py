"""Model types whose layers keep a convolution or recurrent state."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import PreTrainedModel

from zoo import mrope
from zoo.base import Family, Media, noise, text_values

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


def _qwen3_5(spec: Any, ids: Any, *, experts: bool = False) -> PreTrainedModel:
    text = gated_delta(spec, ids)
    text["rope_parameters"] |= {"mrope_section": mrope.mrope_section(spec), "mrope_interleaved": True}
    if experts:
        text |= _experts(spec)
    vision = mrope.mrope_vision(spec, num_position_embeddings=64)
    return mrope.mrope_model(spec, ids, "Qwen3_5Moe" if experts else "Qwen3_5", text, vision)


def _qwen3_5_moe(spec: Any, ids: Any) -> PreTrainedModel:
    return _qwen3_5(spec, ids, experts=True)


def _qwen3_next(spec: Any, ids: Any) -> PreTrainedModel:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(**gated_delta(spec, ids), **_experts(spec))
    return Qwen3NextForCausalLM._from_config(config, attn_implementation=spec.attention)


def _lfm2_values(spec: Any, ids: Any) -> dict[str, Any]:
    values = text_values(spec, ids) | {"layer_types": _mixed_layers(spec, "conv"), "block_multiple_of": 8}
    del values["head_dim"]
    return values


def _lfm2(spec: Any, ids: Any) -> PreTrainedModel:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    return Lfm2ForCausalLM._from_config(Lfm2Config(**_lfm2_values(spec, ids)), attn_implementation=spec.attention)


def _lfm2_vl(spec: Any, ids: Any) -> PreTrainedModel:
    from transformers import Lfm2VlConfig, Lfm2VlForConditionalGeneration

    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Lfm2VlConfig(
        vision_config=vision | {"patch_size": 4, "num_patches": 16, "vision_use_head": False},
        text_config=_lfm2_values(spec, ids),
        image_token_id=ids.image,
        projector_hidden_size=16,
        tie_word_embeddings=spec.tied,
    )
    return Lfm2VlForConditionalGeneration._from_config(config, attn_implementation=spec.attention)


def _lfm2_images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    """Images of different size in patches, padded to the largest, as the NaFlex processor does."""
    config: Any = model.config
    shapes = torch.tensor([[rng.choice((2, 4)), rng.choice((2, 4))] for _ in range(count)])
    sizes = shapes.prod(-1)
    longest = int(sizes.max())
    inputs = {
        "pixel_values": noise((count, longest, 48), seed, model),
        "spatial_shapes": shapes,
        "pixel_attention_mask": (torch.arange(longest) < sizes[:, None]).int(),
    }
    return inputs, [[config.image_token_id] * (size // 4) for size in sizes.tolist()]


ROWS = (
    Family("qwen3_5", _qwen3_5, mrope.grid_images, mrope.timed_videos, mrope.token_types, traits=f"M-RoPE, {STATE}"),
    Family(
        "qwen3_5_moe",
        _qwen3_5_moe,
        mrope.grid_images,
        mrope.timed_videos,
        mrope.token_types,
        f"M-RoPE, {STATE}",
        dtypes=("float32",),
    ),
    Family("qwen3_next", _qwen3_next, traits=STATE, dtypes=("float32",)),
    Family("lfm2_vl", _lfm2_vl, _lfm2_images, traits=STATE),
    Family("lfm2", _lfm2, traits=STATE),
)
