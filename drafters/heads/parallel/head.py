"""The network of ParallelSpec (arXiv 2410.05589): EAGLE's with learned mask embeddings and a token correction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.drafters.heads.base.head import RMSNorm
from mmspec.drafters.heads.eagle.head import EagleConfig, EagleHead


@dataclass(frozen=True)
class ParallelConfig(EagleConfig):
    """Shape of a `ParallelHead`.

    Attributes:
        block_ffn_size: intermediate size of the `TokenCorrection`; 0: none.
    """

    block_ffn_size: int = 0


class TokenCorrection(nn.Module):
    """Residual correction of a position's feature by the token before it; zero at initialisation."""

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gate_up_proj = nn.Linear(2 * config.hidden_size, 2 * config.block_ffn_size, bias=False)
        self.down_proj = nn.Linear(config.block_ffn_size, config.hidden_size, bias=False)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, features: Tensor, inputs_embeds: Tensor) -> Tensor:
        """[..., D] features and [..., D] embeddings of the tokens before them -> [..., D] corrected features."""
        gate, up = self.gate_up_proj(torch.cat((self.norm(features), inputs_embeds), dim=-1)).chunk(2, dim=-1)
        correction: Tensor = self.down_proj(functional.silu(gate) * up)
        return features + correction


class ParallelHead(EagleHead):
    """EAGLE's head, k - 1 mask embeddings, and the `TokenCorrection` if `block_ffn_size` is not 0."""

    config: ParallelConfig

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__(config)
        self.mask_embeddings = nn.Parameter(0.02 * torch.randn(config.block_size - 1, config.hidden_size))
        self.token_correction = TokenCorrection(config) if config.block_ffn_size else None
