"""Drafts with a `FlashHead`: k tokens from one forward."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from mmspec.cpu.draft_types import BlockWeights, CorrectionWeights, HeadWeights
from mmspec.drafters.heads.base.block import BlockDrafter
from mmspec.drafters.heads.base.c_draft import CDraft, find_c_draft
from mmspec.drafters.heads.base.expand import LevelExpander
from mmspec.drafters.heads.base.markov import MarkovExpander, MarkovHead
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.heads.eagle.drafter import eagle_weights
from mmspec.drafters.heads.eagle.head import DecoderLayer
from mmspec.drafters.heads.flash.head import FlashHead


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
            vocab_proj=vocab_proj if state.draft_ids is None else vocab_proj[state.draft_ids],
            first_corrected=1,
        )

        def weights() -> HeadWeights | None:
            layer = eagle_weights(head, state)
            return None if layer is None else replace(layer, block=block, correction=correction)

        return find_c_draft(self, state, weights, (DecoderLayer, MarkovHead))
