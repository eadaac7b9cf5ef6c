"""Text weights of transformers to GGUF: `PYTHON write_gguf.py FOLDER FILE [F32|BF16|F16]`, the type of matrices.

Of Llama, Qwen2 and Gemma 3. Imports nothing of mmspec; needs numpy and gguf. Reads `config.json` and
`model.safetensors` (float32). The file has no vocabulary: peers exchange token ids. Layout of names and of the rotary
halves: llama.cpp, convert_hf_to_gguf.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_NAMES = {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""What layers of Gemma 3 have besides, or by another name."""
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "gemma3_text": "gemma3"}
"""{`model_type`: its name in llama.cpp}"""
OTHER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def read_safetensors(file: Path) -> dict[str, Any]:
    """{name: float32 array} of a safetensors file."""
    import numpy as np

    data = np.memmap(file, dtype=np.uint8, mode="r")
    size = int(data[:8].view("<u8")[0])
    header = json.loads(bytes(data[8 : 8 + size]))
    header.pop("__metadata__", None)
    arrays = {}
    for name, about in header.items():
        if about["dtype"] != "F32":
            raise ValueError(f"weights must be float32; {name} is {about['dtype']}")
        start, end = (8 + size + offset for offset in about["data_offsets"])
        arrays[name] = np.array(data[start:end]).view("<f4").reshape(about["shape"])
    return arrays


def interleave_rotary(weight: Any, num_heads: int) -> Any:
    """[H * D, K] with the two rotary halves of each head one after the other, to pairs."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[-1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name: str, architecture: str = "llama") -> str:
    """Name of a tensor in GGUF.

    Raises:
        ValueError: a tensor that the architecture does not have.
    """
    stem, _, kind = name.rpartition(".")
    if stem in OTHER_NAMES and kind == "weight":
        return f"{OTHER_NAMES[stem]}.weight"
    parts, names = stem.split(".", 3), LAYER_NAMES | (GEMMA_NAMES if architecture == "gemma3" else {})
    has_bias = architecture == "qwen2" and parts[-1] in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    if parts[:2] == ["model", "layers"] and parts[3] in names and (kind == "weight" or (kind == "bias" and has_bias)):
        return f"blk.{parts[2]}.{names[parts[3]]}.{kind}"
    raise ValueError(f"{architecture} has no tensor {name}")


def write_gguf(folder: Path, file: Path, kind: str = "F32") -> None:
    """Convert a folder that `save_pretrained` has written; matrices to the type with this name."""
    import gguf
    import numpy as np

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architecture = ARCHITECTURES.get(config["model_type"])
    if architecture is None:
        raise ValueError(f"the export to GGUF knows {', '.join(ARCHITECTURES)}; this is {config['model_type']!r}")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope, head = config["rope_parameters"], config.get("head_dim") or config["hidden_size"] // heads
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_rope_dimension_count(head)
    writer.add_key_length(head)
    writer.add_value_length(head)
    if config.get("sliding_window") and architecture == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
    writer.add_vocab_size(config["vocab_size"])
    file_types = {"F32": "ALL_F32", "BF16": "MOSTLY_BF16", "F16": "MOSTLY_F16"}
    writer.add_file_type(gguf.LlamaFileType[file_types[kind]])
    matrix_type = gguf.GGMLQuantizationType[kind]
    writer.add_tokenizer_model("no_vocab")
    for name, weight in read_safetensors(folder / "model.safetensors").items():
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = interleave_rotary(weight, heads if name.endswith("q_proj.weight") else kv_heads)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            weight = weight + 1
        weight, name = np.ascontiguousarray(weight), gguf_name(name, architecture)
        if weight.ndim == 1 or kind == "F32":
            writer.add_tensor(name, weight)
        else:
            writer.add_tensor(name, gguf.quants.quantize(weight, matrix_type), raw_dtype=matrix_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Convert the folder that the command line names."""
    write_gguf(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])


if __name__ == "__main__":
    main()
