"""ParallelSpec (arXiv 2410.05589): k tokens from one forward over k - 1 learned mask embeddings behind the context.

The mask positions attend to the context and to the mask positions before them; their keys and values are dropped
afterwards. The tokens emitted since the last draft are processed in the same forward. Independent predictions fit
together badly far from the root, so a small gated layer can correct each by the token chosen before it, without a
further forward (as the heads of Hydra do, arXiv 2402.05109).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.drafters.heads.base.attention import CachedAttention, select_last
from mmspec.drafters.heads.base.block import BlockDrafter
from mmspec.drafters.heads.base.expand import LevelExpander
from mmspec.drafters.heads.base.head import RMSNorm
from mmspec.drafters.heads.base.state import DraftState
from mmspec.drafters.heads.eagle.head import EagleConfig, EagleHead
from mmspec.drafters.training.batch import PackedQueries, shift
from mmspec.drafters.training.losses import LossAndMetrics, LossInputs, RolloutCache
from mmspec.engine.host_copy import from_host


@dataclass(frozen=True)
class ParallelConfig(EagleConfig):
    """Shape of a `ParallelHead`.

    Attributes:
        block_ffn_size: intermediate size of the `TokenCorrection`; 0: none.
    """

    block_ffn_size: int = 0


class TokenCorrection(nn.Module):
    """Residual correction of a position's feature by the token before it; zero at initialisation."""

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gate_up_proj = nn.Linear(2 * config.hidden_size, 2 * config.block_ffn_size, bias=False)
        self.down_proj = nn.Linear(config.block_ffn_size, config.hidden_size, bias=False)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, features: Tensor, inputs_embeds: Tensor) -> Tensor:
        """[..., D] features and [..., D] embeddings of the tokens before them -> [..., D] corrected features."""
        gate, up = self.gate_up_proj(torch.cat((self.norm(features), inputs_embeds), dim=-1)).chunk(2, dim=-1)
        correction: Tensor = self.down_proj(functional.silu(gate) * up)
        return features + correction


class ParallelHead(EagleHead):
    """EAGLE's head, k - 1 mask embeddings, and the `TokenCorrection` if `block_ffn_size` is not 0."""

    config: ParallelConfig

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__(config)
        self.mask_embeddings = nn.Parameter(0.02 * torch.randn(config.block_size - 1, config.hidden_size))
        self.token_correction = TokenCorrection(config) if config.block_ffn_size else None


class CorrectedExpander(LevelExpander):
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


class ParallelDrafter(BlockDrafter):
    """Drafts with a `ParallelHead`. `DraftState.carry` is [B, k, D], the features of its last forward."""

    head: ParallelHead
    records_drafts = True

    def extend_context(self, state: DraftState, inputs: Tensor, position_ids: Tensor, counts: list[int]) -> None:
        """See `HeadDrafter`; a prompt runs without mask positions."""
        is_prompt = not any(state.kv_cache.seq_lens)
        super().extend_context(state, inputs, position_ids, counts)
        if is_prompt:
            state.carry = state.last_hidden[:, None] if self.block_size == 1 else None
        if is_prompt and state.recordings is not None:  # a recorded function does not add tensors to the state
            self.block_features(state)

    def extend_rows(
        self, state: DraftState, inputs: Tensor, position_ids: Tensor, counts: Sequence[int] | Tensor
    ) -> None:
        """See `HeadDrafter`: one forward over the inputs and the mask positions behind them."""
        kv_cache, n, num_masks = state.kv_cache, inputs.shape[1], self.block_size - 1
        if not num_masks:
            super().extend_rows(state, inputs, position_ids, counts)
            state.carry = state.last_hidden[:, None]
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
        attend = CachedAttention(kv_cache, torch.cat((causal, lookahead), dim=1)[:, None])
        outputs = self.head(torch.cat((inputs, mask_inputs), dim=1), cos, sin, attend)
        state.last_hidden = select_last(outputs[:, :n], counts, state.last_hidden) if n else state.last_hidden
        state.carry = torch.cat((state.last_hidden[:, None], outputs[:, n:]), dim=1)

    def block_features(self, state: DraftState) -> Tensor:
        """See `BlockDrafter`; runs the mask positions alone if no forward has done so yet."""
        if state.carry is None:
            batch, hidden = state.last_hidden.shape
            position_ids = torch.zeros(batch, 0, dtype=torch.long, device=state.last_hidden.device)
            self.extend_context(state, state.last_hidden.new_zeros(batch, 0, hidden), position_ids, [0] * batch)
        assert state.carry is not None
        return state.carry

    def expander(self, state: DraftState, top_k: int) -> LevelExpander | None:
        correction = self.head.token_correction
        return None if correction is None else CorrectedExpander(self, correction, state)


def parallel_loss(given: LossInputs) -> LossAndMetrics:
    """Mask positions attend to the context up to their own position and to each other (ParallelSpec, section 3)."""
    head, data = given.draft_model.head, given.aligned()
    packed = PackedQueries(data)
    loss = given.accumulator(data)
    cache, inputs = RolloutCache(head, packed), data.inputs
    for slot in range(head.config.block_size):
        outputs = cache.forward(inputs, slot)
        if slot and head.token_correction is not None:
            embeds = packed.gather(shift(data.next_embeds, slot))
            outputs = head.token_correction(outputs, embeds.to(outputs.dtype))
        mask = packed.loss_mask_at(slot)
        loss.add(slot, outputs[mask], packed.labels(slot, mask), mask=mask)
        if slot + 1 < head.config.block_size:
            inputs = head.mask_embeddings[slot].to(data.inputs.dtype).expand_as(outputs)
    return loss.result()
