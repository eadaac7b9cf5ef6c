"""Image-text models with an encoder, or with a `generate` of their own: one line at `patch`, and the same text."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import fuzz as fuzz
import pytest
import torch
import transformers
from torch import Tensor

import mmspec

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PIXELS = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
PROMPT = torch.tensor([[1, 9, 8, 7]])
Given = dict[str, Tensor]


def _florence2() -> tuple[Any, Given]:
    stages = {"depths": [1], "patch_size": [7], "patch_stride": [4], "patch_padding": [3], "patch_prenorm": [False]}
    stages |= {"embed_dim": [16], "num_heads": [2], "num_groups": [2], "window_size": 4, "projection_dim": 16}
    text = {"model_type": "bart", "d_model": 16, "vocab_size": 60, "max_position_embeddings": 64, **IDS}
    text |= {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in BART.items()}
    config = transformers.Florence2Config(text_config=text, vision_config=stages, image_token_id=3)
    return config, {"input_ids": PROMPT}


BART = {"layers": 1, "ffn_dim": 32, "attention_heads": 2}


def _blip() -> tuple[Any, Given]:
    text = SIZES | IDS | {"vocab_size": 60, "sep_token_id": 2, "projection_dim": 16, "max_position_embeddings": 64}
    vision = SIZES | {"image_size": 16, "patch_size": 8, "initializer_range": 0.02}
    return transformers.BlipConfig(text_config=text, vision_config=vision), {"pixel_values": PIXELS}


def _kosmos2() -> tuple[Any, Given]:
    text = {"embed_dim": 16, "layers": 1, "ffn_dim": 32, "attention_heads": 2, "vocab_size": 60, **IDS}
    vision = SIZES | {"image_size": 16, "patch_size": 8}
    config = transformers.Kosmos2Config(text_config=text, vision_config=vision, latent_query_num=2)
    ids = torch.tensor([[1, 5, 5, 9, 8]])
    return config, {"pixel_values": PIXELS, "input_ids": ids, "image_embeds_position_mask": (ids == 5).long()}


def _t5gemma2() -> tuple[Any, Given]:
    text = SIZES | IDS | {"vocab_size": 60, "num_key_value_heads": 1, "head_dim": 8, "query_pre_attn_scalar": 8}
    text |= {"layer_types": ["full_attention"]}
    vision = SIZES | {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 8}
    encoder = {"text_config": text, "vision_config": vision, "mm_tokens_per_image": 4}
    config = transformers.T5Gemma2Config(encoder=encoder, decoder=text, image_token_index=3)
    return config, {"input_ids": PROMPT}


CASES: dict[str, tuple[Callable[[], tuple[Any, Given]], str]] = {
    "Florence2": (_florence2, "an encoder-decoder model"),
    "Blip": (_blip, "a generate of its own (BlipForConditionalGeneration)"),
    "Kosmos2": (_kosmos2, "a generate of its own (Kosmos2ForConditionalGeneration)"),
    "T5Gemma2": (_t5gemma2, "an encoder-decoder model"),
}


@pytest.mark.parametrize("name", CASES)
def test_one_line_at_patch(name: str, caplog: pytest.LogCaptureFixture) -> None:
    if not hasattr(transformers, f"{name}ForConditionalGeneration"):
        pytest.skip("an older transformers")
    build, reason = CASES[name]
    config, given = build()
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    options = {"max_new_tokens": 6, "do_sample": False}
    plain = model.generate(**given, **options)
    with caplog.at_level(logging.WARNING, "mmspec"), fuzz.patch_model(model, "auto"):
        messages = [record.getMessage() for record in caplog.records if record.name.startswith("mmspec")]
        assert messages == [f"mmspec: {reason}: decoded by transformers alone"]
        assert torch.equal(model.generate(**given, **options), plain)
        assert mmspec.stats(model, last=True).fallback_reason == reason
    assert len([record for record in caplog.records if record.name.startswith("mmspec")]) == 1
