"""Model types of 2026. As many placeholders stand for a picture as the model computes features of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from zoo.base import (
    NO_DOUBLE,
    VISION,
    Builder,
    Family,
    Inputs,
    Media,
    MediaBuilder,
    noise,
    run_of,
    text_values,
    vision_model,
)
from zoo.gemma_like import grid_images, grid_videos, media_types, padded_patches
from zoo.mrope import mrope_section, token_types
from zoo.recurrent import STATE, gated_delta
from zoo.text_only import alternating

NEW: dict[str, Any] = {"min_transformers": "5.24"}
SLICE_START, SLICE_END, NEWLINE = 10, 11, 12
"""Separators; ids of ordinary text stand for them."""
Pixels = Callable[[PreTrainedModel, int, random.Random, int], Inputs]


def _counted(pixels: Pixels, enclosed: bool = False) -> MediaBuilder:
    """A builder of `Family.images` with these pixels: (model, count, rng, seed) -> inputs of `count` images."""

    def images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
        encoder: Any = model
        given = pixels(model, count, rng, seed)
        with torch.no_grad():
            features = encoder.get_image_features(**given, return_dict=True).pooler_output
        return given, [run_of(model, len(one), enclosed=enclosed) for one in features]

    return images


def _experts(spec: Any) -> dict[str, Any]:
    """Sparse layers behind a dense one."""
    kinds = {"mlp_layer_types": ["dense", *["sparse"] * (spec.layers - 1)], "moe_intermediate_size": 16}
    return kinds | {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}


def _deepseek_ocr2(spec: Any, ids: Any) -> PreTrainedModel:
    sam = VISION | {"output_channels": 8, "image_size": 32, "patch_size": 4, "window_size": 4}
    sam |= {"global_attn_indexes": [1], "mlp_dim": 32, "downsample_channels": [8, 16]}
    vision = {"sam_config": sam, "encoder_config": VISION | {"num_key_value_heads": 1}}
    model: Any = vision_model(spec, ids, "DeepseekOcr2", text_values(spec, ids) | _experts(spec), vision)
    model.model.vision_tower.query_768_resolution = nn.Embedding(4, 16)  # 144 tokens of an image are many
    built: PreTrainedModel = model
    return built


def _crops(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Inputs:
    """The whole image, and none to two parts of it."""
    parts = [rng.choice((0, 1, 2)) for _ in range(count)]
    given = {"pixel_values": noise((count, 3, 32, 32), seed, model), "num_local_patches": torch.tensor(parts)}
    if sum(parts):
        given["pixel_values_local"] = noise((sum(parts), 3, 32, 32), seed + 1, model)
    return given


def _granite_docling(spec: Any, ids: Any) -> PreTrainedModel:
    text = text_values(spec, ids) | {"embedding_multiplier": 1.5, "residual_multiplier": 0.8}
    text |= {"attention_multiplier": 0.4, "logits_scaling": 0.7}
    vision = VISION | {"image_size": 16, "patch_size": 4, "out_hidden_size": spec.hidden, "scale_factor": 2}
    return vision_model(spec, ids, "GraniteDocling", text, vision | {"deepstack_visual_indexes": [0, 1]})


def _tiles(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Inputs:
    """Images of several tiles, padded to the most."""
    tiles = torch.tensor([rng.choice((1, 1, 2, 3)) for _ in range(count)])
    most = int(tiles.max())
    seen = torch.arange(most) < tiles[:, None]
    return {"pixel_values": noise((count, most, 3, 16, 16), seed, model), "pixel_attention_mask": seen}


def _minicpm(name: str) -> Builder:
    """Qwen3.5 as text model."""

    def build(spec: Any, ids: Any) -> PreTrainedModel:
        text = gated_delta(spec, ids) | {"model_type": "qwen3_5_text"}
        text["rope_parameters"] |= {"mrope_section": mrope_section(spec), "mrope_interleaved": True}
        more = {"slice_start_id": SLICE_START, "slice_end_id": SLICE_END, "newline_id": NEWLINE}
        more = more if name == "MiniCPMV4_7" else {}
        vision = VISION | {"image_size": 16, "patch_size": 4}
        return vision_model(spec, ids, name, text, vision, insert_layer_id=0, **more)

    return build


def _packed(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Inputs:
    """Patches of all images in one sequence."""
    config: Any = model.config
    merge = 2 if config.downsample_mode == "4x" else 4
    sizes = merge * torch.tensor([[rng.choice((1, 2)), rng.choice((1, 2))] for _ in range(count)])
    return {"pixel_values": noise((1, 3, 4, 4 * int(sizes.prod(-1).sum())), seed, model), "target_sizes": sizes}


def _slices(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    """Images with two slices behind them, or none."""
    config: Any = model.config
    numbers = [rng.choice((0, 0, 2)) for _ in range(count)]
    given, found = _counted(_packed)(model, count + sum(numbers), rng, seed)
    parts, runs = iter(found), []
    for number in numbers:
        run = [config.image_start_id, *next(parts), config.image_end_id]
        for _ in range(number):
            run += [config.slice_start_id, *next(parts), config.slice_end_id]
        runs.append(run)
    return given, runs


def _muse(name: str) -> Builder:
    """Gated attention; full layers have no positions; capped logits."""

    def build(spec: Any, ids: Any) -> PreTrainedModel:
        text = text_values(spec, ids) | alternating(spec) | _experts(spec)
        text |= {"num_local_experts": 4, "moe_hidden_size": 16}
        text["layer_rope_theta"] = [10000.0 * kind.startswith("sliding") for kind in text["layer_types"]]
        vision = VISION | {"patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4}
        more: dict[str, Any] = {"out_hidden_size": 64, "projector_hidden_size": 16}
        if name == "MuseSpark":
            audio = {"patch_sizes": (2, 2), "hidden_sizes": (8, 8), "depths": (1, 1), "num_hidden_layers": 2}
            more["audio_config"] = audio | {"conv_kernel_size": 3, "out_hidden_size": spec.hidden}
        return vision_model(spec, ids, name, text, vision, **more)

    return build


def _lfm3_vl(spec: Any, ids: Any) -> PreTrainedModel:
    """Convolutions, full and sliding attention, with angles of their own."""
    kinds = ["conv", "full_attention", "sliding_attention"]
    kinds = [kinds[index] for index in ((0, 2, 1, 0) if spec.mixed else (0, 1, 2, 0))[: spec.layers]]
    text = text_values(spec, ids) | {"model_type": "lfm3", "layer_types": kinds, "conv_L_cache": 3}
    text["sliding_window"] = spec.window or 512
    vision = VISION | {"patch_size": 4, "num_key_value_heads": 1, "layer_types": ["conv", "full_attention"]}
    return vision_model(spec, ids, "Lfm3Vl", text, vision, projector_hidden_size=16)


def _gemma4_unified(spec: Any, ids: Any) -> PreTrainedModel:
    """Patches of images without an encoder; of three layers the last one shares keys and values."""
    types = ["sliding_attention", "full_attention", "full_attention"][: spec.layers]
    text = text_values(spec, ids) | {"layer_types": types, "sliding_window": spec.window or 512}
    text |= {"num_kv_shared_layers": spec.layers - 2, "final_logit_softcapping": 30.0, "attention_k_eq_v": True}
    text |= {"global_head_dim": 2 * spec.hidden // spec.heads, "num_global_key_value_heads": 1}
    vision = {"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 16, "mm_posemb_size": 16}
    more = {"audio_config": None, "audio_token_id": spec.vocab + 1}
    return vision_model(spec, ids, "Gemma4Unified", text, vision | {"output_proj_dims": 16}, **more)


def _patches(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Inputs:
    sizes = [(rng.choice((1, 2, 3)), rng.choice((1, 2))) for _ in range(count)]
    pixels, positions = padded_patches(model, sizes, seed, 192)
    return {"pixel_values": pixels, "image_position_ids": positions}


MUSE = "mask per layer type; no positions in full layers; gated attention"
ROWS: tuple[Family, ...] = (
    Family("deepseek_ocr2", _deepseek_ocr2, _counted(_crops), traits="experts", **NO_DOUBLE, **NEW),
    Family("granite_docling", _granite_docling, _counted(_tiles), traits="deepstack", **NEW),
    Family("minicpm_ocr", _minicpm("MiniCPMOcr"), _counted(_packed), traits=STATE, **NEW),
    Family("minicpmv4_6", _minicpm("MiniCPMV4_6"), _counted(_packed), traits=STATE, **NEW),
    Family("minicpmv4_7", _minicpm("MiniCPMV4_7"), _slices, None, token_types, f"M-RoPE, {STATE}", **NEW),
    Family("muse_glimmer", _muse("MuseGlimmer"), grid_images, grid_videos, traits=MUSE, has_window=True, **NEW),
    Family(
        "muse_spark",
        _muse("MuseSpark"),
        grid_images,
        grid_videos,
        traits=f"{MUSE}; experts",
        has_window=True,
        **NO_DOUBLE,
        **NEW,
    ),
    Family(
        "lfm3_vl", _lfm3_vl, grid_images, grid_videos, traits=f"mask per layer type; {STATE}", has_window=True, **NEW
    ),
    Family(
        "gemma4_unified",
        _gemma4_unified,
        _counted(_patches, enclosed=True),
        derived=media_types,
        traits="mask per layer type; bidirectional images in the prefill; shared keys and values; head size per layer",
        has_window=True,
        **NEW,
    ),
)
