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


def tensors(shape: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, [rows, columns] or [columns]."""
    hidden, inner, kind = shape["hidden_size"], shape["intermediate_size"], shape["model_type"]
    head = shape.get("head_dim") or hidden // shape["num_attention_heads"]
    queries, keys = head * shape["num_attention_heads"], head * shape["num_key_value_heads"]
    yield "token_embd.weight", (shape["vocab_size"], hidden)
    yield "output_norm.weight", (hidden,)
    if not shape["tie_word_embeddings"]:
        yield "output.weight", (shape["vocab_size"], hidden)
    for layer in range(shape["num_hidden_layers"]):
        sizes: dict[str, tuple[int, ...]] = {"attn_norm": (hidden,), "ffn_norm": (hidden,)}
        sizes |= {"attn_q": (queries, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden)}
        sizes |= {"attn_output": (hidden, queries), "ffn_down": (hidden, inner)}
        sizes |= {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden)}
        if kind == "qwen3":
            sizes |= {"attn_q_norm": (head,), "attn_k_norm": (head,)}
        for name, size in sizes.items():
            yield f"blk.{layer}.{name}.weight", size
        if kind == "qwen2":
            for name in ("attn_q", "attn_k", "attn_v"):
                yield f"blk.{layer}.{name}.bias", sizes[name][:1]


def write_shape(file: str, type_name: str, shape: dict[str, Any]) -> None:
    """Write the file."""
    import gguf
    import numpy as np

    kind = gguf.GGMLQuantizationType[TYPES[type_name]]
    writer = gguf.GGUFWriter(file, shape["model_type"])
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    head = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    random = np.random.default_rng(0)
    for name, size in tensors(shape):
        if len(size) == 1:
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
