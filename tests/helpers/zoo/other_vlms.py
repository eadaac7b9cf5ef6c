"""Vision-language models with query tokens, image tokens of a vocabulary, or other connectors."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from zoo.base import Family, Inputs, Media, noise, text_values
from zoo.gemma_like import grid_images

VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
NO_DOUBLE = ("float32",)
"""Dtypes of models with experts, which have no kernel for float64."""


def _square_images(size: int, tokens: int) -> Any:
    """Images of `size`² pixels and `tokens` tokens."""

    def images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
        config: Any = model.config
        pixels = {"pixel_values": noise((count, 3, size, size), seed, model)}
        return pixels, [[config.image_token_id] * tokens] * count

    return images


def _aria(spec: Any, ids: Any) -> PreTrainedModel:
    """Query tokens: 4 for 16 patches."""
    from transformers import AriaConfig, AriaForConditionalGeneration

    text = text_values(spec, ids) | {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}
    config = AriaConfig(
        text_config=text | {"model_type": "aria_text"},
        vision_config=VISION | {"model_type": "idefics3_vision", "image_size": 16, "patch_size": 4},
        projector_patch_to_query_dict={16: 4},
        image_token_index=ids.image,
        tie_word_embeddings=spec.tied,
    )
    return AriaForConditionalGeneration._from_config(config, attn_implementation=spec.attention)


def _deepseek_vl(spec: Any, ids: Any) -> PreTrainedModel:
    from transformers import DeepseekVLConfig, DeepseekVLForConditionalGeneration

    vision = VISION | {"model_type": "siglip_vision_model", "image_size": 12, "patch_size": 4, "vision_use_head": False}
    config = DeepseekVLConfig(
        text_config=text_values(spec, ids) | {"model_type": "llama"},
        vision_config=vision,
        image_token_id=ids.image,
        tie_word_embeddings=spec.tied,
    )
    return DeepseekVLForConditionalGeneration._from_config(config, attn_implementation=spec.attention)


def _deepseek_vl_hybrid(spec: Any, ids: Any) -> PreTrainedModel:
    """A SAM tower for a second, larger picture beside the SigLIP tower."""
    from transformers import DeepseekVLHybridConfig, DeepseekVLHybridForConditionalGeneration

    vision = VISION | {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4, "vision_use_head": False}
    sam = VISION | {"model_type": "sam_vision_model", "image_size": 32, "patch_size": 4, "output_channels": 16}
    sam |= {"global_attn_indexes": [1], "window_size": 4, "mlp_dim": 32, "num_pos_feats": 8}
    config = DeepseekVLHybridConfig(
        text_config=text_values(spec, ids) | {"model_type": "llama"},
        vision_config=vision,
        high_res_vision_config=sam,
        image_token_id=ids.image,
        tie_word_embeddings=spec.tied,
    )
    return DeepseekVLHybridForConditionalGeneration._from_config(config, attn_implementation=spec.attention)


def _hybrid_images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    config: Any = model.config
    inputs = {
        "pixel_values": noise((count, 3, 16, 16), seed, model),
        "high_res_pixel_values": noise((count, 3, 32, 32), seed + 1, model),
    }
    return inputs, [[config.image_token_id] * 16] * count


def _janus(spec: Any, ids: Any) -> PreTrainedModel:
    from transformers import JanusConfig, JanusForConditionalGeneration

    vision = VISION | {"image_size": 12, "patch_size": 4, "projection_dim": spec.hidden, "num_image_tokens": 9}
    vq = {"embed_dim": 4, "num_embeddings": 8, "latent_channels": 8, "base_channels": 32, "channel_multiplier": [1]}
    vq |= {"num_res_blocks": 1, "projection_dim": spec.hidden, "image_token_embed_dim": spec.hidden}
    config = JanusConfig(
        text_config=text_values(spec, ids) | {"model_type": "llama"},
        vision_config=vision,
        vq_config=vq,
        image_token_id=ids.image,
        tie_word_embeddings=spec.tied,
    )
    return JanusForConditionalGeneration._from_config(config, attn_implementation=spec.attention)


def _fuyu(spec: Any, ids: Any) -> PreTrainedModel:
    """Patches go straight into the text model."""
    from transformers import FuyuConfig, FuyuForCausalLM

    text = text_values(spec, ids) | {"model_type": "persimmon"}
    config = FuyuConfig(
        text_config=text,
        image_size=16,
        patch_size=4,
        image_token_id=ids.image,
        tie_word_embeddings=spec.tied,
        **{name: text[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
    )
    return FuyuForCausalLM._from_config(config, attn_implementation=spec.attention)


def _fuyu_images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    config: Any = model.config
    return {"pixel_values": noise((count, 6, 48), seed, model)}, [[config.image_token_id] * 6] * count


def _chameleon(spec: Any, ids: Any) -> PreTrainedModel:
    """Images become tokens of the vocabulary, which are never generated."""
    from transformers import ChameleonConfig, ChameleonForConditionalGeneration

    codes = {f"IMGIMG{'ABCDEFGH'[code]}Z": ids.text[code] for code in range(8)}
    vq = {"embed_dim": 8, "num_embeddings": 8, "latent_channels": 8, "resolution": 8, "base_channels": 32}
    vq |= {"channel_multiplier": [1, 1, 1], "num_res_blocks": 1, "attn_type": "vanilla"}
    config = ChameleonConfig(
        **text_values(spec, ids) | {"vocabulary_map": codes | {"<image>": ids.image}, "swin_norm": spec.mixed},
        vq_config=vq,
    )
    return ChameleonForConditionalGeneration._from_config(config, attn_implementation=spec.attention)


def _emu3(spec: Any, ids: Any) -> PreTrainedModel:
    """Images become tokens of the vocabulary, with one more at the end of each line."""
    from transformers import Emu3Config, Emu3ForConditionalGeneration

    codes = {f"<|visual token {code:06d}|>": ids.text[code] for code in range(24)}
    vq = {"codebook_size": 24, "embed_dim": 4, "latent_channels": 4, "base_channels": 32, "channel_multiplier": [1, 1]}
    vq |= {"num_res_blocks": 1, "hidden_size": 32, "attn_resolutions": [], "temporal_downsample_factor": 2}
    config = Emu3Config(
        text_config=text_values(spec, ids) | {"attention_dropout": 0.0},
        vq_config=vq,
        vocabulary_map=codes | {"<image>": ids.image, "<|extra_200|>": ids.text[24]},
        tie_word_embeddings=spec.tied,
    )
    return Emu3ForConditionalGeneration._from_config(config, attn_implementation=spec.attention)


def _emu3_images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    config: Any = model.config
    inputs = {
        "pixel_values": noise((count, 3, 8, 8), seed, model),
        "image_sizes": torch.tensor([[8, 8]] * count),
    }
    return inputs, [[config.image_token_id] * 20] * count


def _apertus(spec: Any, ids: Any) -> PreTrainedModel:
    """Images become tokens of the vocabulary; if `mixed`, the LM head lacks the rows of the last ids."""
    from transformers import Apertus1p5Config, Apertus1p5ForConditionalGeneration

    vision = {"codebook_size": 8, "embed_dim": 8, "latent_channels": 8, "base_channels": 32}
    vision |= {"channel_multiplier": [1, 1], "num_res_blocks": 1, "attn_resolutions": [], "resolution": 8}
    audio = {"model_type": "wavtokenizer_encoder", "num_filters": 4, "hidden_size": 8, "codebook_size": 8}
    audio |= {"codebook_dim": 8, "num_lstm_layers": 1, "upsampling_ratios": [2, 2], "decoder_hidden_size": 8}
    audio |= {"decoder_intermediate_size": 8, "decoder_num_layers": 1, "decoder_attention_num_groups": 2}
    first = spec.vocab - 24
    is_pruned = spec.mixed and not spec.tied and not spec.tail
    config = Apertus1p5Config(
        text_config=text_values(spec, ids) | {"output_vocab_size": first if is_pruned else None},
        vision_config=vision,
        audio_config=audio,
        image_token_id=ids.image,
        audio_token_id=ids.start,
        image_token_offset=first,
        audio_token_offset=first + 8,
        tie_word_embeddings=spec.tied,
    )
    attention = {"text_config": spec.attention, "vision_config": "eager", "audio_config": "eager", "": "eager"}
    return Apertus1p5ForConditionalGeneration._from_config(config, attn_implementation=attention)


def _apertus_images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    config: Any = model.config
    sizes = torch.tensor([[rng.choice((4, 8)), 8] for _ in range(count)])
    runs = [[config.image_token_id] * size for size in (sizes.prod(-1) // 4).tolist()]
    return {"pixel_values": noise((count, 3, 8, 8), seed, model), "image_sizes": sizes}, runs


def _blip(name: str) -> Any:
    """BLIP-2 or InstructBLIP with OPT: query tokens of a Q-Former."""

    def build(spec: Any, ids: Any) -> PreTrainedModel:
        import transformers

        text = text_values(spec, ids) | {"model_type": "opt", "ffn_dim": 32, "word_embed_proj_dim": spec.hidden}
        former = VISION | {"vocab_size": spec.vocab, "encoder_hidden_size": 16, "cross_attention_frequency": 1}
        config = getattr(transformers, f"{name}Config")(
            text_config=text,
            vision_config=VISION | {"image_size": 8, "patch_size": 4},
            qformer_config=former,
            num_query_tokens=4,
            image_token_index=ids.image,
        )
        model: PreTrainedModel = getattr(transformers, f"{name}ForConditionalGeneration")._from_config(
            config, attn_implementation=spec.attention
        )
        model.language_model.generation_config.eos_token_id = None  # it generates, with a config of its own
        return model

    return build


def _instructblip_images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    """Images with an instruction of four tokens each for the Q-Former."""
    pixels, runs = _square_images(8, 4)(model, count, rng, seed)
    return pixels | {"qformer_input_ids": torch.tensor([[7, 8, 9, 10 + rng.randrange(9)] for _ in range(count)])}, runs


def _kimi(spec: Any, ids: Any) -> PreTrainedModel:
    """Multi-head latent attention and experts of DeepSeek V3."""
    from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration

    text = text_values(spec, ids) | {"model_type": "deepseek_v3", "n_routed_experts": 4, "num_experts_per_tok": 2}
    text |= {"n_group": 2, "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
    text |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
    text |= {"num_key_value_heads": spec.heads, "head_dim": 4}
    vision = VISION | {"patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 4}
    config = Kimi_K25Config(
        text_config=text,
        vision_config=vision,
        projection_hidden_size=16,
        image_token_id=ids.image,
        video_token_id=ids.video,
        vision_start_token_id=ids.start,
        vision_end_token_id=ids.end,
        tie_word_embeddings=spec.tied,
    )
    return Kimi_K25ForConditionalGeneration._from_config(config, attn_implementation=spec.attention)


def _kimi_images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    config: Any = model.config
    grid = torch.tensor([[1, rng.choice((2, 4)), rng.choice((2, 4))] for _ in range(count)])
    pixels = noise((int(grid.prod(-1).sum()), 3, 4, 4), seed, model)
    return {"pixel_values": pixels, "image_grid_thw": grid}, [
        [config.image_token_id] * size for size in (grid.prod(-1) // 4).tolist()
    ]


def _molmo2(spec: Any, ids: Any) -> PreTrainedModel:
    """Pooled patches of a low and a high resolution."""
    from transformers import Molmo2Config, Molmo2ForConditionalGeneration

    vision = VISION | {"num_key_value_heads": 2, "head_dim": 8, "image_size": [16, 16], "patch_size": 4}
    adapter = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    adapter |= {"vision_feature_layer": [1, 0], "intermediate_size": 32, "text_hidden_size": spec.hidden}
    config = Molmo2Config(
        text_config=text_values(spec, ids) | {"additional_vocab_size": 8},
        vision_config=vision,
        adapter_config=adapter,
        image_patch_id=ids.image,
        image_start_token_id=ids.start,
        image_end_token_id=ids.end,
        tie_word_embeddings=spec.tied,
    )
    return Molmo2ForConditionalGeneration._from_config(config, attn_implementation=spec.attention)


def _molmo2_images(model: PreTrainedModel, count: int, rng: random.Random, seed: int) -> Media:
    """Each image is one crop, pooled to 2 and to 4 tokens."""
    config: Any = model.config
    patches = torch.randint(16, (count, 6, 4), generator=torch.Generator().manual_seed(seed))
    patches[:, 5, 2:] = -1  # padding
    inputs = {
        "pixel_values": noise((count, 16, 48), seed, model),
        "image_token_pooling": (patches + 16 * torch.arange(count)[:, None, None] * (patches >= 0)).flatten(0, 1),
        "image_grids": torch.tensor([[1, 2, 2, 2]] * count),
        "image_num_crops": torch.ones(count, dtype=torch.long),
    }
    run = [config.image_start_token_id, *[config.image_patch_id] * 6, config.image_end_token_id]
    return inputs, [run] * count


def _molmo2_types(model: PreTrainedModel, input_ids: Tensor) -> Inputs:
    config: Any = model.config
    visual = (config.image_start_token_id, config.image_patch_id, config.image_end_token_id)
    return {"mm_token_type_ids": torch.isin(input_ids, torch.tensor(visual)).long()}


def _minimax(spec: Any, ids: Any) -> PreTrainedModel:
    """A layer that attends to selected blocks of keys; experts."""
    from transformers import MiniMaxM3SparseForConditionalGeneration, MiniMaxM3VLConfig

    head_dim = spec.hidden // spec.heads
    types = ["full_attention", "minimax_m3_sparse", "full_attention"][: spec.layers]
    text = text_values(spec, ids) | {
        "layer_types": types,
        "mlp_layer_types": ["dense", "sparse", "sparse"][: len(types)],
    }
    text |= {"num_local_experts": 4, "num_experts_per_tok": 2, "dense_intermediate_size": 32, "rotary_dim": head_dim}
    text |= {"shared_intermediate_size": 16, "index_n_heads": spec.kv_heads, "index_head_dim": head_dim}
    text |= {"index_block_size": 4, "index_topk_blocks": 2}
    config = MiniMaxM3VLConfig(
        text_config=text,
        vision_config=VISION | {"hidden_size": 32, "image_size": 16, "patch_size": 4},
        image_token_index=ids.image,
        video_token_index=ids.video,
        projector_hidden_size=16,
        tie_word_embeddings=spec.tied,
    )
    return MiniMaxM3SparseForConditionalGeneration._from_config(config, attn_implementation=spec.attention)


ROWS: tuple[Family, ...] = (
    Family("aria", _aria, _square_images(16, 4), traits="experts", dtypes=NO_DOUBLE),
    Family("deepseek_vl", _deepseek_vl, _square_images(12, 9)),
    Family("deepseek_vl_hybrid", _deepseek_vl_hybrid, _hybrid_images),
    Family("janus", _janus, _square_images(12, 9)),
    Family("fuyu", _fuyu, _fuyu_images, min_transformers="5.23"),  # older versions call the pixels image_patches
    Family("chameleon", _chameleon, _square_images(8, 4)),
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
        _square_images(8, 4),
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
        _kimi,
        _kimi_images,
        traits="multi-head latent attention: keys and values differ in size; experts",
        dtypes=NO_DOUBLE,
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
        _minimax,
        grid_images,
        traits="attention to selected blocks, so transformers decodes alone; experts",
        dtypes=NO_DOUBLE,
    ),
)
