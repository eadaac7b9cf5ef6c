"""The draft head: one decoder layer over [embedding of the next token ; hidden state of the target], as in EAGLE.

EAGLE-1/2 (arXiv 2401.15077, 2406.16858) and MSD (arXiv 2505.14260) are this network; they differ in their inputs
(`heads/base/visual_inputs.py`). Embeddings and LM head are the target's own modules, never copied. The module knows
nothing of trees, prompts or targets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.drafters.heads.base.positions import mrope_axes
from mmspec.drafters.heads.base.rope import inverse_frequencies
from mmspec.engine.gather import gather_rows
from mmspec.interfaces import SharedEmbeddings

MAX_BLOCK_SIZE = 16
"""Largest number of tokens per forward: longer drafts are never accepted, and path tables grow with it."""
AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""([B, H, m, d] queries, [B, H', n, d] keys, [B, H', n, d] values at the new positions) -> [B, H, m, d] output."""


@dataclass(frozen=True)
class HeadConfig:
    """Shape of a draft head.

    Attributes:
        hidden_size: D, the target's but for `target_hidden_size`.
        intermediate_size: of the MLP; 0 for a layer without one.
        num_attention_heads: H.
        num_key_value_heads: H'.
        vocab_size: V, the target's.
        head_dim: d; 0 for `hidden_size // num_attention_heads`.
        rms_norm_eps: of every RMSNorm.
        rope_theta: base of the rotary embedding.
        bias: whether `fc` has a bias.
        qkv_bias: whether the attention projections have biases.
        input_norm: whether the layer normalises its input (EAGLE's does not).
        eagle3_input: whether the layer reads embedding and hidden state concatenated, each normalised (EAGLE-3).
        norm_before_residual: with `eagle3_input`, whether the residual is the normalised hidden state.
        block_size: tokens drafted per forward; 1 for EAGLE.
        block_ffn_size: intermediate size of the block's feed-forward (FLASH) or token correction (parallel); 0: none.
        markov_rank: rank of the correction by the token before (`MarkovHead`); 0: none.
        draft_vocab_size: V', rows of the head's own LM head (EAGLE-3); 0 for the target's LM head.
        hidden_state_layers: indices of the target's hidden states that the head reads, concatenated; empty for the
            default of the architecture.
        num_hidden_layers: decoder layers of the head; EAGLE's has one, DSpark's one to four.
        layer_mixture: whether the hidden states are added with learned weights before `fc`, not concatenated (DSpark).
        confidence_head: whether the head estimates the acceptance of each position (DSpark).
        sample_from_anchor: whether the first position of a block predicts a token too; if not, a block has one position
            more than `block_size` (DFlash).
        qk_norm: whether queries and keys are normalised per head, as in Qwen3.
        norm_before_fc: whether the hidden states are normalised before `fc`, all as one vector (EAGLE-3).
        fc_norm: whether each of them is (EAGLE-3.1).
        norm_output: whether the state that is carried on is the layer's output after the norm (EAGLE-3.1).
        target_hidden_size: size of the hidden states that EAGLE-3's `fc` reads, if it is not D; 0 if it is.
        mrope_section: frequencies of the rotary embedding that follow each of the target's position axes (time, height,
            width), as in Qwen2-VL; empty for one axis, the number of the position.
        mrope_interleaved: whether the axes take turns (Qwen3-VL), instead of one range of frequencies each.
        rope_scaling: `rope_type` and settings of a scaled rotary embedding (`inverse_frequencies`), or None.
        rotary_dim: dimensions of each head that are rotated; 0 for all.
        sliding_windows: positions that each layer of a DFlash head sees, its own included; 0 for all; empty for no
            windows.
        causal_layers: whether the positions of a block see no later ones, in each layer of a DFlash head; empty: no.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    head_dim: int = 0
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    bias: bool = True
    qkv_bias: bool = False
    input_norm: bool = False
    eagle3_input: bool = False
    norm_before_residual: bool = False
    block_size: int = 1
    block_ffn_size: int = 0
    markov_rank: int = 0
    draft_vocab_size: int = 0
    hidden_state_layers: tuple[int, ...] = ()
    num_hidden_layers: int = 1
    layer_mixture: bool = False
    confidence_head: bool = False
    sample_from_anchor: bool = True
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False
    rope_scaling: dict[str, Any] | None = None
    rotary_dim: int = 0
    qk_norm: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    target_hidden_size: int = 0
    sliding_windows: tuple[int, ...] = ()
    causal_layers: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= MAX_BLOCK_SIZE:
            raise ValueError(f"block_size must be 1 to {MAX_BLOCK_SIZE} tokens per forward; got {self.block_size}.")
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads; got {self.num_attention_heads} and "
                f"{self.num_key_value_heads}."
            )
        section, num_frequencies = self.mrope_section, (self.rotary_dim or self.head_dim) // 2
        if section and (len(section) != 3 or min(section) < 1 or sum(section) != num_frequencies):
            raise ValueError(
                f"mrope_section must be three sizes of at least 1, in sum {num_frequencies}, half of the rotated "
                f"dimensions; got {list(section)}."
            )


class RMSNorm(nn.RMSNorm):
    """RMSNorm that casts its weight to the input's dtype, which under autocast may differ."""

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        assert self.weight is not None
        return functional.rms_norm(inputs, self.normalized_shape, self.weight.to(inputs.dtype), self.eps)


