"""What the networks of all draft heads share: embeddings, LM head and rotary positions, those of the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.drafters.heads.base.config import HeadConfig
from mmspec.drafters.heads.base.positions import mrope_axes
from mmspec.drafters.heads.base.rope import inverse_frequencies
from mmspec.interfaces import SharedEmbeddings

if TYPE_CHECKING:
    from mmspec.drafters.heads.base.visual_inputs import DraftInputs

AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""([B, H, m, d] queries, [B, H', n, d] keys, [B, H', n, d] values at the new positions) -> [B, H, m, d] output."""


class RMSNorm(nn.RMSNorm):
    """RMSNorm that casts its weight to the input's dtype, which under autocast may differ."""

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        assert self.weight is not None
        return functional.rms_norm(inputs, self.normalized_shape, self.weight.to(inputs.dtype), self.eps)


def rotate_half(vectors: Tensor) -> Tensor:
    """[..., d] (a, b) -> (-b, a), as in transformers' rotary embedding."""
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class DraftHead(nn.Module):
    """Base of the networks. What its drafter runs is `forward`, or a method of another name.

    Attributes:
        config: its shape.
        fc: its first projection.
        compresses_visual_tokens: whether the head reduces visual tokens itself, so that no compressor can be combined
            with it.
        stored_names: {module here: its name in published checkpoints}, where these differ.
        visual_modes: that it can be trained in, that of its family first; empty for all.
    """

    config: HeadConfig
    fc: nn.Linear
    compresses_visual_tokens: ClassVar[bool] = False
    stored_names: ClassVar[Mapping[str, str]] = {}
    visual_modes: tuple[str, ...] = ()

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config

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

    def prepare(self, inputs: DraftInputs) -> DraftInputs:
        """What the head reads of a prompt, before its visual mode. Default: all of it."""
        return inputs

    def stored_tensors(self) -> dict[str, Tensor] | None:
        """Its weights under their names on disk; None for those of `mmspec.drafters.checkpoints.state_dict`."""
        return None

    def fuse(self, inputs_embeds: Tensor, hidden_states: Tensor) -> Tensor:
        """[..., D] layer inputs of text: `fc` of [embedding of the next token ; hidden state before it]."""
        fused: Tensor = self.fc(torch.cat((inputs_embeds, hidden_states), dim=-1))
        return fused

    def carried(self, outputs: Tensor) -> Tensor:
        """[..., S] what is read of the head's outputs [..., D] in place of hidden states, at draft tokens."""
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
