"""`MTPDrafter`: drafts with the head that the target's checkpoint brings along.

One layer drafts as many tokens as pay: it is repeated on its own output, by measured costs and running acceptance
(`mmspec.economy`). After every round it reads the accepted tokens again with the target's hidden states, as all heads
here do (`HeadDrafter`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mmspec.cpu.draft_types import HeadWeights
from mmspec.drafters.heads.base.c_draft import shared_weights
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.mtp.head import MTPHead
from mmspec.drafters.mtp.own import OwnDrafter
from mmspec.interfaces import OwnHead


class MTPDrafter(OwnDrafter):
    """Drafts with an `MTPHead`."""

    noun = "MTP head"
    head: MTPHead
    c_classes = None
    records_drafts = True

    def __init__(self, parts: OwnHead, **options: Any) -> None:
        """
        Args:
            parts: of the head, with its weights.
            options: further arguments of `OwnDrafter`; `name` is "mtp" by default.
        """
        options = {"name": "mtp", "num_layers": parts.num_layers, **options}
        super().__init__(MTPHead(parts), parts.visual_modes[0], parts.description, **options)

    def c_weights(self, state: DraftState) -> HeadWeights | None:
        """See `HeadDrafter`: its block must compute as the target's layers do, where these run in C."""
        head: Any = self.head
        shape, layer = state.c_shape(), head.block.c_weights()
        if shape is None or layer is None or layer.router is not None or layer.k is None or layer.gate is None:
            return None
        ends = shared_weights(state)
        if head.lm_head is not None and state.draft_lm_head is None:
            ends |= {"lm_head": head.lm_head, "lm_head_bias": None}
        return HeadWeights(
            head.fc.weight,
            head.fc.bias,
            [layer],
            hidden_norm=head.hidden_norm.weight,
            embedding_norm=head.embedding_norm.weight,
            final_norm=head.output_norm.weight,
            shape=replace(shape, intermediate_size=layer.gate.shape[0], windows=(), head_sizes=(), owners=()),
            window=head.window,
            **ends,
        )
