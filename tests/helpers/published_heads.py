"""Folders of draft heads with random weights, in the layouts of published ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from published_layouts import DRAFT_V, HEADS, INTERMEDIATE, LAYOUTS, H, Layout, V
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmspec.drafters.checkpoints.published import load_published
from mmspec.interfaces import TargetInfo


def write_head(folder: Path, layout: Layout, seed: int = 0, **changes: Any) -> Path:
    """The folder of a head; `changes` are made to its config."""
    rng = torch.Generator().manual_seed(seed)
    config = {**layout.config, **changes}
    layer = config.get("transformer_layer_config", config)
    is_block = layout.kind in ("block", "dflash2", "domino", "lilicorr")
    shapes = _block_shapes(layout, layer) if is_block else _shapes(layout, layer)
    if layout.kind == "lilicorr":
        shapes |= _lattice_shapes(config["dflash_config"], config["block_size"], layout.options["lattice"])
    weights = {name: _draw(name, shape, rng) for name, shape in shapes.items()}
    if layout.kind == "eagle3" or layout.options.get("map"):
        ids = torch.randperm(V - 10, generator=rng)[:DRAFT_V].sort().values + 7  # neither special nor media
        weights["d2t"] = ids - torch.arange(DRAFT_V)
        weights["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill_(0, ids, True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _block_shapes(layout: Layout, layer: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    size, num_kv, options = layer["head_dim"], layer["num_key_value_heads"], layout.options
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, 3 * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    for index in range(layer["num_hidden_layers"]):
        prefix = f"layers.{index}"
        for name, heads in (("q", HEADS), ("k", num_kv), ("v", num_kv)):
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (heads * size, H)
        shapes |= {f"{prefix}.self_attn.{name}_norm.weight": (size,) for name in "qk"}
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (H, HEADS * size)
        shapes |= {f"{prefix}.mlp.{name}_proj.weight": (INTERMEDIATE, H) for name in ("gate", "up")}
        shapes[f"{prefix}.mlp.down_proj.weight"] = (H, INTERMEDIATE)
        shapes |= {f"{prefix}.{norm}.weight": (H,) for norm in ("input_layernorm", "post_attention_layernorm")}
        if options.get("pairs") or options.get("convolution"):
            for name in ("attention_conv", "mlp_conv"):
                shapes[f"{prefix}.{name}.base_kernel"] = (2, 2, H)
                shapes[f"{prefix}.{name}.kernel_projection.weight"] = (4 * H // 8, H)
    if size := options.get("gru"):
        shapes |= {"prefix_gru.weight_ih_l0": (3 * size, H), "prefix_gru.weight_hh_l0": (3 * size, size)}
        shapes |= {"embed_proj.0.weight": (7, H + size), "embed_proj.2.weight": (V, 7)}
    if rank := options.get("pairs"):
        shapes |= {f"candidate_selector.{name}_codebook": (V, rank) for name in ("predecessor", "successor")}
        shapes["candidate_selector.hidden_projection.weight"] = (rank, H)
    if rows := options.get("lm_head"):
        shapes["lm_head.weight"] = (rows, H)
    if options.get("markov"):
        shapes |= {
            "markov_head.markov_w1.weight": (V, 6),
            "markov_head.markov_w2.weight": (options.get("lm_head", V), 6),
        }
        shapes |= {"confidence_head.proj.weight": (1, H + 6), "confidence_head.proj.bias": (1,)}
    return shapes


def _lattice_shapes(section: Mapping[str, Any], block_size: int, names: str) -> dict[str, tuple[int, ...]]:
    """Of LiLiCorr, whose layers are "numbered" or "named"."""
    size, factor, heads = (section[f"lilicorr_{key}"] for key in ("hidden_size", "factor_dim", "num_heads"))
    wide, names_of = int(size * section["lilicorr_mlp_ratio"]), ("0", "1", "3", "0", "2")
    norm, *linear = (f"feature_mlp.{one}" for one in names_of[:3])
    inner = names_of[3:]
    if names == "named":
        norm, linear, inner = "feature_norm", ["feature_mlp.up_proj", "feature_mlp.down_proj"], ("up_proj", "down_proj")
    sizes = {
        "pass_hidden_proj": (size, H), "context_proj": (size, H), linear[0]: (size, 5), linear[1]: (size, size),
        "factor_input_proj": (size, 3 * size), "out_head": (factor, size), "in_head": (factor, size),
        "anchor_out_head": (factor, size),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "slot_embedding": (1, 1, block_size - 1, 1, size), "same_slot_bias": (heads,), f"{norm}.weight": (5,),
        "rank_embedding": (1, 1, 1, section["lilicorr_candidate_topk"], size), f"{norm}.bias": (5,),
        "relative_slot_bias": (heads, 2 * block_size - 1), "output_norm.weight": (size,), "anchor_norm.weight": (size,),
    }  # fmt: skip
    sizes |= {"token_proj": (size, H)} if size != H else {}
    for index in range(section["lilicorr_num_layers"]):
        layer = f"layers.{index}"
        shapes |= {f"{layer}.{name}_norm.weight": (size,) for name in ("attn", "mlp")}
        shapes |= {f"{layer}.attn.in_proj_weight": (3 * size, size), f"{layer}.attn.in_proj_bias": (3 * size,)}
        sizes |= {f"{layer}.attn.out_proj": (size, size)}
        sizes |= {f"{layer}.mlp.{inner[0]}": (wide, size), f"{layer}.mlp.{inner[1]}": (size, wide)}
    for name, shape in sizes.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return {f"lilicorr.{name}": shape for name, shape in shapes.items()}


def _shapes(layout: Layout, layer: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    options, is_eagle3 = layout.options, layout.kind == "eagle3"
    size = layer.get("head_dim", H // HEADS)
    num_kv, width = layer.get("num_key_value_heads", HEADS), 2 * H if is_eagle3 else H
    prefix = options.get("layer", "midlayer" if is_eagle3 else "layers.0")
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, 3 * H if is_eagle3 else 2 * H)}
    if not is_eagle3 and options.get("bias", True):
        shapes["fc.bias"] = (H,)
    for name, heads in (("q", HEADS), ("k", num_kv), ("v", num_kv)):
        shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (heads * size, width)
        if options.get("qkv_bias"):
            shapes[f"{prefix}.self_attn.{name}_proj.bias"] = (heads * size,)
    shapes[f"{prefix}.self_attn.o_proj.weight"] = (H, HEADS * size)
    shapes |= {f"{prefix}.mlp.{name}_proj.weight": (INTERMEDIATE, H) for name in ("gate", "up")}
    shapes[f"{prefix}.mlp.down_proj.weight"] = (H, INTERMEDIATE)
    norms = ["post_attention_layernorm"]
    norms += ["input_layernorm"] if is_eagle3 or options.get("input_norm") else []
    norms += ["hidden_norm"] if is_eagle3 else []
    shapes |= {f"{prefix}.{norm}.weight": (H,) for norm in norms}
    for index in range(1, layer["num_hidden_layers"] if is_eagle3 else 1):  # ordinary layers over the first one
        first = {name: shape for name, shape in shapes.items() if name.startswith(prefix) and "hidden_norm" not in name}
        for name, shape in first.items():
            width = (H,) if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) else shape[1:]
            shapes[name.replace(prefix, f"layers.{index}")] = (shape[0], *width)
    if is_eagle3:
        shapes |= {"norm.weight": (H,), "lm_head.weight": (DRAFT_V, H)}
    if options.get("final_norm"):
        shapes["norm.weight"] = (H,)
    if layout.kind == "vispec":
        adaptor = options.get("adaptor", "imadpt")
        shapes |= {"img_fc.weight": (H, 2 * H), "img_fc.bias": (H,), f"{adaptor}.o_proj.weight": (H, H)}
        queries = "imadpt.q" if adaptor == "imadpt" else f"{adaptor}.query"
        shapes[queries] = (options.get("queries", 2), HEADS, H // HEADS)
        for name in "kv":
            shapes[f"{adaptor}.{name}_proj.weight"] = (H, H)
            if options.get("qkv_bias"):
                shapes[f"{adaptor}.{name}_proj.bias"] = (H,)
    return shapes


def _draw(name: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Weights large enough that every position and every input changes the draft."""
    noise = torch.randn(shape, generator=rng)
    if name.endswith("norm.weight"):
        return 1 + 0.3 * noise
    if name.endswith("bias"):
        return 0.3 * noise
    gain = 2.0 if "q_proj" in name or "k_proj" in name else 0.6
    return noise * gain / shape[-1] ** 0.5


__all__ = ["LAYOUTS", "Layout", "write_head"]


def check_changed(
    folder: Path,
    target: TargetInfo,
    message: str,
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, tuple[int, ...] | None] | None = None,
) -> None:
    """With other keys in its config, or tensors of other shapes (None: without), a head is refused in one line."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(config or {})))
    weights = load_file(folder / "model.safetensors")
    for name, shape in (tensors or {}).items():
        weights.pop(name, None)
        if shape is not None:
            weights[name] = torch.zeros(shape)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message) as error:
        load_published(folder, target)
    assert "\n" not in str(error.value)


def check_refused(folder: Path, layout: Layout, target: TargetInfo, changes: dict[str, Any], message: str) -> None:
    """`check_changed` with other keys in `dflash_config` (None: without); those with a dot are tensors."""
    tensors = {key: value for key, value in changes.items() if "." in key}
    section = layout.config["dflash_config"] | {key: changes[key] for key in changes.keys() - tensors}
    section = {key: value for key, value in section.items() if value is not None}
    check_changed(write_head(folder, layout), target, message, {"dflash_config": section}, tensors)
