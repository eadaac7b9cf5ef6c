"""Causal text models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from transformers import PreTrainedModel

from zoo.base import NO_DOUBLE, Builder, Family, layer_types, text_values

Extra = Callable[[Any], dict[str, Any]]


def _builder(name: str, extra: Extra = lambda spec: {}, config_name: str = "", attention: str = "") -> Builder:
    """A builder of `<name>ForCausalLM` with the values of `extra(spec)`, and its only `attention` if it has but one."""

    def build(spec: Any, ids: Any) -> PreTrainedModel:
        config = getattr(transformers, config_name or f"{name}Config")(**text_values(spec, ids) | extra(spec))
        model: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")._from_config(
            config, attn_implementation=attention or spec.attention
        )
        return model

    return build


def _switched_window(spec: Any) -> dict[str, Any]:
    window = {"use_sliding_window": bool(spec.window), "sliding_window": spec.window or 4096, "max_window_layers": 0}
    return window | {"layer_types": layer_types(spec)}


def _experts(spec: Any) -> dict[str, Any]:
    """Sparse layers, with a dense one in between."""
    return {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1]}


def alternating(spec: Any) -> dict[str, Any]:
    """Sliding and full layers, as these models always have; without `spec.window` the window is never reached."""
    types = ["sliding_attention", "full_attention"] * spec.layers
    types = layer_types(spec) if spec.window and spec.mixed else types[: spec.layers]
    return {"layer_types": types, "sliding_window": spec.window or 512}


def _phi3(spec: Any) -> dict[str, Any]:
    half = spec.hidden // spec.heads // 2
    long = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * half, "long_factor": [4.0] * half}
    rope = long if spec.mixed else {"rope_type": "default", "rope_theta": 10000.0}
    # At `original_max_position_embeddings` transformers computes the cache anew.
    limit = 32 if spec.mixed else 1024
    return {"rope_parameters": rope, "original_max_position_embeddings": limit, "sliding_window": spec.window or None}


def _gpt_oss(spec: Any) -> dict[str, Any]:
    return alternating(spec) | {"num_local_experts": 4, "num_experts_per_tok": 2}


def deepseek(spec: Any) -> dict[str, Any]:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    experts |= {"moe_intermediate_size": 16, "first_k_dense_replace": 1}
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
    return experts | latent | {"num_key_value_heads": spec.heads, "head_dim": 4}


def _mistral4(spec: Any) -> dict[str, Any]:
    """Queries are scaled from the 16th position on."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    return deepseek(spec) | {"head_dim": 12, "rope_parameters": rope}


def gemma3n_text(spec: Any) -> dict[str, Any]:
    """The last layer shares the keys and values of the one before its kind."""
    types = ["sliding_attention", "full_attention", "full_attention"][: spec.layers]
    text = {"layer_types": types, "sliding_window": spec.window or 512, "num_kv_shared_layers": spec.layers - 2}
    text |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": spec.vocab, "altup_num_inputs": 2}
    sparsity = [0.5, 0.0, 0.0][: spec.layers]
    return text | {"laurel_rank": 4, "activation_sparsity_pattern": sparsity}


ROWS: tuple[Family, ...] = (
    Family("llama", _builder("Llama")),
    Family("qwen3", _builder("Qwen3", _switched_window), has_window=True),
    Family("qwen3_moe", _builder("Qwen3Moe", _experts), traits="experts", **NO_DOUBLE),
    Family("mistral", _builder("Mistral", lambda spec: {"sliding_window": spec.window or None}), has_window=True),
    Family(
        "gemma2",
        _builder("Gemma2", alternating, attention="eager"),
        traits="mask per layer type; capped attention logits",
        has_window=True,
        **NO_DOUBLE,
        attentions=("eager",),
    ),
    Family(
        "gemma3_text",
        _builder("Gemma3", alternating, "Gemma3TextConfig"),
        traits="mask per layer type",
        has_window=True,
    ),
    Family(
        "gemma3n_text",
        _builder("Gemma3n", gemma3n_text, "Gemma3nTextConfig"),
        traits="mask per layer type; shared keys and values; per-layer inputs from ids",
        has_window=True,
    ),
    Family(
        "phi3",
        _builder("Phi3", _phi3),
        traits="longrope: frequencies depend on the length, so transformers decodes alone",
        has_window=True,
    ),
    Family(
        "gpt_oss",
        _builder("GptOss", _gpt_oss, attention="eager"),
        traits="mask per layer type; attention sinks; experts",
        has_window=True,
        **NO_DOUBLE,
        attentions=("eager",),
    ),
    Family(
        "deepseek_v3",
        _builder("DeepseekV3", deepseek),
        traits="multi-head latent attention: keys and values differ in size; experts",
        **NO_DOUBLE,
    ),
    Family(
        "mistral4",
        _builder("Mistral4", _mistral4),
        traits="multi-head latent attention: keys and values differ in size; queries scaled by position; experts",
        **NO_DOUBLE,
        min_transformers="5.24",
    ),
    Family("granite", _builder("Granite", lambda spec: {"residual_multiplier": 0.7, "logits_scaling": 2.0})),
    Family("olmo2", _builder("Olmo2")),
    Family(
        "cohere2",
        _builder("Cohere2", lambda spec: alternating(spec) | {"logit_scale": 0.5}),
        traits="mask per layer type; no positions in full layers",
        has_window=True,
    ),
)
