"""Rows of a batch by their places: taken, replaced, added up. Whole rows are copied, not one number after the other."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_rows(rows: Tensor, places: Tensor) -> Tensor:
    """[B, m, ...], of [B, n, ...] the rows at [B, m]."""
    return rows.flatten(0, 1).index_select(0, _flat(places, rows.shape[1])).unflatten(0, places.shape)


def scatter_rows(rows: Tensor, places: Tensor, new: Tensor) -> Tensor:
    """[B, n, ...] with the rows at [B, m], no place twice, as in [B, m, ...]."""
    flat = _flat(places, rows.shape[1])
    return rows.flatten(0, 1).index_copy(0, flat, new.flatten(0, 1)).view(rows.shape)


def scatter_sum(rows: Tensor, places: Tensor, count: int) -> Tensor:
    """[B, count, D] sums of the rows [B, n, D] that go to each place [B, n]."""
    batch, _, width = rows.shape
    index = _flat(places, count)[:, None].expand(-1, width)
    return rows.new_zeros(batch * count, width).scatter_add(0, index, rows.flatten(0, 1)).view(batch, count, width)


def _flat(places: Tensor, n: int) -> Tensor:
    """[B * m] the places [B, m] of rows of n, counted over all rows."""
    if len(places) == 1:
        return places[0]
    return (places + n * torch.arange(len(places), device=places.device)[:, None]).flatten()


__all__ = ["gather_rows", "scatter_rows", "scatter_sum"]
