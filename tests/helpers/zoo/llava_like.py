"""Model types with tiles and grids of any kind and 1-D positions, as LLaVA.

Prompts have the layout that the processor of the family gives them. Its separators (start of an image, end of a line,
position of a tile, ...) are not in the model's config; ids of ordinary text stand for them here.

The vision towers of fast_vlm and perception_lm are timm models, which is no dependency; others with outputs of the same
shape stand for them. They run before decoding only.
"""

from __future__ import annotations

import inspect
import random
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from zoo.base import VISION, Builder, Family, Media, builder, layer_types, noise, run_of, special_id, square_images

START, END, GLOBAL, NEWLINE, TILE = 10, 11, 12, 13, 14
"""Separators; the ids from TILE on number the tiles of an image."""
PINPOINTS = [[16, 32], [32, 16], [32, 32]]


def _text(kind: str, spec: Any) -> dict[str, Any]:
    """Config values of a text model of this type, with a sliding window where it has one."""
    text: dict[str, Any] = {"model_type": kind}
    if kind == "mistral":
        text["sliding_window"] = spec.window or None
    if kind in ("qwen2", "qwen3"):
        text |= {"use_sliding_window": bool(spec.window), "sliding_window": spec.window or None}
        text |= {"max_window_layers": 0, "layer_types": layer_types(spec)}
    if kind == "cohere2":  # always both kinds of layers: those with a full attention have no positions
        kinds = ["sliding_attention", "full_attention"] * spec.layers
        text |= {"sliding_window": spec.window or 9, "layer_types": kinds[: spec.layers], "logit_scale": 0.5}
    if kind == "granite4_vision_text":
        text |= {"embedding_multiplier": 1.5, "residual_multiplier": 0.8, "attention_multiplier": 0.4}
        text["logits_scaling"] = 0.7
    return text


def _vision(kind: str, **changes: Any) -> dict[str, Any]:
    """Config values of a vision tower with 4 x 4 patches."""
    return {"model_type": kind, **VISION, "image_size": 16, "patch_size": 4, **changes}


def _builder(name: str, text: str, vision: Any, **more: Any) -> Builder:
    """A builder with a text model of this type. Some vision towers have eager attention only."""

    def attention(spec: Any) -> dict[str, str]:
        return {"text_config": spec.attention}

    return builder(name, lambda spec: _text(text, spec), vision, attention=attention, **more)


