"""Shape of a draft head: what the configs of all methods share. A method's own settings are in its folder."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

MAX_BLOCK_SIZE = 16
"""Largest number of tokens per forward: longer drafts are never accepted, and path tables grow with it."""


@dataclass(frozen=True)
class HeadConfig:
    """Shape of a draft head.

    Attributes:
        hidden_size: D, the target's but for heads that say otherwise.
        intermediate_size: of the MLP; 0 for a layer without one.
        num_attention_heads: H.
        num_key_value_heads: H'.
        vocab_size: V, the target's.
        head_dim: d; 0 for `hidden_size // num_attention_heads`.
        rms_norm_eps: of every RMSNorm.
        rope_theta: base of the rotary embedding.
        qkv_bias: whether the attention projections have biases.
        block_size: tokens drafted per forward; 1 for heads that draft level by level.
        draft_vocab_size: V', rows of the head's own LM head; 0 for the target's LM head.
        hidden_state_layers: indices of the target's hidden states that the head reads, concatenated; empty for the
            default of the method.
        mrope_section: frequencies of the rotary embedding that follow each of the target's position axes (time, height,
            width), as in Qwen2-VL; empty for one axis, the number of the position.
        mrope_interleaved: whether the axes take turns (Qwen3-VL), instead of one range of frequencies each.
        rope_scaling: `rope_type` and settings of a scaled rotary embedding (`inverse_frequencies`), or None.
        rotary_dim: dimensions of each head that are rotated; 0 for all.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    head_dim: int = 0
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    qkv_bias: bool = False
    block_size: int = 1
    draft_vocab_size: int = 0
    hidden_state_layers: tuple[int, ...] = ()
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False
    rope_scaling: dict[str, Any] | None = None
    rotary_dim: int = 0

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

    @classmethod
    def of(cls, shape: HeadConfig, **values: Any) -> Self:
        """The config of this method with the shape of another one.

        Args:
            shape: whose settings are taken over, as far as this method has them.
            values: settings that differ, or that `shape` does not have.
        """
        shared = {field.name: getattr(shape, field.name) for field in fields(cls) if hasattr(shape, field.name)}
        return cls(**{**shared, **values})
