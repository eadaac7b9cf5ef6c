"""Model types with a mask per layer type, bidirectional images, shared keys and values, or cross-attention."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from zoo.base import (
    NO_DOUBLE,
    VISION,
    Family,
    Inputs,
    Media,
    builder,
    layer_types,
    noise,
    run_of,
    special_id,
    square_images,
    text_values,
    vision_model,
)
from zoo.text_only import gemma3n_text

SIGLIP = VISION | {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4, "vision_use_head": False}


def _alternating(spec: Any) -> dict[str, Any]:
    """Layer types of a model that always has sliding layers; without `spec.window` their window is never reached."""
    types = layer_types(spec) if spec.window else [("sliding_attention", "full_attention")[i % 2] for i in range(9)]
    return {"layer_types": types[: spec.layers], "sliding_window": spec.window or 512}


def _gemma3(spec: Any) -> dict[str, Any]:
    return _alternating(spec) | {"query_pre_attn_scalar": spec.hidden // spec.heads, "model_type": "gemma3_text"}


def _image_types(model: PreTrainedModel, input_ids: Tensor) -> Inputs:
    return {"token_type_ids": (input_ids == special_id(model, "image")).long()}


def _paligemma(spec: Any, ids: Any) -> PreTrainedModel:
    """PaliGemma 1 has Gemma 1 as text model, PaliGemma 2 has Gemma 2 with full and sliding layers: `spec.mixed`."""
    text, attention = text_values(spec, ids) | {"model_type": "gemma"}, spec.attention
    if spec.mixed or spec.window:
        text |= _alternating(spec) | {"model_type": "gemma2", "query_pre_attn_scalar": spec.hidden // spec.heads}
        attention = "eager"  # Gemma 2 has no sdpa attention in transformers, since it caps the logits of the attention
    sizes = {"projection_dim": spec.hidden, "hidden_size": spec.hidden, "vocab_size": spec.vocab}
    return vision_model(spec, ids, "PaliGemma", text, SIGLIP | {"image_size": 12}, attention=attention, **sizes)


def _prefix_types(model: PreTrainedModel, input_ids: Tensor) -> Inputs:
    return {"token_type_ids": torch.zeros_like(input_ids)}


def _gemma4(spec: Any) -> dict[str, Any]:
    """Three layers: the last one shares the keys and values of the full layer before, whose heads differ in size."""
    types = ["sliding_attention", "full_attention", "full_attention"][: spec.layers]
    text = {"layer_types": types, "sliding_window": spec.window or 512, "use_double_wide_mlp": True}
    text |= {"num_kv_shared_layers": spec.layers - 2, "global_head_dim": 2 * spec.hidden // spec.heads}
    text |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": spec.vocab}
    text |= {"use_bidirectional_attention": "vision", "final_logit_softcapping": 30.0}
    text |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    if spec.mixed:
        text |= {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    return text


def padded_patches(
    model: PreTrainedModel, sizes: list[tuple[int, int]], seed: int, pixels: int = 48
) -> tuple[Tensor, Tensor]:
    """Patches [M, P, pixels] of images of the sizes (height, width), and their positions (x, y), padded with -1."""
    longest = max(height * width for height, width in sizes)
    positions = torch.full((len(sizes), longest, 2), -1)
    for image, (height, width) in enumerate(sizes):
        y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        positions[image, : height * width] = torch.stack([x, y], dim=-1).flatten(0, 1)
    return noise((len(sizes), longest, pixels), seed, model), positions


def _gemma4_images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    sizes = [(rng.choice((2, 4, 6)), rng.choice((2, 4))) for _ in range(count)]
    pixels, positions = padded_patches(model, sizes, seed)
    runs = [run_of(model, h * w // 4, enclosed=True) for h, w in sizes]
    return {"pixel_values": pixels, "image_position_ids": positions}, runs


def _gemma4_videos(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    clips = [(rng.choice((1, 2, 3)), rng.choice((2, 4)), rng.choice((2, 4))) for _ in range(count)]
    pixels, positions = padded_patches(model, [(h, w) for frames, h, w in clips for _ in range(frames)], seed)
    inputs = {"pixel_values_videos": pixels, "video_position_ids": positions}
    inputs |= {"num_frames_per_video": torch.tensor([clip[0] for clip in clips])}
    return inputs, [run_of(model, h * w // 4, "video", enclosed=True) * frames for frames, h, w in clips]


def media_types(model: PreTrainedModel, input_ids: Tensor) -> Inputs:
    config: Any = model.config
    return {"mm_token_type_ids": (input_ids == config.image_token_id).int() + 2 * (input_ids == config.video_token_id)}


def _mllama_images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    """One token per image; the pixels are grouped by row, in `_mllama_rows`."""
    return {}, [run_of(model, 1)] * count


def _mllama_rows(model: PreTrainedModel, input_ids: Tensor) -> Inputs:
    """Pixels [B, M, tiles, ...] of the images of each row, and which tokens attend to them: those that follow."""
    is_image = input_ids == special_id(model, "image")
    counts = is_image.sum(-1)
    if not counts.any():
        return {}
    batch, images = len(input_ids), int(counts.max())
    exists = torch.arange(images) < counts[:, None]
    follows = is_image.cumsum(-1)[:, :, None] > torch.arange(images)  # [B, L, M]
    seed = int(input_ids.sum())
    num_tiles = 1 + torch.randint(2, (batch, images), generator=torch.Generator().manual_seed(seed))
    tiles = (torch.arange(4) < num_tiles[..., None]) & exists[..., None]  # [B, M, tiles]
    return {
        "pixel_values": noise((batch, images, 4, 3, 8, 8), seed, model) * tiles[..., None, None, None],
        "aspect_ratio_ids": num_tiles * exists,
        "aspect_ratio_mask": torch.cat([torch.ones_like(tiles[..., :1]), tiles[..., 1:]], dim=-1).long(),
        "cross_attention_mask": (follows[..., None] & tiles[:, None]).long(),
    }


def _llama4(spec: Any) -> dict[str, Any]:
    """Chunked layers, and a full one without positions."""
    text = {"intermediate_size_mlp": 2 * spec.hidden, "num_local_experts": 2, "no_rope_layer_interval": 2}
    return text | {"attention_chunk_size": spec.window or 16, "interleave_moe_layer_step": 2}


def _sliding_but_one(spec: Any) -> dict[str, Any]:
    types = ["sliding_attention", "full_attention", "sliding_attention"][: spec.layers]
    types = layer_types(spec) if spec.window and spec.mixed else types
    return {"sliding_window": spec.window or 512, "layer_types": types}


def _exaone(spec: Any) -> dict[str, Any]:
    """Sliding layers, and a full one without positions."""
    return _sliding_but_one(spec) | {"model_type": "exaone4", "sliding_window_pattern": 2}


def _exaone_vision(spec: Any) -> dict[str, Any]:
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "num_key_value_heads": 1}
    vision |= {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]}
    return vision | {"out_hidden_size": spec.hidden}


def _grid(
    model: PreTrainedModel, grid: list[list[int]], seed: int, media: str
) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Patches of the grid sizes [M, 3], these sizes, and the ids of each picture."""
    sizes = torch.tensor(grid)
    runs = [run_of(model, size, media) for size in (sizes.prod(-1) // 4).tolist()]
    return noise((int(sizes.prod(-1).sum()), 96), seed, model), sizes, runs


def grid_images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    grid = [[1, rng.choice((2, 4, 6)), rng.choice((2, 4))] for _ in range(count)]
    pixels, sizes, runs = _grid(model, grid, seed, "image")
    return {"pixel_values": pixels, "image_grid_thw": sizes}, runs


def grid_videos(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    grid = [[rng.choice((2, 3)), rng.choice((2, 4)), rng.choice((2, 4))] for _ in range(count)]
    pixels, sizes, runs = _grid(model, grid, seed, "video")
    return {"pixel_values_videos": pixels, "video_grid_thw": sizes}, runs


def _step3p7(spec: Any) -> dict[str, Any]:
    """Sliding layers with another number of heads; experts in the second layer."""
    text = _sliding_but_one(spec) | {"num_sliding_attention_heads": 2 * spec.heads, "n_routed_experts": 4}
    text |= {"mlp_layer_types": ["dense", "sparse", "sparse"][: spec.layers], "num_experts_per_tok": 2}
    return text | {"moe_intermediate_size": 16, "share_expert_dim": 16}


def _step3p7_images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    """Local crops of one token each, and the whole image with four."""
    crops = [rng.choice((0, 1, 2)) for _ in range(count)]
    inputs = {"pixel_values": noise((count, 3, 32, 32), seed, model), "num_local_patches": torch.tensor(crops)}
    if sum(crops):
        inputs["pixel_values_local"] = noise((sum(crops), 3, 16, 16), seed + 1, model)
    return inputs, [run_of(model, number + 4) for number in crops]


class _Tower(nn.Module):
    """In place of timm's MobileNet: patches of 8 x 8 pixels, projected."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, size, 8, 8)

    def forward(self, pixel_values: Tensor, **kwargs: Any) -> BaseModelOutputWithPooling:
        return BaseModelOutputWithPooling(last_hidden_state=self.patches(pixel_values))


def _gemma3n_vl(spec: Any, ids: Any) -> PreTrainedModel:
    """The last ids of the vocabulary have embeddings of their own."""
    from transformers.models.gemma3n import modeling_gemma3n

    first, size = spec.vocab - 12, 16
    text = text_values(spec, ids) | gemma3n_text(spec) | {"model_type": "gemma3n_text"}
    vision = {"hidden_size": size, "vocab_offset": first, "vocab_size": 6}
    audio = {"hidden_size": size, "vocab_offset": first + 6, "vocab_size": 6, "conf_num_hidden_layers": 1}
    audio |= {"conf_num_attention_heads": 2, "input_feat_size": 16, "sscp_conv_channel_size": (4, 4)}
    more = {"audio_config": audio, "vision_soft_tokens_per_image": 4, "audio_token_id": spec.vocab + 1}
    from_config = modeling_gemma3n.AutoModel.from_config

    def build(config: Any, **kwargs: Any) -> nn.Module:
        return _Tower(size) if config.model_type == "gemma3n_vision" else from_config(config, **kwargs)

    with mock.patch.object(modeling_gemma3n.AutoModel, "from_config", build):
        return vision_model(spec, ids, "Gemma3n", text, vision, **more)


def _beyond(spec: Any) -> int:
    """An id of sounds, which no prompt has."""
    return int(spec.vocab) + 1


ROWS: tuple[Family, ...] = (
    Family(
        "gemma3",
        builder("Gemma3", _gemma3, SIGLIP, mm_tokens_per_image=4),
        square_images(16, 4, enclosed=True),
        derived=_image_types,
        traits="mask per layer type; images are bidirectional in the prefill",
        has_window=True,
    ),
    Family(
        "paligemma",
        _paligemma,
        square_images(12, 9),
        derived=_prefix_types,
        traits="positions from 1; the whole prompt is bidirectional; one mask for full and sliding layers (Gemma 2)",
        has_window=True,
        **NO_DOUBLE,
    ),
    Family(
        "gemma4",
        builder(
            "Gemma4",
            _gemma4,
            VISION
            | {"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 2}
            | {"position_embedding_size": 16},
            audio_config=None,
            audio_token_id=_beyond,
        ),
        _gemma4_images,
        _gemma4_videos,
        media_types,
        traits="mask per layer type; bidirectional images in the prefill; shared keys and values; head size per layer; "
        "per-layer inputs from ids",
        has_window=True,
        min_transformers="5.23",  # older versions take videos in another form
        **NO_DOUBLE,
    ),
    Family(
        "gemma3n",
        _gemma3n_vl,
        square_images(16, 4, enclosed=True),
        traits="mask per layer type; shared keys and values; per-layer inputs from ids; some ids with other embeddings",
        has_window=True,
    ),
    Family(  # the second layer attends to the images, whose keys and values are in its cache layer
        "mllama",
        builder(
            "Mllama",
            {"cross_attention_layers": [1]},
            VISION
            | {"image_size": 8, "patch_size": 4, "max_num_tiles": 4, "num_global_layers": 1}
            | {"vision_output_dim": 32, "intermediate_layers_indices": [1]},
            tie_word_embeddings=lambda spec: spec.tied,
        ),
        _mllama_images,
        derived=_mllama_rows,
        traits="cross-attention to the images, so transformers decodes alone",
    ),
    Family(
        "llama4",
        builder(
            "Llama4",
            _llama4,
            VISION
            | {"image_size": 16, "patch_size": 4, "vision_output_dim": 16, "projector_input_dim": 16}
            | {"projector_output_dim": 16, "intermediate_size": 64},  # of four shuffled patches
        ),
        square_images(16, 4),
        traits="chunked attention, so transformers decodes alone; experts",
        broken_in=("5.24.0",),  # reads `image_outputs` of an output that lacks it
        **NO_DOUBLE,
    ),
    Family(
        "exaone4_5",
        builder("Exaone4_5_", _exaone, _exaone_vision),
        grid_images,
        grid_videos,
        traits="mask per layer type; positions of the cache, padding included; no positions in full layers",
        has_window=True,
    ),
    Family(
        "step3p7",
        builder(
            "Step3p7",
            _step3p7,
            VISION | {"image_size": 32, "patch_size": 4, "mlp_ratio": 2.0, "max_position_embeddings": 64},
        ),
        _step3p7_images,
        traits="mask per layer type; heads per layer; experts",
        has_window=True,
        **NO_DOUBLE,
    ),
)
