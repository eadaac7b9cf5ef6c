"""Heads of several layers of which layer i drafts token i (Step-3.7): `LayeredMTPDrafter` and its head.

Layer k reads at row p the embedding of token p + k + 1 and what layer k - 1 carries on from row p, and attends to its
own rows. Here its row p lies k positions further on, at position s = p + k: there all layers read the embedding of
token s + 1, and layer k what layer k - 1 left at position s - 1. So a draft node is read as a position behind its
parent, in trees as in chains, all layers have one length, and what a rejected token has changed is dropped as in other
heads. The first k positions of layer k are no rows and are not seen. CosSin embeddings are those of s: with one
position axis attention depends on differences alone, which are the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.drafters.heads.base.attention import CachedAttention
from mmspec.drafters.heads.base.reader import CosSin
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.mtp.drafter import MTPDrafter, MTPExpander
from mmspec.drafters.mtp.head import MTPHead, whole_mask
from mmspec.engine.gather import gather_rows
from mmspec.interfaces import OwnHead, SharedEmbeddings


class LayeredMTPHead(MTPHead):
    """Several heads in a chain; n layers output [..., n D], the z of each.

    Attributes:
        further: the layers after the first.
    """

    def __init__(self, parts: OwnHead) -> None:
        super().__init__(parts)
        self.further = nn.ModuleList(MTPHead(part) for part in parts.further)

    @property
    def layers(self) -> list[MTPHead]:
        """All layers, this first."""
        return [self, *(layer for layer in self.further if isinstance(layer, MTPHead))]

    @property
    def output_size(self) -> int:
        return len(self.layers) * self.config.hidden_size

    def fuse(self, inputs_embeds: Tensor, hidden_states: Tensor) -> Tensor:
        """[..., D + D'] inputs of `rows` (D' = D) or `forward` (n D), which fuse them layer by layer."""
        return torch.cat((inputs_embeds, hidden_states), dim=-1)

    def carried(self, states: Tensor, carry: str | None = None) -> Tensor:
        """See `MTPHead`; of each layer."""
        parts = states.split(self.config.hidden_size, dim=-1)
        return torch.cat([MTPHead.carried(one, z, carry) for one, z in zip(self.layers, parts, strict=True)], dim=-1)

    def rows(
        self,
        inputs: Tensor,
        previous: Tensor,
        rotary: CosSin,
        attention: CachedAttention,
        query_index: Tensor | None,
        carry: str,
    ) -> Tensor:
        """[B, n or m, n D] outputs at committed positions.

        Args:
            inputs: [B, n, 2 D] embeddings and states of the target.
            previous: [B, n D] what the position before them carries on; anything at the first.
            rotary: of the positions.
            attention: its mask is not read where `query_index` is given, a prompt.
            query_index: [B, m] int64 positions whose outputs are needed; None for all.
            carry: "post" or "pre", see `HeadRule`.
        """
        embeds, states = inputs.split(self.config.hidden_size, dim=-1)
        before = previous.split(self.config.hidden_size, dim=-1)
        mask = attention.mask if query_index is None else None
        outputs = list[Tensor]()
        for index, layer in enumerate(self.layers):
            outputs.append(self._run(index, embeds, states, rotary, mask, attention))
            carried = MTPHead.carried(layer, outputs[-1], carry)
            states = torch.cat((before[index][:, None], carried[:, :-1]), dim=1)
        joined = torch.cat(outputs, dim=-1)
        return joined if query_index is None else gather_rows(joined, query_index)

    def forward(
        self, inputs: Tensor, cos: Tensor, sin: Tensor, attend: Any, query_index: Tensor | None = None
    ) -> Tensor:
        """[B, n, n D] outputs at draft nodes, whose inputs are [B, n, (1 + n) D]; none of the first layer."""
        embeds, *states = inputs.split(self.config.hidden_size, dim=-1)
        rotary = cos, sin
        outputs = [self._run(i, embeds, one, rotary, attend.mask, attend) for i, one in enumerate(states[:-1], 1)]
        return torch.cat((torch.zeros_like(embeds), *outputs), dim=-1)

    def _run(
        self,
        index: int,
        embeds: Tensor,
        states: Tensor,
        rotary: CosSin,
        mask: Tensor | None,
        attention: CachedAttention,
    ) -> Tensor:
        """[B, n, D] z of one layer, over its own keys."""
        layer, num_keys = self.layers[index], attention.kv_cache.kv_len
        if mask is None:
            mask = whole_mask(embeds.shape[1], num_keys, embeds.device)
        is_row = torch.arange(num_keys, device=embeds.device) >= index
        seen = mask & is_row
        mask = seen.where(
            seen.any(-1, keepdim=True), mask
        )  # the first positions, which no row sees: any finite numbers
        cos, sin = rotary
        inputs = MTPHead.fuse(layer, embeds, states)
        return layer.run_block(inputs, cos[:, 0], sin[:, 0], mask, replace(attention, layer=index))

    def draft_lm_head(self, shared_embeddings: SharedEmbeddings, draft_ids: Tensor) -> Tensor | None:
        """[n, V', D], of each layer."""
        rows = [MTPHead.draft_lm_head(layer, shared_embeddings, draft_ids) for layer in self.layers]
        return None if any(one is None for one in rows) else torch.stack([one for one in rows if one is not None])


class LayeredMTPExpander(MTPExpander):
    """Levels of nodes: those of level i are ranked by layer i."""

    def logits(self, level: int, hidden_states: Tensor) -> Tensor:
        state, head = self.state, self.drafter.head
        assert isinstance(head, LayeredMTPHead)
        z = hidden_states.split(head.config.hidden_size, dim=-1)[level]
        rows = None if state.draft_lm_head is None else state.draft_lm_head[level]
        return MTPHead.logits(head.layers[level], z, state.shared_embeddings, rows).float() + state.logit_bias


class LayeredMTPDrafter(MTPDrafter):
    """Drafts at most as many tokens as there are layers. It does not learn."""

    head: LayeredMTPHead
    head_class = LayeredMTPHead
    expander_class = LayeredMTPExpander
    records_drafts = True

    def __init__(self, parts: OwnHead, *, max_depth: int = 6, **options: Any) -> None:
        """Arguments: see `MTPDrafter`."""
        super().__init__(parts, max_depth=min(max_depth, 1 + len(parts.further)), **options)

    def run_rows(
        self, state: DraftState, inputs: Tensor, rotary: CosSin, attend: CachedAttention, query_index: Tensor | None
    ) -> Tensor:
        """See `HeadReader`."""
        return self.head.rows(inputs, self.carried(state.last_hidden), rotary, attend, query_index, self.carry)


def mtp_drafter(parts: OwnHead, **options: Any) -> MTPDrafter:
    """The drafter of a head, of one layer or several."""
    return (LayeredMTPDrafter if parts.further else MTPDrafter)(parts, **options)
