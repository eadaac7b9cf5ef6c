"""Parallel drafting: k tokens from one pass over k - 1 learned rows behind the text (ParallelSpec, arXiv 2410.05589).

The learned rows stand where words are not known yet, look at the text and at those before them, and are forgotten.
What was just emitted is read in the same pass. Independent guesses fit together badly far down, so a small gated layer
may correct each of them by the word chosen before it (as Hydra's heads do, arXiv 2402.05109); that costs no pass.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.drafters.block.flash import BlockDrafter, StatelessExpander
from mmspec.drafters.eagle.drafter import LevelExpander, EagleState, cached_attention, select_last
from mmspec.drafters.eagle.head import EagleHead, HeadConfig, RMSNorm


class TokenCorrection(nn.Module):
    """What the word before does to a feature: [..., D] and [..., D] in, [..., D] added. Begins as nothing."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gate_up_proj = nn.Linear(2 * config.hidden_size, 2 * config.block_ffn_size, bias=False)
        self.down_proj = nn.Linear(config.block_ffn_size, config.hidden_size, bias=False)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, feature: Tensor, embedded: Tensor) -> Tensor:
        """The corrected feature."""
        gate, up = self.gate_up_proj(torch.cat((self.norm(feature), embedded), dim=-1)).chunk(2, dim=-1)
        added: Tensor = self.down_proj(functional.silu(gate) * up)
        return feature + added


class ParallelHead(EagleHead):
    """EAGLE's head, k - 1 learned rows, and the link if `inner` is its width and not 0."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.mask_embeddings = nn.Parameter(0.02 * torch.randn(config.block_size - 1, config.hidden_size))
        self.token_correction = TokenCorrection(config) if config.block_ffn_size else None


class CorrectedExpander(StatelessExpander):
    """Goes down a tree: each level is a learned row, corrected by the word before."""

    def __init__(self, drafter: ParallelDrafter, link: TokenCorrection, state: EagleState) -> None:
        self.drafter, self.token_correction, self.state = drafter, link, state
        self.features = drafter.block_features(state)
        self.start = self.features[:, :1]

    def step(self, level: int, embedded: Tensor, feature: Tensor) -> Tensor:
        """See `LevelExpander`."""
        out: Tensor = self.token_correction(self.features[:, level, None].expand(embedded.shape), embedded)
        return out

    def logits(self, level: int, out: Tensor) -> Tensor:
        """See `LevelExpander`."""
        return self.drafter.logits(self.state, out)


class ParallelDrafter(BlockDrafter):
    """Drafts with a `ParallelHead`. `State.more` is [B, k, D], what its last pass gave, None before the first draft."""

    head: ParallelHead

    def _forward(self, state: EagleState, inputs: Tensor, position_ids: Tensor, counts: list[int]) -> None:
        """Read, and look ahead from the last row in the same pass. A prompt is read alone."""
        buffer, n, slots = state.kv_cache, inputs.shape[1], self.block_size - 1
        if not any(buffer.seq_lens) or not slots:
            super()._forward(state, inputs, position_ids, counts)
            state.extra = state.last_hidden[:, None] if not slots else None
            return
        device, steps = inputs.device, torch.arange(slots, device=inputs.device)
        lengths, given = torch.tensor([buffer.seq_lens, counts], device=device)[..., None]
        places = torch.tensor(state.next_positions, device=device)[:, None]
        learned = self.head.mask_embeddings[:slots].to(inputs.dtype).expand(len(counts), -1, -1)
        buffer.begin_forward(n + slots)
        place = torch.arange(buffer.kv_len, device=device)
        real = place <= (lengths + torch.arange(n, device=device))[..., None]
        first = (lengths + n)[..., None]
        ahead = (place < (lengths + given)[..., None]) | ((place >= first) & (place <= first + steps[:, None]))
        cos, sin = self.rotary_embedding(state, torch.cat((position_ids, places + given + steps), dim=1))
        mask = torch.cat((real, ahead), dim=1)[:, None]
        out = self.head(torch.cat((inputs, learned), dim=1), cos, sin, cached_attention(buffer, mask))
        buffer.seq_lens = [length + count for length, count in zip(buffer.seq_lens, counts, strict=True)]
        state.last_hidden = select_last(out[:, :n], counts, state.last_hidden) if n else state.last_hidden
        state.extra = torch.cat((state.last_hidden[:, None], out[:, n:]), dim=1)

    def block_features(self, state: EagleState) -> Tensor:
        """From the last pass; just after the prompt there was none yet."""
        if state.extra is None:
            batch, hidden = state.last_hidden.shape
            positions = torch.zeros(batch, 0, dtype=torch.long, device=state.last_hidden.device)
            self._forward(state, state.last_hidden.new_zeros(batch, 0, hidden), positions, [0] * batch)
        assert state.extra is not None
        return state.extra

    @property
    def is_sequential(self) -> bool:
        """See `BlockDrafter`."""
        return self.head.token_correction is not None

    def _expander(self, state: EagleState, beam_width: int) -> LevelExpander:
        assert self.head.token_correction is not None
        return CorrectedExpander(self, self.head.token_correction, state)


__all__ = ["TokenCorrection", "ParallelDrafter", "ParallelHead"]
