"""Vision-language models with query tokens, image tokens of a vocabulary, or other connectors."""

from __future__ import annotations

import random
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from zoo.base import (
    NO_DOUBLE,
    VISION,
    Builder,
    Family,
    Inputs,
    Media,
    builder,
    noise,
    run_of,
    special_id,
    square_images,
    text_values,
    vision_model,
)
from zoo.gemma_like import SIGLIP, grid_images
from zoo.text_only import deepseek

LLAMA = {"model_type": "llama"}
SAM = VISION | {"model_type": "sam_vision_model", "image_size": 32, "patch_size": 4, "output_channels": 16}
SAM |= {"global_attn_indexes": [1], "window_size": 4, "mlp_dim": 32, "num_pos_feats": 8}
"""A tower for a second, larger picture beside the SigLIP tower."""


def _hybrid_images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    given, runs = square_images(16, 16)(model, count, rng, seed)
    return given | {"high_res_pixel_values": noise((count, 3, 32, 32), seed + 1, model)}, runs


def _janus(spec: Any, ids: Any) -> PreTrainedModel:
    vision = VISION | {"image_size": 12, "patch_size": 4, "projection_dim": spec.hidden, "num_image_tokens": 9}
    vq = {"embed_dim": 4, "num_embeddings": 8, "latent_channels": 8, "base_channels": 32, "channel_multiplier": [1]}
    vq |= {"num_res_blocks": 1, "projection_dim": spec.hidden, "image_token_embed_dim": spec.hidden}
    return vision_model(spec, ids, "Janus", text_values(spec, ids) | LLAMA, vision, vq_config=vq)


def _fuyu(spec: Any, ids: Any) -> PreTrainedModel:
    """Patches go straight into the text model."""
    text = text_values(spec, ids) | {"model_type": "persimmon"}
    own = {name: text[name] for name in ("tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")}
    sizes = {"image_size": 16, "patch_size": 4, "image_token_id": ids.image}
    config = transformers.FuyuConfig(text_config=text, **sizes, **own)
    return transformers.FuyuForCausalLM._from_config(config, attn_implementation=spec.attention)


def _fuyu_images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    return {"pixel_values": noise((count, 6, 48), seed, model)}, [run_of(model, 6)] * count


def _chameleon(spec: Any, ids: Any) -> PreTrainedModel:
    """Images become tokens of the vocabulary, which are never generated."""
    codes = {f"IMGIMG{'ABCDEFGH'[code]}Z": ids.text[code] for code in range(8)}
    vq = {"embed_dim": 8, "num_embeddings": 8, "latent_channels": 8, "resolution": 8, "base_channels": 32}
    vq |= {"channel_multiplier": [1, 1, 1], "num_res_blocks": 1, "attn_type": "vanilla"}
    own = {"vocabulary_map": codes | {"<image>": ids.image}, "swin_norm": spec.mixed}
    config = transformers.ChameleonConfig(**text_values(spec, ids) | own, vq_config=vq)
    return transformers.ChameleonForConditionalGeneration._from_config(config, attn_implementation=spec.attention)


def _emu3(spec: Any, ids: Any) -> PreTrainedModel:
    """Images become tokens of the vocabulary, with one more at the end of each line."""
    codes = {f"<|visual token {code:06d}|>": ids.text[code] for code in range(24)}
    codes |= {"<image>": ids.image, "<|extra_200|>": ids.text[24]}
    vq = {"codebook_size": 24, "embed_dim": 4, "latent_channels": 4, "base_channels": 32, "channel_multiplier": [1, 1]}
    vq |= {"num_res_blocks": 1, "hidden_size": 32, "attn_resolutions": [], "temporal_downsample_factor": 2}
    text = text_values(spec, ids) | {"attention_dropout": 0.0}
    return vision_model(spec, ids, "Emu3", text, None, vq_config=vq, vocabulary_map=codes)


def _emu3_images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    given, runs = square_images(8, 20)(model, count, rng, seed)
    return given | {"image_sizes": torch.tensor([[8, 8]] * count)}, runs


