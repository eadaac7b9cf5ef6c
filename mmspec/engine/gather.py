"""Gather, scatter and sum of whole rows along dimension 1 of a batch [B, n, ...].

`index_select` and `index_copy` move whole rows; `torch.gather` with an expanded index moves single numbers, which is
slower.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gather_rows(rows: Tensor, index: Tensor) -> Tensor:
    """[B, m, ...]: the rows of `rows` [B, n, ...] at `index` [B, m] int64."""
    return rows.flatten(0, 1).index_select(0, _flatten_index(index, rows.shape[1])).unflatten(0, index.shape)


def scatter_rows(rows: Tensor, index: Tensor, new: Tensor) -> Tensor:
    """[B, n, ...]: a copy of `rows` with `new` [B, m, ...] at `index` [B, m] int64, distinct in each row."""
    flat_index = _flatten_index(index, rows.shape[1])
    return rows.flatten(0, 1).index_copy(0, flat_index, new.flatten(0, 1)).view(rows.shape)


def scatter_sum(rows: Tensor, index: Tensor, count: int) -> Tensor:
    """[B, count, D]: sums of the rows [B, n, D] that have the same `index` [B, n] int64."""
    batch, _, width = rows.shape
    flat_index = _flatten_index(index, count)[:, None].expand(-1, width)
    sums = rows.new_zeros(batch * count, width).scatter_add(0, flat_index, rows.flatten(0, 1))
    return sums.view(batch, count, width)


def _flatten_index(index: Tensor, n: int) -> Tensor:
    """[B * m]: index [B, m] into rows of n, as an index into the flattened batch of B * n."""
    if len(index) == 1:
        return index[0]
    return (index + n * torch.arange(len(index), device=index.device)[:, None]).flatten()
