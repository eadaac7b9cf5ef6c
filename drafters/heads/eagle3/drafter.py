"""Drafts with an `Eagle3Head`, by EAGLE-2's trees."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from mmspec.drafters.heads.base.attention import CachedAttention
from mmspec.drafters.heads.base.c_draft import CDraft, find_c_draft
from mmspec.drafters.heads.base.reader import CosSin
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.heads.eagle.drafter import EagleDrafter
from mmspec.drafters.heads.eagle3.c_weights import eagle3_weights
from mmspec.drafters.heads.eagle3.head import Eagle3Head, Eagle3Layer
from mmspec.drafters.heads.eagle3.layered import Eagle3Expander, committed_attention
from mmspec.engine.gather import gather_rows


class Eagle3Drafter(EagleDrafter):
    """Drafts with an `Eagle3Head`, level by level."""

    head: Eagle3Head
    expander_class = Eagle3Expander

    def run_rows(
        self, state: DraftState, inputs: Tensor, rotary: CosSin, attend: CachedAttention, query_index: Tensor | None
    ) -> Tensor:
        """See `HeadReader`; layers above the first need all outputs of those below."""
        if not self.head.config.is_layered:
            return super().run_rows(state, inputs, rotary, attend, query_index)
        attend = committed_attention(self.head.config, attend, inputs.shape[1], inputs.device)
        outputs: Tensor = self.head(inputs, *rotary, attend)
        return outputs if query_index is None else gather_rows(outputs, query_index)

    @property
    def label(self) -> str:
        """The name in `Stats.drafter`, with the visual mode, in which trainers and engines differ."""
        return f"{self.name} ({self.visual_mode})"

    def c_draft(self, state: DraftState) -> CDraft | None:
        head = self.head
        if type(self) is not Eagle3Drafter or type(head) is not Eagle3Head:
            return None
        return find_c_draft(self, state, partial(eagle3_weights, head, state), (Eagle3Layer, nn.ModuleList))