def _apertus(spec: Any, ids: Any) -> PreTrainedModel:
    """Images become tokens of the vocabulary; if `mixed`, the LM head lacks the rows of the last ids."""
    vision = {"codebook_size": 8, "embed_dim": 8, "latent_channels": 8, "base_channels": 32}
    vision |= {"channel_multiplier": [1, 1], "num_res_blocks": 1, "attn_resolutions": [], "resolution": 8}
    audio = {"model_type": "wavtokenizer_encoder", "num_filters": 4, "hidden_size": 8, "codebook_size": 8}
    audio |= {"codebook_dim": 8, "num_lstm_layers": 1, "upsampling_ratios": [2, 2], "decoder_hidden_size": 8}
    audio |= {"decoder_intermediate_size": 8, "decoder_num_layers": 1, "decoder_attention_num_groups": 2}
    first = spec.vocab - 24
    is_pruned = spec.mixed and not spec.tied and not spec.tail
    text = text_values(spec, ids) | {"output_vocab_size": first if is_pruned else None}
    more = {"audio_config": audio, "audio_token_id": ids.start, "image_token_offset": first}
    attention = {"text_config": spec.attention, "vision_config": "eager", "audio_config": "eager", "": "eager"}
    more |= {"audio_token_offset": first + 8, "attention": attention}
    return vision_model(spec, ids, "Apertus1p5", text, vision, **more)


