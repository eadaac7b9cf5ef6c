"""Model types with several position axes (M-RoPE)."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from zoo.base import Family, Inputs, Media, layer_types, noise, text_values


def _mrope_section(spec: Any) -> list[int]:
    half = spec.hidden // spec.heads // 2
    return [half - 2 * (half // 3), half // 3, half // 3]


def _token_types(model: PreTrainedModel, input_ids: Tensor) -> Inputs:
    config: Any = model.config
    types = (input_ids == config.image_token_id).int() + 2 * (input_ids == config.video_token_id).int()
    return {"mm_token_type_ids": types}


def _qwen2_vl(spec: Any, ids: Any) -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": _mrope_section(spec)}
    text = text_values(spec, ids) | {"rope_parameters": rope, "layer_types": layer_types(spec)}
    text |= {"use_sliding_window": bool(spec.window), "sliding_window": spec.window or None, "max_window_layers": 0}
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": spec.hidden, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    config = Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids.image,
        video_token_id=ids.video,
        vision_start_token_id=ids.start,
        vision_end_token_id=ids.end,
        tie_word_embeddings=spec.tied,
    )
    return Qwen2VLForConditionalGeneration._from_config(config, attn_implementation=spec.attention)


def _grid_inputs(model: PreTrainedModel, grid: Tensor, seed: int) -> tuple[Tensor, list[int]]:
    """Patches of images of the grid sizes [M, 3] (in patches), and the number of tokens of each."""
    vision: Any = model.config.vision_config
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    merge = vision.spatial_merge_size**2
    return noise((int(grid.prod(-1).sum()), patch), seed, model), (grid.prod(-1) // merge).tolist()


def _images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    config: Any = model.config
    grid = torch.tensor([[1, rng.choice((2, 4, 6)), rng.choice((2, 4))] for _ in range(count)])
    pixels, sizes = _grid_inputs(model, grid, seed)
    start, end = config.vision_start_token_id, config.vision_end_token_id
    return {"pixel_values": pixels, "image_grid_thw": grid}, [[start, *[config.image_token_id] * n, end] for n in sizes]


def _videos(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    config: Any = model.config
    grid = torch.tensor([[rng.choice((2, 3)), rng.choice((2, 4)), rng.choice((2, 4))] for _ in range(count)])
    pixels, sizes = _grid_inputs(model, grid, seed)
    start, end = config.vision_start_token_id, config.vision_end_token_id
    runs = [[start, *[config.video_token_id] * n, end] for n in sizes]
    return {"pixel_values_videos": pixels, "video_grid_thw": grid}, runs


ROWS = (Family("qwen2_vl", _qwen2_vl, _images, _videos, _token_types, traits="M-RoPE"),)
