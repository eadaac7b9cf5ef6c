"""FLASH (arXiv 2505.12728), a drafter of k tokens from one forward. It is not FlashAttention and does not use it.

One attention layer over the context, then a feed-forward whose output is k features, one per position; the positions
are predicted independently. Differences from the paper: the features are added to the attention output behind a norm,
and attention is standard causal attention. A `MarkovHead`, which the paper does not have, can make a position's logits
depend on the token before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from mmspec.drafters.heads.base.head import RMSNorm
from mmspec.drafters.heads.base.markov import MarkovHead
from mmspec.drafters.heads.eagle.head import EagleConfig, EagleHead


@dataclass(frozen=True)
class FlashConfig(EagleConfig):
    """Shape of a `FlashHead`.

    Attributes:
        block_ffn_size: intermediate size of the block's feed-forward.
        markov_rank: rank of the correction by the token before (`MarkovHead`); 0: none.
    """

    block_ffn_size: int = 0
    markov_rank: int = 0


class FlashHead(EagleHead):
    """`fc`, attention, a feed-forward from one output to k features, and the `MarkovHead` if `markov_rank` is not 0."""

    config: FlashConfig

    def __init__(self, config: FlashConfig) -> None:
        super().__init__(config)
        if config.block_ffn_size < 1:
            raise ValueError(f"a FLASH head needs block_ffn_size of at least 1; got {config.block_ffn_size}.")
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.up_proj = nn.Linear(config.hidden_size, config.block_ffn_size, bias=False)
        self.block_proj = nn.Linear(config.block_ffn_size, config.block_size * config.hidden_size, bias=False)
        self.markov_head = MarkovHead(config, config.markov_rank) if config.markov_rank else None

    def block_features(self, outputs: Tensor) -> Tensor:
        """[..., D] outputs -> [..., k, D] features of the next k positions."""
        features = self.block_proj(functional.silu(self.up_proj(self.norm(outputs))))
        return outputs[..., None, :] + features.unflatten(-1, (self.config.block_size, -1))
