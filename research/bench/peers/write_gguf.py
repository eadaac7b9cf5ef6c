"""Llama text weights of transformers to GGUF: `PYTHON write_gguf.py FOLDER FILE [F32|BF16|F16]`, the type of matrices.

Imports nothing of mmspec; needs numpy and gguf. Reads `config.json` and `model.safetensors` (float32). The file has no
vocabulary: peers exchange token ids. Layout of names and of the rotary halves: llama.cpp, convert_hf_to_gguf.py.
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


def gguf_name(name: str) -> str:
    """Name of a tensor in GGUF.

    Raises:
        ValueError: a tensor that Llama does not have.
    """
    stem, _, kind = name.rpartition(".")
    if stem in OTHER_NAMES and kind == "weight":
        return f"{OTHER_NAMES[stem]}.weight"
    parts = stem.split(".", 3)
    if kind == "weight" and parts[:2] == ["model", "layers"] and parts[3] in LAYER_NAMES:
        return f"blk.{parts[2]}.{LAYER_NAMES[parts[3]]}.weight"
    raise ValueError(f"Llama has no tensor {name}")


def write_gguf(folder: Path, file: Path, kind: str = "F32") -> None:
    """Convert a folder that `save_pretrained` has written; matrices to the type with this name."""
    import gguf
    import numpy as np

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama":
        raise ValueError(f"the export to GGUF knows Llama text models; this is {config['model_type']!r}")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    file_types = {"F32": "ALL_F32", "BF16": "MOSTLY_BF16", "F16": "MOSTLY_F16"}
    writer.add_file_type(gguf.LlamaFileType[file_types[kind]])
    matrix_type = gguf.GGMLQuantizationType[kind]
    writer.add_tokenizer_model("no_vocab")
    for name, weight in read_safetensors(folder / "model.safetensors").items():
        if name.endswith("q_proj.weight"):
            weight = interleave_rotary(weight, heads)
        if name.endswith("k_proj.weight"):
            weight = interleave_rotary(weight, kv_heads)
        weight = np.ascontiguousarray(weight)
        if weight.ndim == 1 or kind == "F32":
            writer.add_tensor(gguf_name(name), weight)
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(weight, matrix_type), raw_dtype=matrix_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Convert the folder that the command line names."""
    write_gguf(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])


if __name__ == "__main__":
    main()
