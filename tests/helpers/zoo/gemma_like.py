"""Model types with a mask per layer type, bidirectional images, shared keys and values, or cross-attention."""

from __future__ import annotations

import random
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from zoo.base import Family, Inputs, Media, layer_types, noise, text_values

VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def _alternating(spec: Any, last: str = "") -> dict[str, Any]:
    """Layer types of a model that always has sliding layers; without `spec.window` their window is never reached."""
    types = layer_types(spec) if spec.window else [("sliding_attention", "full_attention")[i % 2] for i in range(9)]
    types = types[: spec.layers]
    if last:
        types[-1] = last
    return {"layer_types": types, "sliding_window": spec.window or 512}


def _gemma3(spec: Any, ids: Any) -> PreTrainedModel:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = text_values(spec, ids) | _alternating(spec) | {"query_pre_attn_scalar": spec.hidden // spec.heads}
    vision = VISION | {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4, "vision_use_head": False}
    config = Gemma3Config(
        text_config=text | {"model_type": "gemma3_text"},
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=ids.image,
        boi_token_index=ids.start,
        eoi_token_index=ids.end,
        tie_word_embeddings=spec.tied,
    )
    return Gemma3ForConditionalGeneration._from_config(config, attn_implementation=spec.attention)


def _gemma3_images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    config: Any = model.config
    run = [config.boi_token_index, *[config.image_token_index] * 4, config.eoi_token_index]
    return {"pixel_values": noise((count, 3, 16, 16), seed, model)}, [run] * count


def _image_types(model: PreTrainedModel, input_ids: Tensor) -> Inputs:
    config: Any = model.config
    return {"token_type_ids": (input_ids == config.image_token_index).long()}


ROWS: tuple[Family, ...] = (
    Family(
        "gemma3",
        _gemma3,
        _gemma3_images,
        derived=_image_types,
        traits="mask per layer type; images are bidirectional in the prefill",
        has_window=True,
    ),
)
