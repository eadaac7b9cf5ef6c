"""Parallel drafting: k tokens from one pass over k - 1 learned rows behind the text (ParallelSpec, arXiv 2410.05589).

The learned rows stand where words are not known yet, look at the text and at those before them, and are forgotten.
What was just emitted is read in the same pass. Independent guesses fit together badly far down, so a small gated layer
may correct each of them by the word chosen before it (as Hydra's heads do, arXiv 2402.05109); that costs no pass.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.drafters.block.flash import BlockDrafter, Passless
from mmspec.drafters.eagle.drafter import Descent, State, attention, last_of
from mmspec.drafters.eagle.head import EagleHead, HeadConfig, Norm


class Link(nn.Module):
    """What the word before does to a feature: [..., D] and [..., D] in, [..., D] added. Begins as nothing."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.gate_up = nn.Linear(2 * config.hidden_size, 2 * config.inner, bias=False)
        self.down = nn.Linear(config.inner, config.hidden_size, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, feature: Tensor, embedded: Tensor) -> Tensor:
        """The corrected feature."""
        gate, up = self.gate_up(torch.cat((self.norm(feature), embedded), dim=-1)).chunk(2, dim=-1)
        added: Tensor = self.down(functional.silu(gate) * up)
        return feature + added


class ParallelHead(EagleHead):
    """EAGLE's head, k - 1 learned rows, and the link if `inner` is its width and not 0."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.slots = nn.Parameter(0.02 * torch.randn(config.block - 1, config.hidden_size))
        self.link = Link(config) if config.inner else None


class Linked(Passless):
    """Goes down a tree: each level is a learned row, corrected by the word before."""

    def __init__(self, drafter: ParallelDrafter, link: Link, state: State) -> None:
        self.drafter, self.link, self.state = drafter, link, state
        self.features = drafter.features(state)
        self.start = self.features[:, :1]

    def step(self, level: int, embedded: Tensor, feature: Tensor) -> Tensor:
        """See `Descent`."""
        out: Tensor = self.link(self.features[:, level, None].expand(embedded.shape), embedded)
        return out

    def scores(self, level: int, out: Tensor) -> Tensor:
        """See `Descent`."""
        return self.drafter.scores(self.state, out)


class ParallelDrafter(BlockDrafter):
    """Drafts with a `ParallelHead`. `State.more` is [B, k, D], what its last pass gave, None before the first draft."""

    head: ParallelHead

    def _read(self, state: State, rows: Tensor, positions: Tensor, counts: list[int]) -> None:
        """Read, and look ahead from the last row in the same pass. A prompt is read alone."""
        buffer, n, slots = state.buffer, rows.shape[1], self.size - 1
        if not any(buffer.seq_lens) or not slots:
            super()._read(state, rows, positions, counts)
            state.more = state.last[:, None] if not slots else None
            return
        device, steps = rows.device, torch.arange(slots, device=rows.device)
        lengths, given = torch.tensor([buffer.seq_lens, counts], device=device)[..., None]
        places = torch.tensor(state.places, device=device)[:, None]
        learned = self.head.slots[:slots].to(rows.dtype).expand(len(counts), -1, -1)
        buffer.begin_forward(n + slots)
        place = torch.arange(buffer.kv_len, device=device)
        real = place <= (lengths + torch.arange(n, device=device))[..., None]
        first = (lengths + n)[..., None]
        ahead = (place < (lengths + given)[..., None]) | ((place >= first) & (place <= first + steps[:, None]))
        cos, sin = self._angles(state, torch.cat((positions, places + given + steps), dim=1))
        mask = torch.cat((real, ahead), dim=1)[:, None]
        out = self.head(torch.cat((rows, learned), dim=1), cos, sin, attention(buffer, mask))
        buffer.seq_lens = [length + count for length, count in zip(buffer.seq_lens, counts, strict=True)]
        state.last = last_of(out[:, :n], counts, state.last) if n else state.last
        state.more = torch.cat((state.last[:, None], out[:, n:]), dim=1)

    def features(self, state: State) -> Tensor:
        """From the last pass; just after the prompt there was none yet."""
        if state.more is None:
            batch, hidden = state.last.shape
            positions = torch.zeros(batch, 0, dtype=torch.long, device=state.last.device)
            self._read(state, state.last.new_zeros(batch, 0, hidden), positions, [0] * batch)
        assert state.more is not None
        return state.more

    @property
    def chained(self) -> bool:
        """See `BlockDrafter`."""
        return self.head.link is not None

    def _descent(self, state: State, width: int) -> Descent:
        assert self.head.link is not None
        return Linked(self, self.head.link, state)


__all__ = ["Link", "ParallelDrafter", "ParallelHead"]