class DecoderLayer(nn.Module):
    """A Llama decoder layer with fused QKV and gate-up projections, since small products are bound by call overhead."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        hidden, size = config.hidden_size, config.head_dim
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        input_size = 2 * hidden if config.eagle3_input else hidden
        self.qkv_proj = nn.Linear(input_size, (self.num_heads + 2 * self.num_kv_heads) * size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(self.num_heads * size, hidden, bias=False)
        self.has_mlp = config.intermediate_size > 0
        if self.has_mlp:
            self.gate_up_proj = nn.Linear(hidden, 2 * config.intermediate_size, bias=False)
            self.down_proj = nn.Linear(config.intermediate_size, hidden, bias=False)
            self.post_norm = RMSNorm(hidden, config.rms_norm_eps)
        has_input_norm = config.input_norm or config.eagle3_input
        self.input_norm = RMSNorm(hidden, config.rms_norm_eps) if has_input_norm else None
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps) if config.eagle3_input else None
        self.q_norm = RMSNorm(size, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(size, config.rms_norm_eps) if config.qk_norm else None

    def forward(
        self, inputs: Tensor, cos: Tensor, sin: Tensor, attend: AttentionFn, query_index: Tensor | None = None
    ) -> Tensor:
        """Run the layer.

        Args:
            inputs: [B, n, D], or [B, n, 2 D] with `eagle3_input`.
            cos: [B or 1, 1, n or 1, d] rotary embedding of the inputs' positions.
            sin: as `cos`.
            attend: attention over the cache and the new keys and values.
            query_index: [B, m] int64, the positions whose output is needed; None for all. The others contribute keys
                and values only, about a third of the work.

        Returns:
            [B, n or m, D] outputs.
        """
        if self.hidden_norm is None:
            residual = inputs
            normed = inputs if self.input_norm is None else self.input_norm(inputs)
        else:
            assert self.input_norm is not None
            embeds, residual = inputs.chunk(2, dim=-1)
            normed_state = self.hidden_norm(residual)
            normed = torch.cat((self.input_norm(embeds), normed_state), dim=-1)
            residual = normed_state if self.config.norm_before_residual else residual
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


def rotate_half(vectors: Tensor) -> Tensor:
    """[..., d] (a, b) -> (-b, a), as in transformers' rotary embedding."""
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class EagleHead(nn.Module):
    """`fc` and one decoder layer. Its output approximates the target's normalised hidden state at the next position."""

    compresses_visual_tokens = False
    """Whether the head reduces visual tokens itself, so that no compressor can be combined with it."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)
        self.layer = DecoderLayer(config)

    def hidden_state_indices(self, num_layers: int) -> tuple[int, ...]:
        """Hidden states it reads of a target of that many layers (`DrafterRequirements.hidden_state_indices`)."""
        return (num_layers,)

    def draft_lm_head(self, shared_embeddings: SharedEmbeddings, draft_ids: Tensor) -> Tensor | None:
        """[V', D] weights of the LM head for these ids, as `logits` takes them."""
        return shared_embeddings.lm_head_rows(draft_ids)

    def logits(
        self, hidden_states: Tensor, shared_embeddings: SharedEmbeddings, draft_lm_head: Tensor | None
    ) -> Tensor:
        """[..., V'] logits of the next token.

        Args:
            hidden_states: [..., D] outputs of the head.
            shared_embeddings: of the target.
            draft_lm_head: [V', D] weights of the LM head to use; None for all.
        """
        return shared_embeddings.logits(hidden_states, draft_lm_head)

    def fuse(self, inputs_embeds: Tensor, hidden_states: Tensor) -> Tensor:
        """[..., D] layer inputs of text: `fc` of [embedding of the next token ; hidden state before it]."""
        fused: Tensor = self.fc(torch.cat((inputs_embeds, hidden_states), dim=-1))
        return fused

    def forward(
        self, inputs: Tensor, cos: Tensor, sin: Tensor, attend: AttentionFn, query_index: Tensor | None = None
    ) -> Tensor:
        outputs: Tensor = self.layer(inputs, cos, sin, attend, query_index)
        return outputs

    def rotary_embedding(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [..., d], of position ids [...] as in Llama."""
        return self._rotate(position_ids[..., None], dtype)

    def multi_axis_rotary_embedding(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [..., d], of position ids [3, ...] on three axes (M-RoPE, arXiv 2409.12191).

        Where the axes agree, as in text, this is `rotary_embedding` of one of them.
        """
        config = self.config
        axes = mrope_axes(config.mrope_section, config.mrope_interleaved, config.head_dim // 2, position_ids.device)
        return self._rotate(position_ids[axes].movedim(0, -1), dtype)

    def _rotate(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [..., d], of the positions of all frequencies [..., d / 2], or of one [..., 1] for all."""
        config, size = self.config, self.config.head_dim
        frequencies, factor = inverse_frequencies(
            size, config.rotary_dim or size, config.rope_theta, config.rope_scaling, position_ids.device
        )
        angles = position_ids.float() * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return (factor * angles.cos()).to(dtype), (factor * angles.sin()).to(dtype)
