"""What all slow readers of published heads share: files, and formulas, one position and one head at a time.

Written from the published layouts, to be compared with ours logit for logit. Shares no code with the package.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

Cache = list[tuple[Tensor, Tensor]]
"""(keys, values) [H', d] of each position."""


def rms_norm(vector: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[d]"""
    return vector / (vector.pow(2).mean() + eps).sqrt() * weight


def rotate(heads: Tensor, position: int | Sequence[int], theta: float, interleaved: bool = False) -> Tensor:
    """[H, d] the first half of each vector is the real part, the second the imaginary one.

    Args:
        heads: [H, d].
        position: one for all frequencies, or the position of each of them.
        theta: base.
        interleaved: neighbouring dimensions are the two parts instead.
    """
    half = heads.shape[-1] // 2
    angles = torch.tensor(position) / theta ** (torch.arange(half, dtype=torch.float64) / half)
    real, imaginary = (heads[:, 0::2], heads[:, 1::2]) if interleaved else heads.chunk(2, dim=1)
    turned = torch.complex(real.double(), imaginary.double()) * torch.polar(torch.ones_like(angles), angles)
    parts = torch.view_as_real(turned)
    return (parts if interleaved else parts.mT).flatten(-2).float()


def attend(queries: Tensor, cache: Cache) -> Tensor:
    """[H * d] attention of [H, d] queries to all of a cache."""
    keys, values = (torch.stack(parts) for parts in zip(*cache, strict=True))
    groups, outputs = len(queries) // keys.shape[1], []
    for head, query in enumerate(queries):
        scores = keys[:, head // groups] @ query / math.sqrt(len(query))
        outputs.append(scores.softmax(0) @ values[:, head // groups])
    return torch.cat(outputs)


class SlowReader:
    """A folder with config.json and model.safetensors.

    Attributes:
        config: of the file.
        layer_config: sizes of the decoder layer.
        weights: by name, `midlayer` as `layers.0`.
    """

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.layer_config: dict[str, Any] = self.config.get("transformer_layer_config", self.config)
        weights = load_file(folder / "model.safetensors")
        others = {"midlayer.": "layers.0.", "img_adaptor.query": "imadpt.q", "img_adaptor.": "imadpt."}
        for other, name in others.items():
            weights = {key.replace(other, name): value.float() for key, value in weights.items()}
        self.weights = weights
        self.eps = self.layer_config["rms_norm_eps"]
        sizes = self.layer_config["hidden_size"], self.layer_config["num_attention_heads"]
        self.head_dim = self.layer_config.get("head_dim") or sizes[0] // sizes[1]
        parameters = self.layer_config.get("rope_parameters") or {}
        self.theta = float(self.layer_config.get("rope_theta") or parameters.get("rope_theta") or 10000.0)

    def linear(self, name: str, vector: Tensor) -> Tensor:
        """A projection, with its bias if it has one."""
        outputs = self.weights[f"{name}.weight"] @ vector
        bias = self.weights.get(f"{name}.bias")
        return outputs if bias is None else outputs + bias

    def norm(self, name: str, vector: Tensor) -> Tensor:
        return rms_norm(vector, self.weights[f"{name}.weight"], self.eps)

    def heads(self, layer: str, part: str, vector: Tensor) -> Tensor:
        """[H, d] queries, keys or values (`part` q, k, v) of a layer, each normed if the head has norms for them."""
        heads = self.linear(f"{layer}.self_attn.{part}_proj", vector).view(-1, self.head_dim)
        norm = f"{layer}.self_attn.{part}_norm"
        return torch.stack([self.norm(norm, head) for head in heads]) if f"{norm}.weight" in self.weights else heads

    def feed_forward(self, layer: str, state: Tensor) -> Tensor:
        normed = self.norm(f"{layer}.post_attention_layernorm", state)
        gate = functional.silu(self.linear(f"{layer}.mlp.gate_proj", normed))
        return state + self.linear(f"{layer}.mlp.down_proj", gate * self.linear(f"{layer}.mlp.up_proj", normed))
