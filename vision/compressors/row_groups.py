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
        inputs_embeds=visual.inputs_embeds[index, :most],
        hidden_states=visual.hidden_states[index, :most],
        mask=visual.mask[index, :most],
        position_ids=visual.position_ids[..., index, :most],
        grids=tuple(replace(one, row=number[one.row]) for one in visual.grids if one.row in number),
        saliency=None if visual.saliency is None else visual.saliency[index, :most],
        source_indices=None if visual.source_indices is None else visual.source_indices[index, :most],
        choices=None if visual.choices is None else tuple(visual.choices[row] for row in rows),
    )


def origin_of(part: VisualTokens) -> Tensor:
    """Its `origin`, -1 throughout if it does not say."""
    return torch.full_like(part.mask, -1, dtype=torch.long) if part.source_indices is None else part.source_indices


def padded(part: VisualTokens, length: int) -> VisualTokens:
    """The same with more places, at which nothing stands. Its grids are grids no more."""
    missing = length - part.mask.shape[1]
    return VisualTokens(
        inputs_embeds=functional.pad(part.inputs_embeds, (0, 0, 0, missing)),
        hidden_states=functional.pad(part.hidden_states, (0, 0, 0, missing)),
        mask=functional.pad(part.mask, (0, missing)),
        position_ids=functional.pad(part.position_ids, (0, missing)),
        source_indices=functional.pad(origin_of(part), (0, missing), value=-1),
        choices=part.choices,
    )


def together(parts: Sequence[VisualTokens], rows: Sequence[Sequence[int]]) -> VisualTokens:
    """One batch of several, of which each has these rows of it."""
    longest = max(part.mask.shape[1] for part in parts)
    back = torch.tensor([row for part in rows for row in part], device=parts[0].mask.device).argsort()
    even = [padded(part, longest) for part in parts]
    return VisualTokens(
        inputs_embeds=torch.cat([part.inputs_embeds for part in even])[back],
        hidden_states=torch.cat([part.hidden_states for part in even])[back],
        mask=torch.cat([part.mask for part in even])[back],
        position_ids=torch.cat([part.position_ids for part in even], dim=-2)[..., back, :],
        source_indices=torch.cat([origin_of(part) for part in even])[back],
    )


__all__ = ["origin_of", "padded", "some", "together"]
