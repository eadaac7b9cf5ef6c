"""ParallelSpec (arXiv 2410.05589): k tokens from one forward over k - 1 learned mask embeddings behind the context.

The mask positions attend to the context and to the mask positions before them; their keys and values are dropped
afterwards. The tokens emitted since the last draft are processed in the same forward. Independent predictions fit
together badly far from the root, so a small gated layer can correct each by the token chosen before it, without a
further forward (as the heads of Hydra do, arXiv 2402.05109).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.drafters.heads.base.attention import cached_attention, select_last
from mmspec.drafters.heads.base.block import BlockDrafter
from mmspec.drafters.heads.base.expand import LevelExpander, StatelessExpander
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.heads.parallel.head import ParallelHead, TokenCorrection
from mmspec.engine.host_copy import from_host


class CorrectedExpander(StatelessExpander):
    """A `LevelExpander` whose levels are the mask positions, each corrected by the token before it."""

    def __init__(self, drafter: ParallelDrafter, token_correction: TokenCorrection, state: DraftState) -> None:
        self.drafter = drafter
        self.token_correction = token_correction
        self.state = state
        self.features = drafter.block_features(state)
        self.root_hidden = self.features[:, :1]

    def expand(self, level: int, inputs_embeds: Tensor, parent_hidden: Tensor) -> Tensor:
        features = self.features[:, level, None].expand(inputs_embeds.shape)
        corrected: Tensor = self.token_correction(features, inputs_embeds)
        return corrected

    def logits(self, level: int, hidden_states: Tensor) -> Tensor:
        return self.drafter.logits(self.state, hidden_states)


@dataclass
class ParallelState(DraftState):
    """State of one call.

    Attributes:
        features: [B, k, D] of the last forward; None between the prompt and the first draft.
    """

    kept: ClassVar[tuple[str, ...]] = ("last_hidden", "features")
    features: Tensor | None = None


class ParallelDrafter(BlockDrafter):
    """Drafts with a `ParallelHead`."""

    head: ParallelHead
    state_class = ParallelState
    records_drafts = True

    def extend_context(self, state: DraftState, inputs: Tensor, position_ids: Tensor, counts: list[int]) -> None:
        """See `HeadDrafter`; a prompt runs without mask positions."""
        assert isinstance(state, ParallelState)
        is_prompt = not any(state.kv_cache.seq_lens)
        super().extend_context(state, inputs, position_ids, counts)
        if is_prompt:
            state.features = state.last_hidden[:, None] if self.block_size == 1 else None
        if is_prompt and state.recordings is not None:  # a recorded function does not add tensors to the state
            self.block_features(state)

    def extend_rows(
        self, state: DraftState, inputs: Tensor, position_ids: Tensor, counts: Sequence[int] | Tensor
    ) -> None:
        """See `HeadDrafter`: one forward over the inputs and the mask positions behind them."""
        assert isinstance(state, ParallelState)
        kv_cache, n, num_masks = state.kv_cache, inputs.shape[1], self.block_size - 1
        if not num_masks:
            super().extend_rows(state, inputs, position_ids, counts)
            state.features = state.last_hidden[:, None]
            return
        device, offsets = inputs.device, torch.arange(num_masks, device=inputs.device)
        seq_lens, next_positions = kv_cache.lengths_on(device)[:, None], state.first_positions()
        num_new = (counts if isinstance(counts, Tensor) else from_host(counts, device))[:, None]
        mask_inputs = self.head.mask_embeddings[:num_masks].to(inputs.dtype).expand(len(inputs), -1, -1)
        kv_cache.begin_forward(n + num_masks)
        key_index = torch.arange(kv_cache.kv_len, device=device)
        causal = key_index <= (seq_lens + torch.arange(n, device=device))[..., None]
        # A mask position attends to the row's valid keys, and to the mask positions from `first_mask` to itself.
        first_mask = (seq_lens + n)[..., None]
        is_context = key_index < (seq_lens + num_new)[..., None]
        lookahead = is_context | ((key_index >= first_mask) & (key_index <= first_mask + offsets[:, None]))
        mask_positions = next_positions + num_new + offsets
        cos, sin = self.rotary_embedding(state, torch.cat((position_ids, mask_positions), dim=1))
        attend = cached_attention(kv_cache, torch.cat((causal, lookahead), dim=1)[:, None])
        outputs = self.head(torch.cat((inputs, mask_inputs), dim=1), cos, sin, attend)
        state.last_hidden = select_last(outputs[:, :n], counts, state.last_hidden) if n else state.last_hidden
        state.features = torch.cat((state.last_hidden[:, None], outputs[:, n:]), dim=1)

    def block_features(self, state: DraftState) -> Tensor:
        """See `BlockDrafter`; runs the mask positions alone if no forward has done so yet."""
        assert isinstance(state, ParallelState)
        if state.features is None:
            batch, hidden = state.last_hidden.shape
            position_ids = torch.zeros(batch, 0, dtype=torch.long, device=state.last_hidden.device)
            self.extend_context(state, state.last_hidden.new_zeros(batch, 0, hidden), position_ids, [0] * batch)
        assert state.features is not None
        return state.features

    def expander(self, state: DraftState) -> LevelExpander | None:
        correction = self.head.token_correction
        return None if correction is None else CorrectedExpander(self, correction, state)