def _tiles(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    """Adjacent tiles of 2 x 2 tokens, the whole image last."""
    tiles = [rng.choice((1, 1, 3, 5)) for _ in range(count)]
    return {"pixel_values": noise((sum(tiles), 3, 16, 16), seed, model)}, [run_of(model, 4 * n) for n in tiles]


def _internvl(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    """Images as tiles, or videos: their frames are images with text in between."""
    pixels, runs, number = [], [], 0
    for index in range(count):
        if rng.random() < 0.25:
            number, run = 2, [START, *run_of(model, 4), END, NEWLINE, TILE, START, *run_of(model, 4), END]
            pixels.append(noise((number, 3, 16, 16), seed + index, model))
        else:
            given, (tiles,) = _tiles(model, 1, rng, seed + index)
            pixels.append(given["pixel_values"])
            run = [START, *tiles, END]
        runs.append(run)
    return {"pixel_values": torch.cat(pixels)}, runs


def _split(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    """Tiles in rows with their position before each, then the whole image; padded along the tiles with zeros."""
    sizes = [rng.choice(((0, 0), (0, 0), (1, 2), (2, 1), (2, 2))) for _ in range(count)]
    pixels = noise((count, 5, 3, 16, 16), seed, model)
    seen = torch.ones(count, 5, 16, 16, dtype=torch.long)
    runs: list[list[int]] = []
    for index, (rows, columns) in enumerate(sizes):
        run = []
        for row in range(rows):
            for column in range(columns):
                run += [START, TILE + 2 * row + column, *run_of(model, 4)]
            run.append(NEWLINE)
        run += [NEWLINE, START] if rows else [START]
        runs.append([*run, GLOBAL, *run_of(model, 4), START])
        pixels[index, rows * columns + 1 :] = 0.0
        if rng.random() < 0.3:  # an image with a padded edge
            seen[index, :, :, 12:] = 0
    most = 1 + max(rows * columns for rows, columns in sizes)
    return {"pixel_values": pixels[:, :most].contiguous(), "pixel_attention_mask": seen[:, :most].contiguous()}, runs


def _idefics2(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    """Images of any size, resampled to four tokens each."""
    pixels, seen = noise((count, 1, 3, 16, 16), seed, model), torch.zeros(count, 1, 16, 16, dtype=torch.long)
    for index in range(count):
        seen[index, :, : rng.choice((8, 16)), : rng.choice((8, 16))] = 1
    pixels *= seen[:, :, None]
    run = [START, *run_of(model, 4), START]
    return {"pixel_values": pixels, "pixel_attention_mask": seen}, [run] * count


def _lines(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    """Images of any size with a separator after each line of tokens, another after the last."""
    # A single image of one token fails in transformers.
    sizes = torch.tensor([rng.choice(((8, 16), (16, 8), (16, 24), (24, 16), (24, 8))) for _ in range(count)])
    pixels, runs = noise((count, 3, *sizes.amax(0).tolist()), seed, model), []
    for height, width in (sizes // 8).tolist():
        run = [token for _ in range(height) for token in (*run_of(model, width), NEWLINE)]
        runs.append([*run[:-1], END])
    return {"pixel_values": pixels, "image_sizes": sizes}, runs


def _lighton_ocr(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    given, runs = _lines(model, count, rng, seed)
    return given, [run_of(model, run.count(special_id(model, "image"))) for run in runs]


def _video_llava_images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    names = inspect.signature(type(model).forward).parameters
    name = "pixel_values" if "pixel_values" in names else "pixel_values_images"  # until 5.22
    return {name: noise((count, 3, 8, 8), seed, model)}, [run_of(model, 4)] * count


def _video_llava_videos(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    """Frames with the class token of each."""
    frames = rng.choice((2, 3))
    pixels = noise((count, frames, 3, 8, 8), seed + 1, model)
    return {"pixel_values_videos": pixels}, [run_of(model, 5 * frames, "video")] * count


def _got_ocr2(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    tiles = [rng.choice((1, 1, 3)) for _ in range(count)]
    runs = [[START, *run_of(model, 4 * n), END] for n in tiles]
    return {"pixel_values": noise((sum(tiles), 3, 32, 32), seed, model)}, runs


def _ovis2(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    """The whole image, then its tiles; the separators are the five indicator ids of the config."""
    config: Any = model.config
    start, end, grid, column_end, row_end = config.visual_indicator_token_ids
    runs, number = [], 0
    for _ in range(count):
        rows, columns = rng.choice(((1, 1), (1, 2), (2, 1), (2, 2)))
        run = [start, *run_of(model, 4), grid]
        if rows * columns > 1:
            lines = [[*run_of(model, 4), *([column_end, *run_of(model, 4)] * (columns - 1))] for _ in range(rows)]
            run += [token for line in lines for token in (*line, row_end)][:-1]
        number += 1 if rows * columns == 1 else 1 + rows * columns
        runs.append([*run, end])
    return {"pixel_values": noise((number, 3, 16, 16), seed, model)}, runs


def _aya_vision(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    """Tiles with their number before each, the whole image last."""
    given, plain = _tiles(model, count, rng, seed)
    runs = []
    for run in plain:
        marks = [TILE + index for index in range(len(run) // 4 - 1)] + [GLOBAL]
        runs.append([START, *[token for mark in marks for token in (mark, *run_of(model, 4))], END])
    return given, runs


def _cohere2_vision(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    """Tiles with a separator after each."""
    given, plain = _tiles(model, count, rng, seed)
    return given, [[START, *[*run_of(model, 4), NEWLINE] * (len(run) // 4), END] for run in plain]


def _granite4_vision(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    """As LLaVA-NeXT: the whole image and the grid of all tiles, at half the resolution."""
    sizes = torch.tensor([rng.choice(((16, 32), (32, 16), (12, 32), (32, 32), (24, 32))) for _ in range(count)])
    given = {"pixel_values": noise((count, 5, 3, 16, 16), seed, model), "image_sizes": sizes}
    encoder: Any = model
    with torch.no_grad():
        _, images = encoder.get_image_features(**given, return_dict=True).deepstack_features[0]
    return given, [run_of(model, len(image)) for image in images]


def _perception_lm(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    """The whole image and its tiles; all images of a call have as many."""
    tiles = rng.choice((1, 2, 3))
    return {"pixel_values": noise((count, tiles, 3, 16, 16), seed, model)}, [run_of(model, 4 * tiles)] * count


def _perception_lm_videos(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    given, runs = _perception_lm(model, count, rng, seed + 1)
    return {"pixel_values_videos": given["pixel_values"]}, [run_of(model, len(run), "video") for run in runs]


_MIXED = "sliding and full layers, the latter without positions"
_BUILDERS = {
    "internvl": _builder("InternVL", "qwen2", _vision("internvl_vision"), image_seq_length=4),
    "qianfan_ocr": _builder("QianfanOCR", "qwen3", _vision("qianfan_ocr_vision"), image_seq_length=4),
    "smolvlm": _builder("SmolVLM", "llama", _vision("smolvlm_vision"), scale_factor=2),
    "idefics3": _builder("Idefics3", "llama", _vision("idefics3_vision"), scale_factor=2),
    "idefics2": _builder(
        "Idefics2",
        "mistral",
        _vision("idefics2_vision"),
        perceiver_config=lambda spec: {
            "hidden_size": spec.hidden,
            "resampler_n_latents": 4,
            "resampler_depth": 1,
            "resampler_n_heads": 2,
            "resampler_head_dim": 8,
            "num_key_value_heads": 1,
        },
    ),
    "mistral3": _builder("Mistral3", "mistral", _vision("pixtral", image_size=24), spatial_merge_size=2),
    "vipllava": _builder(
        "VipLlava",
        "llama",
        _vision("clip_vision_model"),
        vision_feature_layers=[-1, -2, 1],
        image_seq_length=16,
    ),
    "video_llava": _builder("VideoLlava", "llama", _vision("clip_vision_model", image_size=8)),
    "got_ocr2": _builder(
        "GotOcr2",
        "qwen2",
        _vision(
            "got_ocr2_vision",
            image_size=32,
            patch_size=4,
            window_size=4,
            global_attn_indexes=[1],
            mlp_dim=32,
            output_channels=8,
        ),
        image_seq_length=4,
    ),
    "ovis2": _builder(
        "Ovis2",
        "qwen2",
        _vision("ovis2_vision", hidden_stride=2, vocab_size=30),
        vocab_size=lambda spec: spec.vocab,
        hidden_size=lambda spec: spec.hidden,
        visual_indicator_token_ids=[START, END, GLOBAL, NEWLINE, TILE],
    ),
    "lighton_ocr": _builder("LightOnOcr", "qwen3", _vision("pixtral", image_size=24), spatial_merge_size=2),
    "aya_vision": _builder("AyaVision", "cohere2", _vision("siglip_vision_model", vision_use_head=False)),
    "cohere2_vision": _builder(
        "Cohere2Vision",
        "cohere2",
        _vision("siglip_vision_model", vision_use_head=False),
        alignment_intermediate_size=32,
    ),
    "perception_lm": _builder(
        "PerceptionLM",
        "llama",
        transformers.CLIPVisionConfig(**_vision("clip_vision_model"), model_args={"embed_dim": 16}),
        projector_pooling_ratio=2,
    ),
    "fast_vlm": _builder(
        "FastVlm",
        "qwen2",
        transformers.ConvNextConfig(num_stages=2, hidden_sizes=[8, 16], depths=[1, 1], hidden_size=16),
        image_seq_length=4,
    ),
    "granite4_vision": _builder(
        "Granite4Vision",
        "granite4_vision_text",
        _vision("clip_vision_model", hidden_size=64),
        downsample_rate="1/2",
        image_grid_pinpoints=PINPOINTS,
        deepstack_layer_map=[[-1, 0]],
        spatial_target_layers=[1],
        qformer_config={
            "model_type": "blip_2_qformer",
            "num_hidden_layers": 1,
            "intermediate_size": 32,
            "hidden_size": 64,
            "encoder_hidden_size": 64,
            "num_attention_heads": 1,
            "cross_attention_frequency": 1,
            "use_qformer_text_input": False,
        },
    ),
}


def _row(model_type: str, images: Any, traits: str = "", **more: Any) -> Family:
    return Family(model_type, _BUILDERS[model_type], images, traits=traits, **more)


ROWS = (
    _row("internvl", _internvl, has_window=True),
    _row("qianfan_ocr", _internvl, has_window=True, min_transformers="5.24"),
    _row("smolvlm", _split),
    _row("idefics3", _split),
    _row("idefics2", _idefics2, has_window=True),
    _row("mistral3", _lines, has_window=True),
    _row("vipllava", square_images(16, 16)),
    _row("video_llava", _video_llava_images, videos=_video_llava_videos),
    _row("got_ocr2", _got_ocr2, has_window=True),
    _row("ovis2", _ovis2, has_window=True),
    _row("lighton_ocr", _lighton_ocr, has_window=True),
    _row("aya_vision", _aya_vision, _MIXED, has_window=True),
    _row("cohere2_vision", _cohere2_vision, _MIXED, has_window=True),
    _row("perception_lm", _perception_lm, videos=_perception_lm_videos),
    _row("fast_vlm", square_images(16, 4), has_window=True),
    _row("granite4_vision", _granite4_vision, "deepstack", min_transformers="5.23"),
)
