"""More model types whose grid sizes are inputs: with several position axes, and with one."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from zoo.base import NO_DOUBLE, VISION, Family, Media, layer_types, run_of, vision_model
from zoo.mrope import (
    glm_token_types,
    glm_videos,
    grid_images,
    grid_pixels,
    grid_videos,
    image_grids,
    mrope_text,
    mrope_vision,
    timed_videos,
    token_types,
    video_grids,
)

PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
AUDIO = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "num_mel_bins": 8}


def _qwen2_5_omni(spec: Any, ids: Any) -> PreTrainedModel:
    text = mrope_text(spec, ids, layer_types=layer_types(spec), use_sliding_window=bool(spec.window))
    text |= {"sliding_window": spec.window or None, "max_window_layers": 0}
    vision = mrope_vision(spec, window_size=16, fullatt_block_indexes=[1])
    more = {"audio_config": AUDIO | {"output_dim": spec.hidden}}
    more |= {"vision_start_token_id": ids.start, "vision_end_token_id": ids.end}
    return vision_model(spec, ids, "Qwen2_5OmniThinker", text, vision, **more)


def _qwen3_omni_moe(spec: Any, ids: Any) -> PreTrainedModel:
    text = mrope_text(spec, ids, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=spec.hidden)
    vision = mrope_vision(spec, deepstack_visual_indexes=[0, 1], num_position_embeddings=16)
    more = {"audio_config": AUDIO | {"output_dim": spec.hidden, "downsample_hidden_size": 8}}
    more |= {"vision_start_token_id": ids.start, "vision_end_token_id": ids.end}
    return vision_model(spec, ids, "Qwen3OmniMoeThinker", text, vision, **more)


def _cosmos3_omni(spec: Any, ids: Any) -> PreTrainedModel:
    vision = mrope_vision(spec, deepstack_visual_indexes=[0, 1], num_position_embeddings=16)
    return vision_model(spec, ids, "Cosmos3Omni", mrope_text(spec, ids), vision | {"model_type": "qwen3_vl_vision"})


def _cosmos3_edge(spec: Any, ids: Any) -> PreTrainedModel:
    vision = VISION | {"patch_size": 4, "num_patches": 16}
    return vision_model(spec, ids, "Cosmos3Edge", mrope_text(spec, ids), vision, projector_hidden_size=32)


def _cohere_compass(spec: Any, ids: Any) -> PreTrainedModel:
    text = mrope_text(spec, ids, layer_types=layer_types(spec), sliding_window=spec.window or 4096, logit_scale=0.5)
    rope = text["rope_parameters"]  # with both types of layers, those of full attention have no positions
    full = None if "sliding_attention" in text["layer_types"] else rope
    text["rope_parameters"] = {"sliding_attention": rope, "full_attention": full}
    text["rope_parameters"] = {kind: text["rope_parameters"][kind] for kind in set(text["layer_types"])}
    vision = mrope_vision(spec, deepstack_visual_indexes=[0, 1], num_position_embeddings=16)
    return vision_model(spec, ids, "CohereCompass", text, vision)


def _video_llama_3(spec: Any, ids: Any) -> PreTrainedModel:
    text = mrope_text(spec, ids, rope_parameters=PLAIN_ROPE, layer_types=layer_types(spec), model_type="qwen2")
    text |= {"use_sliding_window": bool(spec.window), "sliding_window": spec.window or None, "max_window_layers": 0}
    return vision_model(spec, ids, "VideoLlama3", text, VISION | {"patch_size": 4})


def _hyperclovax(spec: Any, ids: Any) -> PreTrainedModel:
    multipliers = {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 0.5}
    text = mrope_text(spec, ids, rope_parameters=PLAIN_ROPE, model_type="hyperclovax", **multipliers)
    vision = mrope_vision(spec, window_size=16, fullatt_block_indexes=[1], model_type="qwen2_5_vl_vision")
    return vision_model(spec, ids, "HyperCLOVAXVisionV2", text, vision)


def _glmga(spec: Any, ids: Any) -> PreTrainedModel:
    """The model class of GLM-4.6V."""
    return vision_model(
        spec, ids, "Glmga", mrope_text(spec, ids), mrope_vision(spec, image_size=16), model_name="Glm46V"
    )


# --- media ------------------------------------------------------------------------------------------------------------


def _omni_videos(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    given, runs = grid_videos(model, count, rng, seed)
    return given | {"video_second_per_grid": torch.tensor([rng.choice((0.5, 1.0, 0.3)) for _ in runs])}, runs


def _bare_images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    """No tokens enclose an image."""
    grid = image_grids(count, rng)
    runs = [run_of(model, size) for size in (grid.prod(-1) // 4).tolist()]
    return {"pixel_values": grid_pixels(model, grid, seed), "image_grid_thw": grid}, runs


def _bare_videos(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    grid = video_grids(count, rng)
    runs = [run_of(model, size, "video") for size in (grid.prod(-1) // 4).tolist()]
    return {"pixel_values_videos": grid_pixels(model, grid, seed), "video_grid_thw": grid}, runs


def _merged_images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    """The number of merged patches is an input too."""
    grid = image_grids(count, rng)
    merge = torch.tensor([rng.choice((1, 2)) for _ in range(count)])
    sizes = (grid.prod(-1) // merge**2).tolist()
    given = {"pixel_values": grid_pixels(model, grid, seed), "image_grid_thw": grid, "image_merge_sizes": merge}
    return given, [run_of(model, size) for size in sizes]


def _compressed_videos(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    """A mask selects the features of each frame that have placeholders."""
    grid = video_grids(count, rng)
    merge = torch.full((count,), 2)
    masks, runs = list[Tensor](), list[list[int]]()
    for num_frames, height, width in grid.tolist():
        run: list[int] = []
        for frame in range(num_frames):
            features = [frame == 0 or rng.random() < 0.6 for _ in range(height * width // 4)]
            masks.append(torch.tensor(features))
            run += [7 + frame, *run_of(model, sum(features), "video")]  # after a timestamp
        runs.append(run)
    given = {"pixel_values_videos": grid_pixels(model, grid, seed), "video_grid_thw": grid, "video_merge_sizes": merge}
    return given | {"video_compression_mask": torch.cat(masks)}, runs


ROWS = (
    Family("qwen2_5_omni_thinker", _qwen2_5_omni, grid_images, _omni_videos, traits="M-RoPE, audio", has_window=True),
    Family(
        "qwen3_omni_moe_thinker",
        _qwen3_omni_moe,
        grid_images,
        _omni_videos,
        traits="M-RoPE with fractions, deepstack, MoE, audio",
        **NO_DOUBLE,
    ),
    Family("glmga", _glmga, grid_images, glm_videos, glm_token_types, traits="M-RoPE", mixes_media=False),
    Family("cosmos3_omni", _cosmos3_omni, grid_images, timed_videos, token_types, traits="M-RoPE, deepstack"),
    Family("cosmos3_edge", _cosmos3_edge, grid_images, timed_videos, token_types, traits="M-RoPE"),
    Family(
        "cohere_compass",
        _cohere_compass,
        grid_images,
        timed_videos,
        token_types,
        traits="M-RoPE, deepstack, sliding and full layers, the latter without positions",
        has_window=True,
        min_transformers="5.23",  # 5.18 has it, but rejects pixel values
    ),
    Family("video_llama_3", _video_llama_3, _merged_images, _compressed_videos, has_window=True),
    Family("hyperclovax_vision_v2", _hyperclovax, _bare_images, _bare_videos),
)
