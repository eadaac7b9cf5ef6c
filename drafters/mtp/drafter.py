"""`MTPDrafter`: drafts with the head that the target's checkpoint brings along.

One layer drafts as many tokens as pay: it is repeated on its own output, by measured costs and running acceptance
(`mmspec.economy`). After every round it reads the accepted tokens again with the target's hidden states, as all heads
here do (`HeadDrafter`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from mmspec.drafters.heads.base.c_draft import CDraft, find_c_draft
from mmspec.drafters.heads.base.drafter import HeadDrafter
from mmspec.drafters.heads.base.expand import AutoregressiveExpander, expand_levels
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.mtp.c_weights import mtp_weights
from mmspec.drafters.mtp.head import MTPHead
from mmspec.drafters.mtp.own import OwnDrafter
from mmspec.engine.tree import DraftTree
from mmspec.interfaces import OwnHead


class MTPExpander(AutoregressiveExpander):
    """Levels of repetitions of the head, each on what it carries on."""

    def expand(self, level: int, inputs_embeds: Tensor, parent_hidden: Tensor) -> Tensor:
        head = self.drafter.head
        assert isinstance(head, MTPHead)
        return super().expand(level, inputs_embeds, head.carried(parent_hidden))


class MTPDrafter(OwnDrafter, HeadDrafter):
    """Drafts with an `MTPHead`."""

    noun = "MTP head"
    head: MTPHead
    records_drafts = True

    def __init__(
        self,
        parts: OwnHead,
        *,
        max_depth: int = 6,
        top_k: int | None = None,
        name: str = "mtp",
        **options: Any,
    ) -> None:
        """
        Args:
            parts: of the head, with its weights.
            max_depth: largest number of tokens of a draft.
            top_k: see `HeadDrafter`.
            name: see `HeadDrafter`.
            options: `draft_ids` and `frequent_ids`, see `OwnDrafter`.
        """
        super().__init__(
            MTPHead(parts),
            parts.visual_modes[0],
            parts.description,
            num_layers=parts.num_layers,
            name=name,
            max_depth=max_depth,
            top_k=top_k,
            **options,
        )

    def draft_tree(self, state: DraftState, max_nodes: int, num_levels: int) -> DraftTree:
        """Repeat the head on its own output, the `top_k` most likely nodes of each level."""
        top_k = self.top_k_of(state)
        tree = None if state.c_draft is None else state.c_draft.tree(state, top_k, max_nodes, num_levels)
        if tree is not None:
            return tree
        return expand_levels(state, MTPExpander(self, state, top_k), top_k, max_nodes=max_nodes, num_levels=num_levels)

    def c_draft(self, state: DraftState) -> CDraft | None:
        if type(self) is not MTPDrafter:
            return None
        classes = tuple({type(module) for module in self.head.modules()})
        return find_c_draft(self, state, partial(mtp_weights, self.head, state), classes)
