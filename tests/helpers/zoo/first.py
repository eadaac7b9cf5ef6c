"""The model types among which random calls choose: LLaVA and its successors, Qwen2.5-VL."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from zoo.base import VISION, Builder, Family, Media, layer_types, noise, run_of, text_values, vision_model
from zoo.mrope import image_grids, mrope_section, mrope_vision, token_types, video_grids

TEXT_MODELS = {
    "llava": "llama",
    "llava_next": "mistral",
    "llava_onevision": "qwen2",
    "qwen2_5_vl": "qwen2_5_vl",
    "llava_next_video": "llama",
}
PINPOINTS = [[8, 16], [16, 8], [16, 16]]
IMAGE_SIZES = {"llava": 12, "llava_next_video": 16}
"""Edge of what the vision tower sees, 8 elsewhere; pooling by two must leave a grid."""


def _text(spec: Any, ids: Any) -> dict[str, Any]:
    """Config values of the text model that `spec.text` names, or of the family's usual one."""
    kind = spec.text or TEXT_MODELS[spec.family]
    text = text_values(spec, ids) | ({} if kind == "qwen2_5_vl" else {"model_type": kind})
    del text["head_dim"]
    if kind == "mistral":
        text["sliding_window"] = spec.window or None
    if kind.startswith("qwen"):
        text |= {"use_sliding_window": bool(spec.window), "sliding_window": spec.window or 4096, "max_window_layers": 0}
        text["layer_types"] = layer_types(spec)
    if kind == "qwen2_5_vl":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": mrope_section(spec)}
        text["rope_parameters"] = rope
    return text


def _llava(name: str, **more: Any) -> Builder:
    def build(spec: Any, ids: Any) -> PreTrainedModel:
        vision = VISION | {"image_size": IMAGE_SIZES.get(spec.family, 8), "patch_size": 4}
        own = {"model_type": "clip_vision_model", "projection_dim": 16}
        if spec.family == "llava_onevision":
            own = {"model_type": "siglip_vision_model", "vision_use_head": False}
        return vision_model(spec, ids, name, _text(spec, ids), vision | own, **more)

    return build


def _qwen2_5_vl(spec: Any, ids: Any) -> PreTrainedModel:
    vision = mrope_vision(spec, window_size=16, fullatt_block_indexes=[1], tokens_per_second=2)
    return vision_model(spec, ids, "Qwen2_5_VL", _text(spec, ids), vision)


def _square_images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    return {"pixel_values": noise((count, 3, 12, 12), seed, model)}, [run_of(model, 9)] * count


def _tiled_images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    encoder: Any = model
    sizes = torch.tensor([rng.choice(((8, 16), (16, 8), (6, 16), (16, 16), (12, 16), (15, 7))) for _ in range(count)])
    side = IMAGE_SIZES.get(encoder.config.model_type, 8)
    given = {"pixel_values": noise((count, 5, 3, side, side), seed, model), "image_sizes": sizes * (side // 8)}
    with torch.no_grad():
        features = encoder.model.get_image_features(**given, return_dict=True).pooler_output
    return given, [run_of(model, len(feature)) for feature in features]


def _frames(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    frames, family = rng.choice((2, 3, 5)), model.config.model_type
    side, length = IMAGE_SIZES.get(family, 8), 4 * frames if family == "llava_next_video" else frames + 1
    pixels = noise((count, frames, 3, side, side), seed + 1, model)
    return {"pixel_values_videos": pixels}, [run_of(model, length, "video")] * count


def _patches(model: PreTrainedModel, grid: Tensor, seed: int, media: str) -> tuple[Tensor, list[list[int]]]:
    runs = [run_of(model, size, media, enclosed=True) for size in (grid.prod(-1) // 4).tolist()]
    return noise((int(grid.prod(-1).sum()), 96), seed, model), runs


def _grid_images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    grid = image_grids(count, rng)
    pixels, runs = _patches(model, grid, seed, "image")
    return {"pixel_values": pixels, "image_grid_thw": grid}, runs


def _grid_videos(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    grid = video_grids(count, rng)
    pixels, runs = _patches(model, grid, seed + 1, "video")
    given = {"pixel_values_videos": pixels, "video_grid_thw": grid}
    if rng.random() < 0.5:
        given["second_per_grid_ts"] = torch.tensor([float(rng.choice((1, 2))) for _ in range(count)])
    return given, runs


WINDOW: dict[str, Any] = {"has_window": True}
TILES: dict[str, Any] = {"traits": "tiles with newline tokens", **WINDOW}
ROWS = (
    Family("llava", _llava("Llava", image_seq_length=9), _square_images, **WINDOW),
    Family("llava_next", _llava("LlavaNext", image_grid_pinpoints=PINPOINTS), _tiled_images, **TILES),
    Family(
        "llava_onevision", _llava("LlavaOnevision", image_grid_pinpoints=PINPOINTS), _tiled_images, _frames, **TILES
    ),
    Family("qwen2_5_vl", _qwen2_5_vl, _grid_images, _grid_videos, token_types, "M-RoPE", **WINDOW),
    Family(
        "llava_next_video",
        _llava("LlavaNextVideo", image_grid_pinpoints=[[2 * height, 2 * width] for height, width in PINPOINTS]),
        _tiled_images,
        _frames,
        **WINDOW,
    ),
)
"""Append new families: `fuzz.draw_case` chooses among the first four, so that seeds stay reproducible."""
