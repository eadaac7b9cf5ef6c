"""The draft head: one decoder layer over [embedding of the next token ; hidden state of the target], as in EAGLE.

EAGLE-1/2 (arXiv 2401.15077, 2406.16858) and MSD (arXiv 2505.14260) are this network; they differ in their inputs
(`heads/base/visual_inputs.py`). Embeddings and LM head are the target's own modules, never copied. The module knows
nothing of trees, prompts or targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.drafters.heads.base.config import HeadConfig
from mmspec.drafters.heads.base.head import AttentionFn, DraftHead, RMSNorm, rotate_half
from mmspec.engine.gather import gather_rows


@dataclass(frozen=True)
class EagleConfig(HeadConfig):
    """Shape of an `EagleHead`.

    Attributes:
        bias: whether `fc` of EAGLE-1/2 and MSD has one; that of EAGLE-3 has none.
        input_norm: whether the layer normalises its input (EAGLE's does not).
        qk_norm: whether queries and keys are normalised per head, as in Qwen3.
        final_norm: whether the layer's output is normalised (NeMo Automodel).
    """

    bias: bool = True
    input_norm: bool = False
    qk_norm: bool = False
    final_norm: bool = False


class DecoderLayer(nn.Module):
    """A Llama decoder layer with fused QKV and gate-up projections, since small products are bound by call overhead."""

    def __init__(self, config: EagleConfig, input_size: int = 0) -> None:
        """
        Args:
            config: of the head.
            input_size: numbers per position that the attention reads; 0 for the hidden size.
        """
        super().__init__()
        self.config = config
        hidden, size = config.hidden_size, config.head_dim
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        num_outputs = (self.num_heads + 2 * self.num_kv_heads) * size
        self.qkv_proj = nn.Linear(input_size or hidden, num_outputs, bias=config.qkv_bias)
        self.o_proj = nn.Linear(self.num_heads * size, hidden, bias=False)
        self.has_mlp = config.intermediate_size > 0
        if self.has_mlp:
            self.gate_up_proj = nn.Linear(hidden, 2 * config.intermediate_size, bias=False)
            self.down_proj = nn.Linear(config.intermediate_size, hidden, bias=False)
            self.post_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.input_norm = RMSNorm(hidden, config.rms_norm_eps) if config.input_norm else None
        self.q_norm = RMSNorm(size, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(size, config.rms_norm_eps) if config.qk_norm else None

    def forward(
        self, inputs: Tensor, cos: Tensor, sin: Tensor, attend: AttentionFn, query_index: Tensor | None = None
    ) -> Tensor:
        """Run the layer.

        Args:
            inputs: [B, n, D], or what `read_inputs` takes.
            cos: [B or 1, 1, n or 1, d] rotary embedding of the inputs' positions.
            sin: as `cos`.
            attend: attention over the cache and the new keys and values.
            query_index: [B, m] int64, the positions whose output is needed; None for all. The others contribute keys
                and values only, about a third of the work.

        Returns:
            [B, n or m, D] outputs.
        """
        normed, residual = self.read_inputs(inputs)
        if query_index is None:
            qkv = self._split_heads(self.qkv_proj(normed))
            rotated, values = qkv.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
            if self.q_norm is not None and self.k_norm is not None:
                queries, keys = rotated.split((self.num_heads, self.num_kv_heads), dim=1)
                rotated = torch.cat((self.q_norm(queries), self.k_norm(keys)), dim=1)
            rotated = rotated * cos + rotate_half(rotated) * sin
            queries, keys = rotated.split((self.num_heads, self.num_kv_heads), dim=1)
        else:
            residual = gather_rows(residual, query_index)
            queries, keys, values = self._project_queries(normed, cos, sin, query_index)
        outputs = residual + self.o_proj(attend(queries, keys, values).transpose(1, 2).flatten(2))
        if not self.has_mlp:
            return outputs
        gate, up = self.gate_up_proj(self.post_norm(outputs)).chunk(2, dim=-1)
        mlp_outputs: Tensor = self.down_proj(functional.silu(gate) * up)
        return outputs + mlp_outputs

    def read_inputs(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """What the attention reads, and the [B, n, D] residual."""
        return inputs if self.input_norm is None else self.input_norm(inputs), inputs

    def _split_heads(self, projected: Tensor) -> Tensor:
        """[B, n, H * d] -> [B, H, n, d]."""
        return projected.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def _project_queries(
        self, normed: Tensor, cos: Tensor, sin: Tensor, query_index: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries at the positions in `query_index`, keys and values at all positions."""
        size, weight, bias = self.num_heads * self.config.head_dim, self.qkv_proj.weight, self.qkv_proj.bias
        query_inputs = gather_rows(normed, query_index)
        queries = functional.linear(query_inputs, weight[:size], None if bias is None else bias[:size])
        keys_values = functional.linear(normed, weight[size:], None if bias is None else bias[size:])
        keys, values = self._split_heads(keys_values).chunk(2, dim=1)
        query_cos, query_sin = (
            gather_rows(part.expand(len(normed), -1, normed.shape[1], -1)[:, 0], query_index)[:, None]
            for part in (cos, sin)
        )
        queries = self._split_heads(queries)
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries = queries * query_cos + rotate_half(queries) * query_sin
        return queries, keys * cos + rotate_half(keys) * sin, values


class EagleHead(DraftHead):
    """`fc` and one decoder layer. Its output approximates the target's normalised hidden state at the next position."""

    config: EagleConfig
    stored_names: ClassVar[Mapping[str, str]] = {"final_norm": "norm"}

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)
        self.layer = DecoderLayer(config)
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if config.final_norm else None

    def forward(
        self, inputs: Tensor, cos: Tensor, sin: Tensor, attend: AttentionFn, query_index: Tensor | None = None
    ) -> Tensor:
        outputs: Tensor = self.layer(inputs, cos, sin, attend, query_index)
        return outputs if self.final_norm is None else self.final_norm(outputs)
