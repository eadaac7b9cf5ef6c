"""Batch operations on visual tokens: select rows, pad to a length, concatenate groups of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.interfaces import VisualTokens


def select_rows(visual_tokens: VisualTokens, rows: Sequence[int], max_tokens: int) -> VisualTokens:
    """The given batch rows, cut to `max_tokens` tokens; the caller ensures that none of them has more."""
    index = torch.tensor(rows, device=visual_tokens.mask.device)
    new_row = {row: i for i, row in enumerate(rows)}
    saliency = visual_tokens.saliency
    source_indices = visual_tokens.source_indices
    choices = visual_tokens.choices
    return replace(
        visual_tokens,
        inputs_embeds=visual_tokens.inputs_embeds[index, :max_tokens],
        hidden_states=visual_tokens.hidden_states[index, :max_tokens],
        mask=visual_tokens.mask[index, :max_tokens],
        position_ids=visual_tokens.position_ids[..., index, :max_tokens],
        grids=tuple(replace(grid, row=new_row[grid.row]) for grid in visual_tokens.grids if grid.row in new_row),
        saliency=None if saliency is None else saliency[index, :max_tokens],
        source_indices=None if source_indices is None else source_indices[index, :max_tokens],
        choices=None if choices is None else tuple(choices[row] for row in rows),
    )


def source_indices_or_mixture(visual_tokens: VisualTokens) -> Tensor:
    """[B, M] int64 `source_indices`; -1 (a mixture) for all tokens where the compressor sets none."""
    if visual_tokens.source_indices is None:
        return torch.full_like(visual_tokens.mask, -1, dtype=torch.long)
    return visual_tokens.source_indices


def pad_tokens(visual_tokens: VisualTokens, length: int) -> VisualTokens:
    """The same tokens, padded on the right to `length` (mask False). The grids are dropped."""
    padding = length - visual_tokens.mask.shape[1]
    return VisualTokens(
        inputs_embeds=functional.pad(visual_tokens.inputs_embeds, (0, 0, 0, padding)),
        hidden_states=functional.pad(visual_tokens.hidden_states, (0, 0, 0, padding)),
        mask=functional.pad(visual_tokens.mask, (0, padding)),
        position_ids=functional.pad(visual_tokens.position_ids, (0, padding)),
        source_indices=functional.pad(source_indices_or_mixture(visual_tokens), (0, padding), value=-1),
        choices=visual_tokens.choices,
    )


def concat_rows(parts: Sequence[VisualTokens], rows: Sequence[Sequence[int]]) -> VisualTokens:
    """One batch from several.

    Args:
        parts: Batches of rows; padded to the longest.
        rows: For each part, the row of the result that each of its rows becomes.
    """
    length = max(part.mask.shape[1] for part in parts)
    order = torch.tensor([row for part in rows for row in part], device=parts[0].mask.device).argsort()
    padded = [pad_tokens(part, length) for part in parts]
    return VisualTokens(
        inputs_embeds=torch.cat([part.inputs_embeds for part in padded])[order],
        hidden_states=torch.cat([part.hidden_states for part in padded])[order],
        mask=torch.cat([part.mask for part in padded])[order],
        position_ids=torch.cat([part.position_ids for part in padded], dim=-2)[..., order, :],
        source_indices=torch.cat([source_indices_or_mixture(part) for part in padded])[order],
    )
