"""Checkpoints with quantised weights of the decoder, written by hand: GPTQ, AWQ, compressed-tensors.

No quantisation package is needed to write them, only to load them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

GROUP = 32
"""Input features that share a scale."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Order of the eight values in an int32 of AWQ."""
UNQUANTISED = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
Packer = Callable[[Tensor], dict[str, Tensor]]


def _pack(values: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """[R, C] values of four bits -> [R, C / 8] int32."""
    packed = torch.zeros(values.shape[0], values.shape[1] // 8, dtype=torch.int64)
    for shift, offset in enumerate(order):
        packed |= (values[:, offset::8].long() & 15) << (4 * shift)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def _asymmetric(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[in, out] values from 0 to 15, [groups, out] scales and zero points of a weight [out, in]."""
    groups = weight.t().unflatten(0, (-1, GROUP))
    low, high = groups.amin(1), groups.amax(1)
    scale = ((high - low) / 15).clamp(min=1e-6)
    zero = (-low / scale).round().clamp(0, 15)
    values = ((groups / scale[:, None]).round() + zero[:, None]).clamp(0, 15)
    return values.flatten(0, 1), scale.half(), zero


def gptq(weight: Tensor) -> dict[str, Tensor]:
    """Tensors of GPTQ for a weight [out, in]; zero points are stored less one."""
    values, scale, zero = _asymmetric(weight)
    groups = (torch.arange(weight.shape[1]) // GROUP).int()
    return {"qweight": _pack(values.t()).t(), "qzeros": _pack(zero - 1), "scales": scale, "g_idx": groups}


def awq(weight: Tensor) -> dict[str, Tensor]:
    """Tensors of AWQ for a weight [out, in]."""
    values, scale, zero = _asymmetric(weight)
    return {"qweight": _pack(values, AWQ_ORDER), "qzeros": _pack(zero, AWQ_ORDER), "scales": scale}


def int4_groups(weight: Tensor) -> dict[str, Tensor]:
    """Tensors of compressed-tensors `pack-quantized` for a weight [out, in]."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(-1) / 7
    values = (groups / scale[..., None]).round().clamp(-8, 7).flatten(1) + 8
    return {
        "weight_packed": _pack(values),
        "weight_scale": scale.bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }


def int8_channels(weight: Tensor) -> dict[str, Tensor]:
    """Tensors of compressed-tensors `int-quantized` for a weight [out, in]."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale.bfloat16()}


def compressed_config(form: str, **schemes: dict[str, Any]) -> dict[str, Any]:
    """`quantization_config` of compressed-tensors for the decoder's linear layers."""
    common = {"type": "int", "symmetric": True}
    group = {"targets": ["Linear"], **{name: common | scheme for name, scheme in schemes.items()}}
    ignored = ["lm_head", "re:.*vision_tower.*", "re:.*multi_modal_projector.*"]
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group": group},
        "ignore": ignored,
    }


WEIGHTS_4 = {"num_bits": 4, "strategy": "group", "group_size": GROUP}
WEIGHTS_8 = {"num_bits": 8, "strategy": "channel"}
ACTIVATIONS_8 = {"num_bits": 8, "strategy": "token", "dynamic": True}
FORMATS: dict[str, tuple[Packer, dict[str, Any]]] = {
    "gptq": (
        gptq,
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "desc_act": False,
            "sym": False,
            "checkpoint_format": "gptq",
            "block_name_to_quantize": "model.language_model.layers",
        },
    ),
    "awq": (
        awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": UNQUANTISED,
        },
    ),
    "w4a16": (int4_groups, compressed_config("pack-quantized", weights=WEIGHTS_4)),
    "w8a8": (int8_channels, compressed_config("int-quantized", weights=WEIGHTS_8, input_activations=ACTIVATIONS_8)),
}
"""{name: how a weight is packed, and the `quantization_config`}."""


def save_quantised(model: PreTrainedModel, folder: Path, name: str) -> None:
    """Write `model` with the decoder's linear layers packed in one of `FORMATS`."""
    packer, config = FORMATS[name]
    model.save_pretrained(folder)
    tensors: dict[str, Tensor] = {}
    for key, value in load_file(folder / "model.safetensors").items():
        if "language_model" in key and key.endswith("proj.weight"):
            packed = packer(value.float())
            tensors |= {key.removesuffix("weight") + part: one.contiguous() for part, one in packed.items()}
        else:
            tensors[key] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
