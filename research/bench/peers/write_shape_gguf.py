"""A text model of a shape with random weights as GGUF: `PYTHON write_shape_gguf.py FILE TYPE SHAPE`.

SHAPE is the shape as JSON (`research.bench.shape.models.TextShape`), TYPE one of `TYPES`. Imports nothing of mmspec;
needs numpy and gguf. The weights are one random tile over and over, for a speed depends on their sizes only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

TYPES = {"bf16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0", "f32": "F32"}
NUM_TILE_ROWS = 16
ARCHITECTURES = {"qwen3_5_text": "qwen35", "gemma4_text": "gemma4"}
"""Names of llama.cpp that are not those of transformers."""
STATE_SIZE, NUM_STATE_KEY_HEADS, NUM_TAPS = 128, 16, 4
"""Of the delta rule of Qwen3.5: the sizes that its config has by itself."""
GLOBAL_HEAD_SIZE, PER_LAYER_SIZE, WINDOW = 512, 256, 512
"""Of Gemma 4."""

Sizes = dict[str, tuple[int, ...]]
"""{name, without ".weight": [rows, columns] or [columns]}"""


def _attention(shape: dict[str, Any], head: int, gates: int = 1) -> Sizes:
    hidden, keys = shape["hidden_size"], head * shape["num_key_value_heads"]
    queries = head * shape["num_attention_heads"]
    sizes: Sizes = {"attn_q": (queries * gates, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden)}
    return sizes | {"attn_output": (hidden, queries)}


def _feed_forward(shape: dict[str, Any], width: int = 1) -> Sizes:
    hidden, inner = shape["hidden_size"], shape["intermediate_size"] * width
    return {"ffn_down": (hidden, inner), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden)}


def _head_norms(head: int) -> Sizes:
    return {"attn_q_norm": (head,), "attn_k_norm": (head,)}


def _qwen3_5(shape: dict[str, Any], layer: int) -> Sizes:
    hidden = shape["hidden_size"]
    sizes: Sizes = {"attn_norm": (hidden,), "post_attention_norm": (hidden,)} | _feed_forward(shape)
    if shape["config"]["layer_types"][layer] == "full_attention":
        return sizes | _attention(shape, shape["head_dim"], 2) | _head_norms(shape["head_dim"])
    heads = shape["config"]["linear_num_value_heads"]
    values = heads * STATE_SIZE
    channels = 2 * NUM_STATE_KEY_HEADS * STATE_SIZE + values
    sizes |= {"attn_qkv": (channels, hidden), "attn_gate": (values, hidden), "ssm_out": (hidden, values)}
    sizes |= {"ssm_conv1d": (channels, NUM_TAPS), "ssm_norm": (STATE_SIZE,), "ssm_dt.bias": (heads,), "ssm_a": (heads,)}
    return sizes | dict.fromkeys(("ssm_beta", "ssm_alpha"), (heads, hidden))


def _lfm2(shape: dict[str, Any], layer: int) -> Sizes:
    hidden, head = shape["hidden_size"], shape["hidden_size"] // shape["num_attention_heads"]
    sizes: Sizes = {"attn_norm": (hidden,), "ffn_norm": (hidden,)} | _feed_forward(shape)
    if shape["config"]["layer_types"][layer] == "full_attention":
        return sizes | _attention(shape, head) | _head_norms(head)
    sizes |= {"shortconv.conv": (hidden, 3), "shortconv.in_proj": (3 * hidden, hidden)}
    return sizes | {"shortconv.out_proj": (hidden, hidden)}


def _gemma4(shape: dict[str, Any], layer: int) -> Sizes:
    hidden, config = shape["hidden_size"], shape["config"]
    head = shape["head_dim"] if config["layer_types"][layer] == "sliding_attention" else GLOBAL_HEAD_SIZE
    is_shared = layer >= shape["num_hidden_layers"] - config["num_kv_shared_layers"]
    sizes: Sizes = _attention(shape, head) | _head_norms(head) | _feed_forward(shape, 2 if is_shared else 1)
    for name in ("attn_k", "attn_v", "attn_k_norm") if is_shared else ():
        del sizes[name]
    norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm")
    sizes |= dict.fromkeys(norms, (hidden,)) | {"layer_output_scale": (1,)}
    return sizes | {"inp_gate": (PER_LAYER_SIZE, hidden), "proj": (hidden, PER_LAYER_SIZE)}


def _plain(shape: dict[str, Any], layer: int) -> Sizes:
    hidden, kind = shape["hidden_size"], shape["model_type"]
    head = shape.get("head_dim") or hidden // shape["num_attention_heads"]
    sizes: Sizes = {"attn_norm": (hidden,), "ffn_norm": (hidden,)} | _attention(shape, head) | _feed_forward(shape)
    if kind == "qwen3":
        sizes |= _head_norms(head)
    if kind == "qwen2":
        sizes |= {f"{name}.bias": sizes[name][:1] for name in ("attn_q", "attn_k", "attn_v")}
    return sizes


LAYERS = {"qwen3_5_text": _qwen3_5, "lfm2": _lfm2, "gemma4_text": _gemma4}


def tensors(shape: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, [rows, columns] or [columns]."""
    hidden, layers, kind = shape["hidden_size"], shape["num_hidden_layers"], shape["model_type"]
    yield "token_embd.weight", (shape["vocab_size"], hidden)
    yield "token_embd_norm.weight" if kind == "lfm2" else "output_norm.weight", (hidden,)
    if not shape["tie_word_embeddings"]:
        yield "output.weight", (shape["vocab_size"], hidden)
    if kind == "gemma4_text":
        yield "per_layer_token_embd.weight", (shape["vocab_size"], layers * PER_LAYER_SIZE)
        yield "per_layer_model_proj.weight", (layers * PER_LAYER_SIZE, hidden)
        yield "per_layer_proj_norm.weight", (PER_LAYER_SIZE,)
        yield "rope_freqs.weight", (GLOBAL_HEAD_SIZE // 2,)
    for layer in range(layers):
        for name, size in LAYERS.get(kind, _plain)(shape, layer).items():
            is_whole = name.endswith(".bias") or name == "ssm_a"
            yield f"blk.{layer}.{name}" + ("" if is_whole else ".weight"), size


def _describe(writer: Any, shape: dict[str, Any]) -> None:
    """Write the sizes under the names of llama.cpp."""
    name, config = ARCHITECTURES.get(shape["model_type"], shape["model_type"]), shape["config"]
    kinds, layers = config.get("layer_types", ()), range(shape["num_hidden_layers"])
    head = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    feed_forward: Any = shape["intermediate_size"]
    kv_heads: Any = shape["num_key_value_heads"]
    rotated = key_size = head
    if name == "qwen35":
        rotated = head // 4
        values = config["linear_num_value_heads"]
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_ssm_conv_kernel(NUM_TAPS)
        writer.add_ssm_state_size(STATE_SIZE)
        writer.add_ssm_inner_size(values * STATE_SIZE)
        writer.add_ssm_time_step_rank(values)
        writer.add_ssm_group_count(NUM_STATE_KEY_HEADS)
        writer.add_full_attention_interval(kinds.index("full_attention") + 1)
    if name == "lfm2":
        kv_heads = [kv_heads if kind == "full_attention" else 0 for kind in kinds]
        writer.add_shortconv_l_cache(3)
    if name == "gemma4":
        rotated = key_size = GLOBAL_HEAD_SIZE
        shared = config["num_kv_shared_layers"]
        feed_forward = [feed_forward * (2 if layer >= len(layers) - shared else 1) for layer in layers]
        writer.add_sliding_window(WINDOW)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
        writer.add_shared_kv_layers(shared)
        writer.add_key_length_swa(head)
        writer.add_value_length_swa(head)
        writer.add_rope_dimension_count_swa(head)
        writer.add_rope_freq_base_swa(1e4)
        writer.add_embedding_length_per_layer_input(PER_LAYER_SIZE)
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(key_size)
    writer.add_value_length(key_size)
    writer.add_rope_dimension_count(rotated)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def write_shape(file: str, type_name: str, shape: dict[str, Any]) -> None:
    """Write the file."""
    import gguf
    import numpy as np

    kind = gguf.GGMLQuantizationType[TYPES[type_name]]
    writer = gguf.GGUFWriter(file, ARCHITECTURES.get(shape["model_type"], shape["model_type"]))
    _describe(writer, shape)
    random = np.random.default_rng(0)
    for name, size in tensors(shape):
        if len(size) == 1 or size[1] <= NUM_TAPS:  # norms, biases, convolutions
            writer.add_tensor(name, np.ones(size, np.float32))
            continue
        tile = random.standard_normal((NUM_TILE_ROWS, size[1])).astype(np.float32) * 0.02
        packed = gguf.quants.quantize(tile, kind)
        repeats = -(-size[0] // NUM_TILE_ROWS)
        writer.add_tensor(name, np.tile(packed, (repeats, 1))[: size[0]], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write_shape(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
