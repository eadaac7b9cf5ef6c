"""A DSpark head with layers of Gemma 4: four norms, normalised values, attention without a scale, capped logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.drafters.heads.base.head import AttentionFn, RMSNorm
from mmspec.drafters.heads.dspark.drafter import DsparkDrafter
from mmspec.drafters.heads.dspark.head import DsparkConfig, DsparkHead, DsparkLayer
from mmspec.interfaces import SharedEmbeddings


@dataclass(frozen=True)
class Gemma4Config(DsparkConfig):
    """Shape of a `Gemma4Head`.

    Attributes:
        final_logit_softcapping: c of `c * tanh(logits / c)` of its own LM head; 0 for none.
    """

    final_logit_softcapping: float = 0.0


class Gemma4Layer(DsparkLayer):
    """A decoder layer of Gemma 4. The factor that replaces the scale of the attention is in the weight of `q_norm`."""

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__(config)
        self.eps = config.rms_norm_eps
        self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layer_scalar = nn.Parameter(torch.ones(1))

    def forward(
        self, inputs: Tensor, cos: Tensor, sin: Tensor, attend: AttentionFn, query_index: Tensor | None = None
    ) -> Tensor:
        inputs = inputs + self.post_norm(self.attention(self.input_norm(inputs), cos, sin, attend))
        outputs = inputs + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(inputs)))
        return outputs * self.layer_scalar.to(outputs.dtype)

    def normed_values(self, values: Tensor) -> Tensor:
        return functional.rms_norm(values, values.shape[-1:], eps=self.eps)

    def mlp(self, normed: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(normed).chunk(2, dim=-1)
        outputs: Tensor = self.down_proj(functional.gelu(gate, approximate="tanh") * up)
        return outputs


class Gemma4Head(DsparkHead):
    """DSpark with layers of Gemma 4."""

    config: Gemma4Config
    layer_class: ClassVar[Callable[[Any], DsparkLayer]] = Gemma4Layer

    def output_scaling(self, shared_embeddings: SharedEmbeddings) -> SharedEmbeddings:
        """See `DsparkHead`; logits of its own LM head are capped."""
        scaling, cap = super().output_scaling(shared_embeddings), self.config.final_logit_softcapping
        return scaling if self.lm_head is None or not cap else replace(scaling, logit_softcap=cap)


class Gemma4DsparkDrafter(DsparkDrafter):
    """Drafts as `DsparkDrafter` does."""

    records_drafts = True
