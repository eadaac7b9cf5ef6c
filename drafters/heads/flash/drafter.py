"""FLASH (arXiv 2505.12728), a drafter of k tokens from one forward. It is not FlashAttention and does not use it.

One attention layer over the context, then a feed-forward whose output is k features, one per position; the positions
are predicted independently. Differences from the paper: the features are added to the attention output behind a norm,
and attention is standard causal attention. A `MarkovHead`, which the paper does not have, can make a position's logits
depend on the token before it.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn
from torch.nn import functional

from mmspec.cpu.draft_types import BlockWeights, CorrectionWeights, HeadWeights
from mmspec.drafters.heads.base.block import BlockDrafter
from mmspec.drafters.heads.base.c_draft import CDraft, eagle_weights, find_c_draft
from mmspec.drafters.heads.base.expand import LevelExpander
from mmspec.drafters.heads.base.markov import MarkovExpander, MarkovHead
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.heads.eagle.head import EagleHead, HeadConfig, RMSNorm


class FlashHead(EagleHead):
    """`fc`, attention, a feed-forward from one output to k features, and the `MarkovHead` if `markov_rank` is not 0."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        if config.block_ffn_size < 1:
            raise ValueError(f"a FLASH head needs block_ffn_size of at least 1; got {config.block_ffn_size}.")
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.up_proj = nn.Linear(config.hidden_size, config.block_ffn_size, bias=False)
        self.block_proj = nn.Linear(config.block_ffn_size, config.block_size * config.hidden_size, bias=False)
        self.markov_head = MarkovHead(config) if config.markov_rank else None

    def block_features(self, outputs: Tensor) -> Tensor:
        """[..., D] outputs -> [..., k, D] features of the next k positions."""
        features = self.block_proj(functional.silu(self.up_proj(self.norm(outputs))))
        return outputs[..., None, :] + features.unflatten(-1, (self.config.block_size, -1))


class FlashDrafter(BlockDrafter):
    """Drafts with a `FlashHead`."""

    head: FlashHead
    records_drafts = True

    def block_features(self, state: DraftState) -> Tensor:
        return self.head.block_features(state.last_hidden)

    def expander(self, state: DraftState) -> LevelExpander | None:
        markov_head = self.head.markov_head
        return None if markov_head is None else MarkovExpander(self, markov_head, state)

    def c_draft(self, state: DraftState) -> CDraft | None:
        """See `HeadDrafter`. Without a `MarkovHead` positions are independent, and the tree is no tree of levels."""
        head, markov = self.head, self.head.markov_head
        if type(self) is not FlashDrafter or type(head) is not FlashHead or markov is None:
            return None
        vocab_proj = markov.vocab_proj.weight
        block = BlockWeights(norm=head.norm.weight, up=head.up_proj.weight, down=head.block_proj.weight)
        correction = CorrectionWeights(
            feature_norm=markov.norm.weight,
            feature_proj=markov.feature_proj.weight,
            token_norm=markov.token_norm.weight,
            token_proj=markov.token_proj.weight,
            token_table=None,
            vocab_proj=vocab_proj if state.draft_ids is None else vocab_proj[state.draft_ids],
        )

        def weights() -> HeadWeights | None:
            layer = eagle_weights(head, state)
            return None if layer is None else replace(layer, block=block, correction=correction)

        return find_c_draft(self, state, weights, (MarkovHead,))
