"""Rows of a batch of visual tokens: some of them by themselves, longer ones, and all together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.interfaces import VisualTokens


def some(visual: VisualTokens, rows: Sequence[int], most: int) -> VisualTokens:
    """The batch that these rows are, none of which has more than `most` tokens."""
    index = torch.tensor(rows, device=visual.mask.device)
    number = {row: place for place, row in enumerate(rows)}
    return replace(
        visual,
        embeddings=visual.embeddings[index, :most],
        states=visual.states[index, :most],
        mask=visual.mask[index, :most],
        positions=visual.positions[..., index, :most],
        segments=tuple(replace(one, row=number[one.row]) for one in visual.segments if one.row in number),
        scores=None if visual.scores is None else visual.scores[index, :most],
        origin=None if visual.origin is None else visual.origin[index, :most],
        ways=None if visual.ways is None else tuple(visual.ways[row] for row in rows),
    )


def origin_of(part: VisualTokens) -> Tensor:
    """Its `origin`, -1 throughout if it does not say."""
    return torch.full_like(part.mask, -1, dtype=torch.long) if part.origin is None else part.origin


def padded(part: VisualTokens, length: int) -> VisualTokens:
    """The same with more places, at which nothing stands. Its grids are grids no more."""
    missing = length - part.mask.shape[1]
    return VisualTokens(
        embeddings=functional.pad(part.embeddings, (0, 0, 0, missing)),
        states=functional.pad(part.states, (0, 0, 0, missing)),
        mask=functional.pad(part.mask, (0, missing)),
        positions=functional.pad(part.positions, (0, missing)),
        origin=functional.pad(origin_of(part), (0, missing), value=-1),
        ways=part.ways,
    )


def together(parts: Sequence[VisualTokens], rows: Sequence[Sequence[int]]) -> VisualTokens:
    """One batch of several, of which each has these rows of it."""
    longest = max(part.mask.shape[1] for part in parts)
    back = torch.tensor([row for part in rows for row in part], device=parts[0].mask.device).argsort()
    even = [padded(part, longest) for part in parts]
    return VisualTokens(
        embeddings=torch.cat([part.embeddings for part in even])[back],
        states=torch.cat([part.states for part in even])[back],
        mask=torch.cat([part.mask for part in even])[back],
        positions=torch.cat([part.positions for part in even], dim=-2)[..., back, :],
        origin=torch.cat([origin_of(part) for part in even])[back],
    )


__all__ = ["origin_of", "padded", "some", "together"]
