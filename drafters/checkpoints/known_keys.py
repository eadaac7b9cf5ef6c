"""The keys of published configs: read, without effect on a draft, or refused by name unless they say what is read.

Configs are often copies of a target's, with keys of its tokenizer, its cache, and of layers that the head does not
have. A key that is in none of these lists is named in a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

logger = logging.getLogger("mmspec")

OBJECTS = ("transformer_layer_config", "dflash_config", "eagle_config")
"""Keys whose objects hold settings of the head."""
METHOD_OBJECTS = ("dflash_config.", "eagle_config.")
"""Of these, beside which a config may have the same keys for another reader."""
COUNTED_OTHERWISE = ("eagle_aux_hidden_state_layer_ids",)
"""Keys that mean something else in there."""
READ = frozenset((
    "architectures", "bias", "draft_vocab_size", "head_dim", "hidden_act", "hidden_activation", "hidden_size",
    "image_token_id", "image_token_index", "intermediate_size", "is_neox_style", "model_type", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "partial_rotary_factor", "rms_norm_eps", "rope_is_neox_style",
    "rope_parameters", "rope_scaling", "rope_theta", "speculators_config", "speculators_model_type",
    "target_hidden_size", "vocab_size", *OBJECTS,
))  # fmt: skip
"""By the methods in general; each has further ones (`HeadMethod.published_keys`)."""
BY_TENSORS = frozenset((
    "attention_bias", "fc_bias", "mlp_bias", "num_aux_hidden_states", "qk_norm", "qkv_bias", "tie_word_embeddings",
    "use_qk_norm", "vispec_num_query_tokens",
))  # fmt: skip
"""What they say is read off the tensors, of which none may be missing or left over."""
WITHOUT_EFFECT = frozenset((
    # of files, tokenizers and training
    "_attn_implementation", "_name_or_path", "add_classification_head", "attention_dropout", "auto_map",
    "bos_token_id", "chunk_size_feed_forward", "class_num", "confidence_head_alpha", "dtype", "embed_requires_grad",
    "embd_pdrop", "eod_token_id", "eos_token_id", "hidden_dropout", "id2label", "im_end_id", "im_newline_id",
    "im_start_id", "image_end_token_id", "image_newline_token_id", "image_start_token_id", "initializer_range",
    "kd_loss_weight", "label2id", "loss_type", "mask_init_id", "max_anchors", "modal_type", "norm_type",
    "num_anchors", "org_vocab_size", "output_attentions", "output_hidden_states", "pad_id", "pad_token_id",
    "pooling_type", "pool_type", "prefix", "problem_type", "resid_pdrop", "return_dict", "sep_token_id",
    "sliding_window", "use_sliding_window",
    "speculators_version", "step_loss_decay", "summary_type", "target_model_name_or_path", "target_model_type",
    "target_text_model_type", "text_end_id", "text_start_id", "torch_dtype", "transformers_version", "ttt_length",
    "unsloth_version", "video_token_id", "video_token_index", "vision_end_token_id", "vision_start_token_id",
    "vision_token_id",
    # of targets: their caches, experts, vision towers, and layers that these heads do not have
    "attention_head_dim", "attention_mode", "cla_share_factor", "decoder_sparse_step", "dense_list",
    "draft_num_hidden_layers", "is_decoder", "is_encoder_decoder", "is_llama_config", "max_position_embeddings",
    "max_window_layers", "mlp_only_layers", "mm_projector_type", "num_target_layers", "output_router_logits",
    "pretraining_tp", "router_aux_loss_coef", "text_config", "tower_config", "use_cache", "use_mrope",
    "vision_config",
))  # fmt: skip
PREFIXES_WITHOUT_EFFECT = ("mm_", "image_", "vision_", "video_", "tokenizer_", "freeze_", "unfreeze_", "tune_")
"""Of keys of vision towers and of their training."""
EXPECTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys((
        "add_full_attention_sink_bias", "add_swa_attention_sink_bias", "attention_k_eq_v", "attention_sink_bias",
        "enable_moe_block", "lilicorr_enabled", "parallel_drafting", "shift_label", "use_cla", "use_double_wide_mlp",
        "use_gemma_norm", "use_mtp_layernorm", "use_swa",
    ), (False,)),
    **dict.fromkeys((
        "attention_multiplier", "conv_group_size", "conv_kernel_size", "emb_dim", "gru_hidden_dim",
        "lilicorr_candidate_topk", "lilicorr_factor_dim", "lilicorr_hidden_size", "lilicorr_logit_scale",
        "lilicorr_mlp_ratio", "lilicorr_num_heads", "lilicorr_num_layers", "lilicorr_vector_eps", "mask_token_id",
        "no_rope_layers", "projector_type", "rope_local_base_freq", "sample_from_anchor", "selector_rank",
        "selector_top_k",
    ), ()),
    **dict.fromkeys((
        "attention_value_scale", "embedding_multiplier", "input_embedding_scale", "logit_scale", "logits_scaling",
        "output_multiplier", "residual_multiplier",
    ), (1.0,)),
    **dict.fromkeys((
        "attn_logit_softcapping", "final_logit_softcapping", "hidden_size_per_layer_input", "kv_lora_rank",
        "markov_rank", "no_rope_layer_interval", "num_experts", "num_kv_shared_layers", "num_local_experts",
        "parallel_draft_heads_num_layers", "pure_draft_prefix_len",
    ), (0,)),
    **dict.fromkeys((
        "has_lm_head", "is_causal", "next_layer_regular", "use_aux_hidden_state", "use_input_layernorm_in_first_layer",
        "use_last_layernorm", "use_rotary_pos_emb",
    ), (True,)),
    "attn_temperature_tuning": (False, 0),
    "compression_config": ({},),
    "eagle_decoder_type": ("llama",),
    "layer_types": ("full_attention",),
    "markov_head_type": ("vanilla",),
    "parallel_draft_step": (1,),
    "position_embedding_type": ("rope", "absolute"),
    "quantization_config": ({},),
}  # fmt: skip
"""Keys that change a network -> the values with which it is the one that is read; None is one for all."""
IN_EVERY_LAYER = ("layer_types",)
"""Of these a list with one value for each layer is meant."""


def check_keys(values: Mapping[str, Any], read: Collection[str]) -> None:
    """Refuse settings of a published config that change the network otherwise than it is read.

    Args:
        values: of the file.
        read: keys that the method reads, besides `READ`.

    Raises:
        ValueError: names the key, its value and the one that is read.
    """
    unknown = list[str]()
    for path, key, value in _settings(values):
        if value is None:
            continue
        if key in READ or key in read:
            other = values.get(key)
            if path.startswith(METHOD_OBJECTS) and key not in COUNTED_OTHERWISE and other not in (None, value):
                raise ValueError(f"{key} is {other!r:.80}, {path} {value!r:.80}: delete the one that is wrong.")
            continue
        if key in EXPECTED:
            found = value if key in IN_EVERY_LAYER and isinstance(value, list) else [value]
            if not all(one in EXPECTED[key] for one in found):
                wanted = f"; {EXPECTED[key][0]!r} is" if EXPECTED[key] else ""
                raise ValueError(f"{path} {value!r:.80} is not supported in such a draft head{wanted}.")
        elif not _is_without_effect(key) and value not in (False, [], {}, ""):
            unknown.append(path)
    if unknown:
        logger.warning(
            "mmspec: keys of this head's config that are not known here, and were not read: %s; if one of them changes "
            "the network, its guesses are refused more often",
            ", ".join(sorted(unknown)[:8]),
        )


def _is_without_effect(key: str) -> bool:
    return key in BY_TENSORS or key in WITHOUT_EFFECT or key.startswith(PREFIXES_WITHOUT_EFFECT)


def _settings(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """(path, key, value) of the settings, those in `OBJECTS` with the path to them."""
    for key, value in values.items():
        yield f"{prefix}{key}", key, value
        if key in OBJECTS and isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{key}.")