def _apertus_images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    sizes = torch.tensor([[rng.choice((4, 8)), 8] for _ in range(count)])
    runs = [run_of(model, size) for size in (sizes.prod(-1) // 4).tolist()]
    return {"pixel_values": noise((count, 3, 8, 8), seed, model), "image_sizes": sizes}, runs


def _blip(name: str) -> Builder:
    """BLIP-2 or InstructBLIP with OPT: query tokens of a Q-Former."""

    def build(spec: Any, ids: Any) -> PreTrainedModel:
        text = text_values(spec, ids) | {"model_type": "opt", "ffn_dim": 32, "word_embed_proj_dim": spec.hidden}
        vision, former = VISION | {"image_size": 8, "patch_size": 4}, VISION | {"encoder_hidden_size": 16}
        former |= {"vocab_size": spec.vocab, "cross_attention_frequency": 1}
        more = {"qformer_config": former, "num_query_tokens": 4}
        model: Any = vision_model(spec, ids, name, text, vision, **more)
        model.language_model.generation_config.eos_token_id = None  # it generates, with a config of its own
        built: PreTrainedModel = model
        return built

    return build


def _instructblip_images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    """Images with an instruction of four tokens each for the Q-Former."""
    pixels, runs = square_images(8, 4)(model, count, rng, seed)
    return pixels | {"qformer_input_ids": torch.tensor([[7, 8, 9, 10 + rng.randrange(9)] for _ in range(count)])}, runs


def _kimi_images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    grid = torch.tensor([[1, rng.choice((2, 4)), rng.choice((2, 4))] for _ in range(count)])
    given = {"pixel_values": noise((int(grid.prod(-1).sum()), 3, 4, 4), seed, model), "image_grid_thw": grid}
    return given, [run_of(model, size) for size in (grid.prod(-1) // 4).tolist()]


def _molmo2(spec: Any, ids: Any) -> PreTrainedModel:
    """Pooled patches of a low and a high resolution."""
    vision = VISION | {"num_key_value_heads": 2, "head_dim": 8, "image_size": [16, 16], "patch_size": 4}
    adapter = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    adapter |= {"vision_feature_layer": [1, 0], "intermediate_size": 32, "text_hidden_size": spec.hidden}
    text = text_values(spec, ids) | {"additional_vocab_size": 8}
    return vision_model(spec, ids, "Molmo2", text, vision, adapter_config=adapter)


def _molmo2_images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    """Each image is one crop, pooled to 2 and to 4 tokens."""
    patches = torch.randint(16, (count, 6, 4), generator=torch.Generator().manual_seed(seed))
    patches[:, 5, 2:] = -1  # padding
    inputs = {
        "pixel_values": noise((count, 16, 48), seed, model),
        "image_token_pooling": (patches + 16 * torch.arange(count)[:, None, None] * (patches >= 0)).flatten(0, 1),
        "image_grids": torch.tensor([[1, 2, 2, 2]] * count),
        "image_num_crops": torch.ones(count, dtype=torch.long),
    }
    return inputs, [run_of(model, 6, enclosed=True)] * count


def _molmo2_types(model: PreTrainedModel, input_ids: Tensor) -> Inputs:
    visual = torch.tensor([special_id(model, special) for special in ("start", "image", "end")])
    return {"mm_token_type_ids": torch.isin(input_ids, visual).long()}


def _minimax(spec: Any) -> dict[str, Any]:
    """A layer that attends to selected blocks of keys; experts."""
    head_dim = spec.hidden // spec.heads
    text = {"layer_types": ["full_attention", "minimax_m3_sparse", "full_attention"][: spec.layers]}
    text |= {"mlp_layer_types": ["dense", "sparse", "sparse"][: spec.layers]}
    text |= {"num_local_experts": 4, "num_experts_per_tok": 2, "dense_intermediate_size": 32, "rotary_dim": head_dim}
    text |= {"shared_intermediate_size": 16, "index_n_heads": spec.kv_heads, "index_head_dim": head_dim}
    return text | {"index_block_size": 4, "index_topk_blocks": 2}


ROWS: tuple[Family, ...] = (
    Family(  # query tokens: 4 for 16 patches
        "aria",
        builder(
            "Aria",
            {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1, "model_type": "aria_text"},
            VISION | {"model_type": "idefics3_vision", "image_size": 16, "patch_size": 4},
            projector_patch_to_query_dict={16: 4},
        ),
        square_images(16, 4),
        traits="experts",
        **NO_DOUBLE,
    ),
    Family("deepseek_vl", builder("DeepseekVL", LLAMA, SIGLIP | {"image_size": 12}), square_images(12, 9)),
    Family(
        "deepseek_vl_hybrid", builder("DeepseekVLHybrid", LLAMA, SIGLIP, high_res_vision_config=SAM), _hybrid_images
    ),
    Family("janus", _janus, square_images(12, 9)),
    Family("fuyu", _fuyu, _fuyu_images, min_transformers="5.23"),  # older versions call the pixels image_patches
    Family("chameleon", _chameleon, square_images(8, 4)),
    Family("emu3", _emu3, _emu3_images),
    Family(
        "apertus1p5",
        _apertus,
        _apertus_images,
        traits="LM head of fewer rows than the vocabulary",
        min_transformers="5.24",
    ),
    Family(
        "blip-2",
        _blip("Blip2"),
        square_images(8, 4),
        traits="generates from embeddings, so transformers decodes alone",
        needs_image=True,
    ),
    Family(
        "instructblip",
        _blip("InstructBlip"),
        _instructblip_images,
        traits="generates from embeddings, so transformers decodes alone",
        needs_image=True,
    ),
    Family(
        "kimi_k25",
        builder(
            "Kimi_K25",
            lambda spec: deepseek(spec) | {"model_type": "deepseek_v3"},
            VISION | {"patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 4},
            projection_hidden_size=16,
        ),
        _kimi_images,
        traits="multi-head latent attention: keys and values differ in size; experts",
        **NO_DOUBLE,
    ),
    Family(
        "molmo2",
        _molmo2,
        _molmo2_images,
        derived=_molmo2_types,
        traits="images are bidirectional in the prefill",
        min_transformers="5.23",
    ),
    Family(
        "minimax_m3_vl",
        builder(
            "MiniMaxM3VL",
            _minimax,
            VISION | {"hidden_size": 32, "image_size": 16, "patch_size": 4},
            model_name="MiniMaxM3Sparse",
            projector_hidden_size=16,
        ),
        grid_images,
        traits="attention to selected blocks, so transformers decodes alone; experts",
        **NO_DOUBLE,
    ),
)
