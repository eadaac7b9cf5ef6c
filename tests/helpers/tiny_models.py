"""Tiny random vision-language models, their inputs as tensors, and a tokenizer whose tokens do not end at spaces.

Everything is computed from a `ModelSpec` and a seed; nothing is downloaded. Independent of mmspec.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import zoo
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextVideoConfig,
    LlavaNextVideoForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    SiglipVisionConfig,
)

FAMILIES = ("llava", "llava_next", "llava_onevision", "qwen2_5_vl", "llava_next_video")
"""Append new families: `fuzz.draw_case` chooses among the first four, so that seeds stay reproducible."""
VIDEO_FAMILIES = ("llava_onevision", "qwen2_5_vl", "llava_next_video")
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
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class ModelSpec:
    """One tiny model. `text` "" is the family's usual one; `window` 0 is none; `tail` puts the special ids last.

    A `calm` model has weak attention, so that its greedy output soon repeats.
    """

    family: str = "llava"
    text: str = ""
    vocab: int = 120
    hidden: int = 32
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    window: int = 0
    mixed: bool = False
    tied: bool = False
    attention: str = "sdpa"
    dtype: str = "float32"
    tail: bool = False
    calm: bool = False
    seed: int = 0


@dataclass(frozen=True)
class SpecialIds:
    """The special ids of a model; `text` are all others."""

    pad: int
    bos: int
    eos: int
    image: int
    video: int
    start: int
    end: int
    text: tuple[int, ...]


def special_ids(spec: ModelSpec) -> SpecialIds:
    """The special ids of `spec`: at the front, or (as after adding tokens to a finished vocabulary) at the end."""
    v = spec.vocab
    special = (v - 1, 1, 2, v - 5, v - 4, v - 3, v - 2) if spec.tail else (0, 1, 2, 3, 4, 5, 6)
    return SpecialIds(*special, text=tuple(i for i in range(v) if i not in special))


def _text_config(spec: ModelSpec) -> PretrainedConfig:
    special = special_ids(spec)
    common: dict[str, Any] = {
        "vocab_size": spec.vocab,
        "hidden_size": spec.hidden,
        "intermediate_size": 2 * spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": spec.tied,
        "pad_token_id": special.pad,
        "bos_token_id": special.bos,
        "eos_token_id": special.eos,
    }
    kind = spec.text or TEXT_MODELS[spec.family]
    if kind == "llama":
        return LlamaConfig(**common)
    if kind == "mistral":
        return MistralConfig(sliding_window=spec.window or None, **common)
    slide = ["sliding_attention" if spec.window and (not spec.mixed or i % 2) else "full_attention" for i in range(9)]
    common |= {"use_sliding_window": bool(spec.window), "sliding_window": spec.window or 4096, "max_window_layers": 0}
    common["layer_types"] = slide[: spec.layers]
    if kind == "qwen2":
        return Qwen2Config(**common)
    half = spec.hidden // spec.heads // 2
    section = [half - 2 * (half // 3), half // 3, half // 3]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section}
    return Qwen2_5_VLConfig(text_config=common | {"rope_parameters": rope}).text_config


def _build(spec: ModelSpec) -> PreTrainedModel:
    if spec.family in zoo.ROWS:
        return zoo.ROWS[spec.family].build(spec, special_ids(spec))
    special, text = special_ids(spec), _text_config(spec)
    vision: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    vision |= {"image_size": IMAGE_SIZES.get(spec.family, 8), "patch_size": 4}
    tokens = {"image_token_id": special.image, "tie_word_embeddings": spec.tied}
    if spec.family == "llava":
        clip = CLIPVisionConfig(projection_dim=16, **vision)
        llava = LlavaConfig(vision_config=clip, text_config=text, image_seq_length=9, **tokens)
        return LlavaForConditionalGeneration._from_config(llava, attn_implementation=spec.attention)
    if spec.family == "llava_next":
        clip = CLIPVisionConfig(projection_dim=16, **vision)
        following = LlavaNextConfig(vision_config=clip, text_config=text, image_grid_pinpoints=PINPOINTS, **tokens)
        return LlavaNextForConditionalGeneration._from_config(following, attn_implementation=spec.attention)
    tokens["video_token_id"] = special.video
    if spec.family == "llava_next_video":
        clip = CLIPVisionConfig(projection_dim=16, **vision)
        points = [[2 * height, 2 * width] for height, width in PINPOINTS]
        moving = LlavaNextVideoConfig(vision_config=clip, text_config=text, image_grid_pinpoints=points, **tokens)
        return LlavaNextVideoForConditionalGeneration._from_config(moving, attn_implementation=spec.attention)
    if spec.family == "llava_onevision":
        siglip = SiglipVisionConfig(vision_use_head=False, **vision)
        one = LlavaOnevisionConfig(vision_config=siglip, text_config=text, image_grid_pinpoints=PINPOINTS, **tokens)
        return LlavaOnevisionForConditionalGeneration._from_config(one, attn_implementation=spec.attention)
    tokens |= {"vision_start_token_id": special.start, "vision_end_token_id": special.end}
    visual = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "patch_size": 4,
        "window_size": 16,
    }
    visual |= {"out_hidden_size": spec.hidden, "fullatt_block_indexes": [1], "tokens_per_second": 2}
    qwen = Qwen2_5_VLConfig(text_config=text.to_dict(), vision_config=visual, **tokens)
    return Qwen2_5_VLForConditionalGeneration._from_config(qwen, attn_implementation=spec.attention)


def _randomize_weights(model: PreTrainedModel, seed: int, calm: bool) -> None:
    """Weights large enough that attention, images and history all change the next token."""
    rng = torch.Generator().manual_seed(seed)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    for name, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=rng)
        if weight.ndim >= 2:
            gain = 3.0 if "lm_head" in name else 2.0 if "q_proj" in name or "k_proj" in name else 1.0
            gain *= 0.1 if calm and "language_model" in name and "o_proj" in name else 1.0
            scale = gain / (weight[0].numel() ** 0.5)
            if "embed" in name and "patch" not in name:
                scale = 0.5 if tied else 1.0
        else:
            scale = 0.1 if name.endswith("bias") or "norm" in name else 0.7
        offset = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        weight.data.copy_(offset + scale * noise)


def build_model(spec: ModelSpec) -> PreTrainedModel:
    """A new model of `spec`, in eval mode; its generation config knows the special ids and nothing else."""
    state = torch.get_rng_state()
    model = _build(spec)
    torch.set_rng_state(state)
    _randomize_weights(model, spec.seed, spec.calm)
    special = special_ids(spec)
    config = model.generation_config
    config.pad_token_id, config.bos_token_id, config.eos_token_id = special.pad, special.bos, special.eos
    model.tiny_spec = spec
    return model.to(getattr(torch, spec.dtype)).eval()


def _noise(shape: Sequence[int], rng: torch.Generator, target: PreTrainedModel) -> Tensor:
    return torch.randn(*shape, generator=rng).to(target.dtype)


def _image_inputs(target: PreTrainedModel, count: int, rng: random.Random, seed: int) -> zoo.base.Media:
    """Inputs of `count` images, and the tokens that stand for each."""
    special, family = special_ids(target.tiny_spec), target.tiny_spec.family
    if family in zoo.ROWS:
        images = zoo.ROWS[family].images
        assert images is not None
        return images(target, count, rng, seed)
    given, sizes = _pixels_of_images(target, count, rng, seed)
    return given, [_wrap([special.image] * size, special, family) for size in sizes]


def _video_inputs(target: PreTrainedModel, count: int, rng: random.Random, seed: int) -> zoo.base.Media:
    """Inputs of `count` videos, and the tokens that stand for each."""
    special, family = special_ids(target.tiny_spec), target.tiny_spec.family
    if family in zoo.ROWS:
        videos = zoo.ROWS[family].videos
        assert videos is not None
        return videos(target, count, rng, seed)
    given, sizes = _pixels_of_videos(target, count, rng, seed)
    return given, [_wrap([special.video] * size, special, family) for size in sizes]


def _wrap(run: list[int], special: SpecialIds, family: str) -> list[int]:
    return [special.start, *run, special.end] if family == "qwen2_5_vl" else run


def _pixels_of_images(target: PreTrainedModel, count: int, rng: random.Random, seed: int) -> tuple[Inputs, list[int]]:
    """Pixels of `count` images (and their sizes, as the family wants it), and the number of tokens of each."""
    noise = torch.Generator().manual_seed(seed)
    family = target.config.model_type
    if family == "llava":
        return {"pixel_values": _noise((count, 3, 12, 12), noise, target)}, [9] * count
    if family == "qwen2_5_vl":
        grid = torch.tensor([[1, rng.choice((2, 4, 6)), rng.choice((2, 4))] for _ in range(count)])
        pixels = _noise((int(grid.prod(-1).sum()), 96), noise, target)
        return {"pixel_values": pixels, "image_grid_thw": grid}, (grid.prod(-1) // 4).tolist()
    sizes = torch.tensor([rng.choice(((8, 16), (16, 8), (6, 16), (16, 16), (12, 16), (15, 7))) for _ in range(count)])
    side = IMAGE_SIZES.get(family, 8)
    given = {"pixel_values": _noise((count, 5, 3, side, side), noise, target), "image_sizes": sizes * (side // 8)}
    with torch.no_grad():
        features = target.model.get_image_features(**given, return_dict=True).pooler_output
    return given, [len(feature) for feature in features]


def _pixels_of_videos(target: PreTrainedModel, count: int, rng: random.Random, seed: int) -> tuple[Inputs, list[int]]:
    """Pixels of `count` clips, and the number of tokens of each."""
    noise = torch.Generator().manual_seed(seed + 1)
    family = target.config.model_type
    if family != "qwen2_5_vl":
        frames, side = rng.choice((2, 3, 5)), IMAGE_SIZES.get(family, 8)
        length = 4 * frames if family == "llava_next_video" else frames + 1
        return {"pixel_values_videos": _noise((count, frames, 3, side, side), noise, target)}, [length] * count
    grid = torch.tensor([[rng.choice((2, 3)), rng.choice((2, 4)), rng.choice((2, 4))] for _ in range(count)])
    given = {"pixel_values_videos": _noise((int(grid.prod(-1).sum()), 96), noise, target), "video_grid_thw": grid}
    if rng.random() < 0.5:
        given["second_per_grid_ts"] = torch.tensor([float(rng.choice((1, 2))) for _ in range(count)])
    return given, (grid.prod(-1) // 4).tolist()


def _build_row(
    special: SpecialIds, media: list[list[int]], num_tokens: int, rng: random.Random, num_ids: int
) -> list[int]:
    """A prompt row: `num_tokens` ids out of the first `num_ids` text ids, with the placeholder runs in between."""
    text = [rng.choice(special.text[:num_ids]) for _ in range(num_tokens)]
    if len(text) >= 6 and rng.random() < 0.6:  # a repeated n-gram for prompt lookup
        text[-3:] = text[:3]
    cuts = sorted(rng.randint(0, max(0, num_tokens - 1)) for _ in media)
    row: list[int] = []
    for begin, end, run in zip([0, *cuts], [*cuts, num_tokens], [*media, []], strict=True):
        row += text[begin:end] + run
    return row


def _pad(rows: list[list[int]], pad: int, side: str, extra: int) -> tuple[Tensor, Tensor]:
    length = max(len(row) for row in rows) + extra
    gaps = [length - len(row) for row in rows]
    before = [gap if side == "left" else 0 for gap in gaps]
    padded = [[pad] * b + row + [pad] * (g - b) for row, b, g in zip(rows, before, gaps, strict=True)]
    mask = [[0] * b + [1] * len(row) + [0] * (g - b) for row, b, g in zip(rows, before, gaps, strict=True)]
    return torch.tensor(padded), torch.tensor(mask)


def build_inputs(
    target: PreTrainedModel,
    seed: int = 0,
    batch: int = 1,
    *,
    images: Sequence[int] | None = None,
    videos: Sequence[int] | None = None,
    padding: str = "left",
    mask: bool = True,
    num_text_tokens: tuple[int, int] = (4, 14),
    num_distinct_ids: int = 40,
) -> Inputs:
    """Keyword arguments for `target.generate`: a random batch of prompts.

    Args:
        images, videos: how many in each row; None draws 0 to 3 images, one at least in the batch, and no video.
        padding: "left", "right" (both with at least one pad somewhere if anything is ragged), "none" (equal lengths).
        mask: False leaves `attention_mask` to HF.
        num_text_tokens: bounds of the number of text tokens of a row.
        num_distinct_ids: number of different text ids.
    """
    rng, spec = random.Random(seed), target.tiny_spec
    special, family = special_ids(spec), spec.family
    counts = list(images) if images is not None else [rng.randint(0, 3) for _ in range(batch)]
    if family in zoo.ROWS and zoo.ROWS[family].images is None:
        counts = [0] * batch
    elif not any(counts) and (images is None or (family in zoo.ROWS and zoo.ROWS[family].needs_image)):
        counts[rng.randrange(batch)] = 1
    clips = list(videos) if videos is not None else [0] * batch
    if any(clips) and family in zoo.ROWS and not zoo.ROWS[family].mixes_media:
        counts = [0] * batch
    given, image_runs = _image_inputs(target, sum(counts), rng, seed) if any(counts) else ({}, [])
    more, video_runs = _video_inputs(target, sum(clips), rng, seed) if any(clips) else ({}, [])
    still, moving, media = iter(image_runs), iter(video_runs), []
    for count, clip in zip(counts, clips, strict=True):
        media.append([next(still) for _ in range(count)] + [next(moving) for _ in range(clip)])
    lengths = [rng.randint(*num_text_tokens) for _ in range(batch)]
    if padding == "none":
        visual_lengths = [sum(map(len, runs)) for runs in media]
        lengths = [max(visual_lengths) + lengths[0] - own for own in visual_lengths]
    rows = [_build_row(special, runs, size, rng, num_distinct_ids) for runs, size in zip(media, lengths, strict=True)]
    extra = 0 if padding == "none" else rng.randint(0, 2)
    prompt, padded = _pad(rows, special.pad, padding, extra)
    inputs = {"input_ids": prompt, **given, **more}
    if mask:
        inputs["attention_mask"] = padded
    if family == "qwen2_5_vl":
        inputs["mm_token_type_ids"] = (prompt == special.image).int() + 2 * (prompt == special.video).int()
    return inputs | (zoo.ROWS[family].derived(target, prompt) if family in zoo.ROWS else {})


def build_next_turn(
    previous: Inputs, sequences: Tensor, seed: int, spec: ModelSpec, *, hide_pads: bool = False
) -> Inputs:
    """Inputs of the next turn: all tokens so far and a few random ones. The images are in the cache."""
    rng, special = random.Random(seed), special_ids(spec)
    batch, longer = sequences.shape[0], rng.randint(2, 5)
    new_ids = torch.tensor([[rng.choice(special.text[:40]) for _ in range(longer)] for _ in range(batch)])
    prompt = torch.cat([sequences, new_ids], dim=1)
    mask = torch.ones_like(prompt)
    old = previous.get("attention_mask", (previous["input_ids"] != special.pad).long())
    mask[:, : old.shape[1]] = old.repeat_interleave(batch // old.shape[0], dim=0)
    if hide_pads:
        mask &= (prompt != special.pad).long()
    return {"input_ids": prompt, "attention_mask": mask}


def token_texts(spec: ModelSpec) -> list[str]:
    """The text of each id: one to three letters of a to f, lengths mixed, so that stop strings span tokens."""
    special = special_ids(spec)
    strings = list("abcdef") + ["".join(w) for n in (2, 3) for w in product("abcdef", repeat=n)]
    random.Random(7).shuffle(strings)
    text = strings[: len(special.text)]
    for letter in "abcdef":
        if letter not in text:
            text[next(i for i, string in enumerate(text) if len(string) == 3)] = letter
    spelled = [""] * spec.vocab
    for i, string in zip(special.text, text, strict=True):
        spelled[i] = string
    for name in ("pad", "bos", "eos", "image", "video", "start", "end"):
        spelled[getattr(special, name)] = f"<{name}>"
    return spelled


def build_tokenizer(spec: ModelSpec) -> PreTrainedTokenizerFast:
    """A tokenizer for the whole vocabulary of `spec`."""
    backend = Tokenizer(BPE({word: i for i, word in enumerate(token_texts(spec))}, []))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
