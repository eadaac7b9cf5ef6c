"""EAGLE-2 (arXiv 2406.16858) for vision-language models: the head drafts a dynamic tree, one forward
for each level but the first, whose hidden state reading the emitted tokens has given.

With `visual_mode="decoupled"` this is MSD (arXiv 2505.14260). Reading order: `HeadDrafter` (`base/drafter.py`) for a
call from `begin` to `observe`, `expand_levels` (`base/expand.py`) for the tree, `EagleHead` (`head.py`) for the
network. In C: `CDraft` (`base/c_draft.py`), `CHead` (`mmspec/cpu/draft.py`), `draft_tree` (`draft_workers.h`).
"""

from __future__ import annotations

from typing import ClassVar

from mmspec.cpu.draft_types import HeadWeights
from mmspec.drafters.heads.base.c_draft import shared_weights
from mmspec.drafters.heads.base.drafter import HeadDrafter
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.heads.eagle.head import DecoderLayer, EagleHead


class EagleDrafter(HeadDrafter):
    """Drafts with an `EagleHead`, level by level."""

    c_classes: ClassVar[tuple[type, ...] | None] = (EagleHead, DecoderLayer)
    records_drafts = True

    def c_weights(self, state: DraftState) -> HeadWeights | None:
        assert isinstance(self.head, EagleHead)
        return eagle_weights(self.head, state)


def eagle_weights(head: EagleHead, state: DraftState) -> HeadWeights | None:
    """Weights of a head that computes as `EagleHead` does: `fc` and one layer, then the target's LM head."""
    if head.config.qk_norm or head.config.final_norm:
        return None
    return HeadWeights(head.fc.weight, head.fc.bias, [head.layer.c_weights()], **shared_weights(state))
