"""Drafts with an `Eagle3Head`, by EAGLE-2's trees."""

from __future__ import annotations

from functools import partial

from mmspec.drafters.heads.base.c_draft import CDraft, find_c_draft
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.heads.eagle.drafter import EagleDrafter
from mmspec.drafters.heads.eagle3.c_weights import eagle3_weights
from mmspec.drafters.heads.eagle3.head import Eagle3Head, Eagle3Layer


class Eagle3Drafter(EagleDrafter):
    """Drafts with an `Eagle3Head`, level by level."""

    @property
    def label(self) -> str:
        """The name in `Stats.drafter`, with the visual mode, in which trainers and engines differ."""
        return f"{self.name} ({self.visual_mode})"

    def c_draft(self, state: DraftState) -> CDraft | None:
        head = self.head
        if type(self) is not Eagle3Drafter or type(head) is not Eagle3Head:
            return None
        return find_c_draft(self, state, partial(eagle3_weights, head, state), (Eagle3Layer,))
