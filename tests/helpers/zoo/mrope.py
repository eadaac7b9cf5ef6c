"""Model types with several position axes (M-RoPE)."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from zoo.base import (
    NO_DOUBLE,
    VISION,
    Family,
    Inputs,
    Media,
    layer_types,
    noise,
    run_of,
    text_values,
    vision_model,
)


def mrope_section(spec: Any, factor: float = 1.0) -> list[int]:
    half = int(spec.hidden // spec.heads * factor) // 2
    return [half - 2 * (half // 3), half // 3, half // 3]


def mrope_text(spec: Any, ids: Any, **changes: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": mrope_section(spec)}
    return text_values(spec, ids) | {"rope_parameters": rope} | changes


def mrope_vision(spec: Any, **changes: Any) -> dict[str, Any]:
    """A vision tower of two layers, named as in Qwen2-VL and its successors."""
    shape = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
    return shape | {"out_hidden_size": spec.hidden} | changes


# --- builders ---------------------------------------------------------------------------------------------------------


def _qwen2_vl(spec: Any, ids: Any) -> PreTrainedModel:
    text = mrope_text(spec, ids, layer_types=layer_types(spec), use_sliding_window=bool(spec.window))
    text |= {"sliding_window": spec.window or None, "max_window_layers": 0}
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": spec.hidden, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    return vision_model(spec, ids, "Qwen2VL", text, vision)


def _qwen3_vl(spec: Any, ids: Any) -> PreTrainedModel:
    # Features of both vision layers are added to the states of the first two text layers.
    vision = mrope_vision(spec, deepstack_visual_indexes=[0, 1], num_position_embeddings=16)
    return vision_model(spec, ids, "Qwen3VL", mrope_text(spec, ids), vision)


def _qwen3_vl_moe(spec: Any, ids: Any) -> PreTrainedModel:
    text = mrope_text(spec, ids, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=spec.hidden)
    vision = mrope_vision(spec, deepstack_visual_indexes=[0, 1], num_position_embeddings=16)
    return vision_model(spec, ids, "Qwen3VLMoe", text, vision)


def _glm4v(spec: Any, ids: Any, name: str = "Glm4v") -> PreTrainedModel:
    return vision_model(spec, ids, name, mrope_text(spec, ids), mrope_vision(spec, image_size=16))


def _glm46v(spec: Any, ids: Any) -> PreTrainedModel:
    return _glm4v(spec, ids, "Glm46V")


def _glm_ocr(spec: Any, ids: Any) -> PreTrainedModel:
    return _glm4v(spec, ids, "GlmOcr")


def _glm4v_moe(spec: Any, ids: Any) -> PreTrainedModel:
    text = mrope_text(spec, ids, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2)
    text |= {"moe_intermediate_size": spec.hidden, "first_k_dense_replace": 1}
    text["rope_parameters"] |= {"mrope_section": mrope_section(spec, 0.5), "partial_rotary_factor": 0.5}
    return vision_model(spec, ids, "Glm4vMoe", text, mrope_vision(spec, image_size=16))


def _paddleocr_vl(spec: Any, ids: Any) -> PreTrainedModel:
    return vision_model(spec, ids, "PaddleOCRVL", mrope_text(spec, ids), VISION | {"image_size": 16, "patch_size": 4})


def _ernie4_5_vl_moe(spec: Any, ids: Any) -> PreTrainedModel:
    text = mrope_text(spec, ids, moe_num_experts=4, moe_k=2, moe_num_shared_experts=1)
    text |= {"moe_intermediate_size": [spec.hidden, spec.hidden // 2]}
    half = spec.hidden // spec.heads // 2  # sections of height, width and time; the first two are interleaved
    side = half // 3
    text["rope_parameters"]["mrope_section"] = [side, side, half - 2 * side]
    return vision_model(spec, ids, "Ernie4_5_VLMoe", text, mrope_vision(spec))


def _hunyuan_vl(spec: Any, ids: Any) -> PreTrainedModel:
    half = spec.hidden // spec.heads // 2
    section = [half - 3 * (half // 4), half // 4, half // 4, half // 4]
    rope = {"rope_type": "dynamic", "alpha": 1000.0, "rope_theta": 10000.0, "factor": 1.0, "mrope_section": section}
    vision = VISION | {"out_hidden_size": spec.hidden, "patch_size": 4, "max_image_size": 16, "min_image_size": 8}
    return vision_model(spec, ids, "HunYuanVL", mrope_text(spec, ids, rope_parameters=rope), vision)


# --- media ------------------------------------------------------------------------------------------------------------


def grid_pixels(model: PreTrainedModel, grid: Tensor, seed: int) -> Tensor:
    """Patches of images of the grid sizes [M, 3] (in patches)."""
    vision: Any = model.config.vision_config
    channels = getattr(vision, "in_channels", None) or vision.num_channels
    patch = channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
    return noise((int(grid.prod(-1).sum()), patch), seed, model)


def _pixels_and_sizes(model: PreTrainedModel, grid: Tensor, seed: int) -> tuple[Tensor, list[int]]:
    """Patches of images of the grid sizes [M, 3] (in patches), and the number of merged patches of each."""
    merge = model.config.vision_config.spatial_merge_size**2
    return grid_pixels(model, grid, seed), (grid.prod(-1) // merge).tolist()


def image_grids(count: int, rng: random.Random, sides: tuple[int, ...] = (2, 4, 6)) -> Tensor:
    return torch.tensor([[1, rng.choice(sides), rng.choice(sides[:2])] for _ in range(count)])


def video_grids(count: int, rng: random.Random) -> Tensor:
    return torch.tensor([[rng.choice((2, 3)), rng.choice((2, 4)), rng.choice((2, 4))] for _ in range(count)])


def grid_images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    grid = image_grids(count, rng)
    pixels, sizes = _pixels_and_sizes(model, grid, seed)
    runs = [run_of(model, size, enclosed=True) for size in sizes]
    return {"pixel_values": pixels, "image_grid_thw": grid}, runs


def grid_videos(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    """One run of placeholders per video."""
    grid = video_grids(count, rng)
    pixels, sizes = _pixels_and_sizes(model, grid, seed)
    runs = [run_of(model, size, "video", enclosed=True) for size in sizes]
    return {"pixel_values_videos": pixels, "video_grid_thw": grid}, runs


def timed_videos(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    """A timestamp and a run of placeholders per frame."""
    grid = video_grids(count, rng)
    pixels, sizes = _pixels_and_sizes(model, grid, seed)
    runs: list[list[int]] = []
    for num_frames, size in zip(grid[:, 0].tolist(), sizes, strict=True):
        frame = run_of(model, size // num_frames, "video", enclosed=True)
        times = [rng.choices(range(7, 27), k=rng.randint(1, 2)) for _ in range(num_frames)]  # text ids
        runs.append([token for time in times for token in [*time, *frame]])
    return {"pixel_values_videos": pixels, "video_grid_thw": grid}, runs


def glm_videos(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    """As `timed_videos`, but image placeholders, within tokens that start and end the video."""
    given, runs = timed_videos(model, count, rng, seed)
    config: Any = model.config
    exchanged = [[config.image_token_id if token == config.video_token_id else token for token in run] for run in runs]
    return given, [[config.video_start_token_id, *run, config.video_end_token_id] for run in exchanged]


def _paddle_images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    given, runs = grid_images(model, count, rng, seed)
    side = model.config.vision_config.patch_size
    return given | {"pixel_values": given["pixel_values"].unflatten(-1, (-1, side, side))}, runs


def _ernie_videos(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    """Pairs of frames share their tokens."""
    grid = video_grids(count, rng)
    grid[:, 0] = 2 * grid[:, 0] - 2
    pixels, sizes = _pixels_and_sizes(model, grid, seed)
    config: Any = model.config
    start, end = config.video_start_token_id, config.video_end_token_id
    runs = [[start, *[config.video_token_id] * (size // 2), end] for size in sizes]
    return {"pixel_values_videos": pixels, "video_grid_thw": grid}, runs


def _hunyuan_images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    """A separator after each line, and one token before and after each image."""
    grid = image_grids(count, rng)
    pixels, _ = _pixels_and_sizes(model, grid, seed)
    merged = (grid[:, 1:] // model.config.vision_config.spatial_merge_size).tolist()
    runs = [run_of(model, height * (width + 1) + 2, enclosed=True) for height, width in merged]
    return {"pixel_values": pixels, "image_grid_thw": grid}, runs


# --- inputs derived from the prompt -----------------------------------------------------------------------------------


def token_types(model: PreTrainedModel, input_ids: Tensor) -> Inputs:
    config: Any = model.config
    types = (input_ids == config.image_token_id).int()
    if hasattr(config, "video_token_id"):
        types += 2 * (input_ids == config.video_token_id).int()
    return {"mm_token_type_ids": types}


def glm_token_types(model: PreTrainedModel, input_ids: Tensor) -> Inputs:
    """Image placeholders within a video are of type 2."""
    config: Any = model.config
    starts, ends = (input_ids == token for token in (config.video_start_token_id, config.video_end_token_id))
    in_video = starts.cumsum(-1) > ends.cumsum(-1)
    return {"mm_token_type_ids": (input_ids == config.image_token_id).int() * (1 + in_video.int())}


def _ernie_token_types(model: PreTrainedModel, input_ids: Tensor) -> Inputs:
    """Tokens around images and videos are routed to the experts of the vision tokens too."""
    config: Any = model.config
    given = token_types(model, input_ids)
    routed = given["mm_token_type_ids"].clone()
    for kind, name in ((1, "image"), (2, "video")):
        for side in ("start", "end"):
            routed[input_ids == getattr(config, f"{name}_{side}_token_id")] = kind
    return given | {"moe_mm_token_type_ids": routed}


ROWS = (
    Family("qwen2_vl", _qwen2_vl, grid_images, grid_videos, token_types, traits="M-RoPE", has_window=True),
    Family("qwen3_vl", _qwen3_vl, grid_images, timed_videos, token_types, traits="M-RoPE, deepstack"),
    Family(
        "qwen3_vl_moe",
        _qwen3_vl_moe,
        grid_images,
        timed_videos,
        token_types,
        traits="M-RoPE, deepstack, MoE",
        **NO_DOUBLE,
    ),
    Family("glm4v", _glm4v, grid_images, glm_videos, glm_token_types, traits="M-RoPE", mixes_media=False),
    Family("glm46v", _glm46v, grid_images, glm_videos, glm_token_types, traits="M-RoPE", mixes_media=False),
    Family("glm_ocr", _glm_ocr, grid_images, glm_videos, glm_token_types, traits="M-RoPE", mixes_media=False),
    Family("paddleocr_vl", _paddleocr_vl, _paddle_images, None, token_types, traits="M-RoPE"),
    Family(
        "glm4v_moe",
        _glm4v_moe,
        grid_images,
        glm_videos,
        glm_token_types,
        traits="M-RoPE, MoE",
        mixes_media=False,
        **NO_DOUBLE,
    ),
    Family(
        "ernie4_5_vl_moe",
        _ernie4_5_vl_moe,
        grid_images,
        _ernie_videos,
        _ernie_token_types,
        traits="M-RoPE, MoE with separate experts for vision tokens",
        **NO_DOUBLE,
    ),
    Family(
        "hunyuan_vl",
        _hunyuan_vl,
        _hunyuan_images,
        None,
        token_types,
        traits="M-RoPE of four axes",
        min_transformers="5.23",  # in 5.18 its rotary frequencies change beyond `max_position_embeddings`
    ),
)
