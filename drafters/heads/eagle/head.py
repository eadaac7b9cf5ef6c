"""The draft head: one decoder layer over [embedding of the next token ; hidden state of the target], as in EAGLE.

EAGLE-1/2 (arXiv 2401.15077, 2406.16858) and MSD (arXiv 2505.14260) are this network; they differ in their inputs
(`heads/base/visual_inputs.py`). Embeddings and LM head are the target's own modules, never copied. The module knows
nothing of trees, prompts or targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional

from mmspec.cpu.layers import LayerWeights
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
    """A Llama decoder layer with fused QKV and gate-up projections, since small products are bound by call overhead.

    Attributes:
        is_qwen3: whether it is Qwen3's: inputs, queries and keys are normalised, whatever the config says, and the
            output projection has biases where those of queries, keys and values have.
    """

    is_qwen3: ClassVar[bool] = False

    def __init__(self, config: Any, input_size: int = 0) -> None:
        """
        Args:
            config: of the head; but for Qwen3's layers an `EagleConfig`.
            input_size: numbers per position that the attention reads; 0 for the hidden size.
        """
        super().__init__()
        self.config = config
        hidden, self.head_dim = config.hidden_size, config.head_dim
        self.sizes = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        self.qkv_proj = nn.Linear(input_size or hidden, sum(self.sizes) * self.head_dim, bias=config.qkv_bias)
        output_bias = config.qkv_bias and self.is_qwen3
        self.o_proj = nn.Linear(self.sizes[0] * self.head_dim, hidden, bias=output_bias)
        self.has_mlp = config.intermediate_size > 0
        if self.has_mlp:
            self.gate_up_proj = nn.Linear(hidden, 2 * config.intermediate_size, bias=False)
            self.down_proj = nn.Linear(config.intermediate_size, hidden, bias=False)
            self.post_norm = RMSNorm(hidden, config.rms_norm_eps)
        has_input_norm, has_qk_norm = self.is_qwen3 or config.input_norm, self.is_qwen3 or config.qk_norm
        self.input_norm = RMSNorm(hidden, config.rms_norm_eps) if has_input_norm else None
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if has_qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if has_qk_norm else None

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
        residual = residual if query_index is None else gather_rows(residual, query_index)
        outputs = residual + self.attention(normed, cos, sin, attend, query_index)
        return outputs + self.mlp(self.post_norm(outputs)) if self.has_mlp else outputs

    def read_inputs(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """What the attention reads, and the [B, n, D] residual."""
        return inputs if self.input_norm is None else self.input_norm(inputs), inputs

    def attention(
        self, normed: Tensor, cos: Tensor, sin: Tensor, attend: AttentionFn, query_index: Tensor | None = None
    ) -> Tensor:
        """[B, n or m, D] attention of normalised inputs; arguments as of `forward`."""
        if query_index is None:
            queries, keys, values = self._split_heads(self.qkv_proj(normed)).split(self.sizes, dim=1)
            keys, values = self._rotate(keys, self.k_norm, cos, sin), self.normed_values(values)
        else:
            keys, values = self.context_keys_values(normed, cos, sin)
            size, weight, bias = self.sizes[0] * self.head_dim, self.qkv_proj.weight, self.qkv_proj.bias
            query_inputs = gather_rows(normed, query_index)
            projected = functional.linear(query_inputs, weight[:size], None if bias is None else bias[:size])
            queries = self._split_heads(projected)
            cos, sin = (
                gather_rows(part.expand(len(normed), -1, normed.shape[1], -1)[:, 0], query_index)[:, None]
                for part in (cos, sin)
            )
        queries = self._rotate(queries, self.q_norm, cos, sin)
        outputs: Tensor = self.o_proj(attend(queries, keys, values).transpose(1, 2).flatten(2))
        return outputs

    def context_keys_values(self, normed: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H', n, d] alone."""
        size, bias = self.sizes[0] * self.head_dim, self.qkv_proj.bias
        projected = functional.linear(normed, self.qkv_proj.weight[size:], None if bias is None else bias[size:])
        keys, values = self._split_heads(projected).chunk(2, dim=1)
        return self._rotate(keys, self.k_norm, cos, sin), self.normed_values(values)

    def normed_values(self, values: Tensor) -> Tensor:
        """[B, H', n, d] values as the attention reads them; here as they are."""
        return values

    def mlp(self, normed: Tensor) -> Tensor:
        """[B, n, D] of normalised inputs [B, n, D]."""
        gate, up = self.gate_up_proj(normed).chunk(2, dim=-1)
        outputs: Tensor = self.down_proj(functional.silu(gate) * up)
        return outputs

    def c_weights(self) -> LayerWeights:
        """Views of its weights."""
        sizes, bias = [number * self.head_dim for number in self.sizes], self.qkv_proj.bias
        parts: dict[str, Any] = dict(zip("qkv", self.qkv_proj.weight.split(sizes), strict=True))
        biases = (None, None, None) if bias is None else bias.split(sizes)
        parts |= {f"{name}_bias": part for name, part in zip("qkv", biases, strict=True)}
        gate, up = self.gate_up_proj.weight.chunk(2) if self.has_mlp else (None, None)
        return LayerWeights(
            input_norm=None if self.input_norm is None else self.input_norm.weight,
            q_norm=None if self.q_norm is None else self.q_norm.weight,
            k_norm=None if self.k_norm is None else self.k_norm.weight,
            o=self.o_proj.weight,
            o_bias=self.o_proj.bias,
            post_norm=self.post_norm.weight if self.has_mlp else None,
            gate=gate,
            up=up,
            down=self.down_proj.weight if self.has_mlp else None,
            **parts,
        )

    def _split_heads(self, projected: Tensor) -> Tensor:
        """[B, n, H * d] -> [B, H, n, d]."""
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    @staticmethod
    def _rotate(vectors: Tensor, norm: RMSNorm | None, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, H, n, d] queries or keys, normalised if there is a norm, at their positions."""
        vectors = vectors if norm is None else norm(vectors)
        return vectors * cos + rotate_half(vectors) * sin


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
