"""Attention masks of tree nodes over a KV cache with one length per row.

Letters: B rows, N nodes. The nodes of a row lie behind its committed positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.engine.tree import DraftTree


def visible_keys(tree: DraftTree, lengths: Tensor, kv_len: int, padding: Tensor | None) -> Tensor:
    """[B, N, kv_len] bool: each node attends to its row's committed positions and to its ancestors.

    Args:
        tree: the tree to score.
        lengths: [B] int64, committed positions.
        kv_len: positions of the cache.
        padding: [B, any length] bool, False where a prompt is padded; None without padding.
    """
    assert tree.ancestor_mask is not None
    batch, num_nodes = tree.tokens.shape
    committed = torch.arange(kv_len, device=lengths.device) < lengths[:, None]
    if padding is not None:
        committed[:, : padding.shape[1]] &= padding[:, :kv_len]
    visible = committed[:, None].expand(batch, num_nodes, -1).contiguous()
    keys = _node_keys(tree, lengths)[:, None].expand(batch, num_nodes, num_nodes)
    return visible.scatter_(2, keys, tree.ancestor_mask)


def within_window(tree: DraftTree, lengths: Tensor, kv_len: int, window: int) -> Tensor:
    """[B, N, kv_len] bool: keys less than `window` positions before each node.

    Positions are those of the sequence, padding included, as transformers' own masks count them. Arguments as above.
    """
    assert tree.depths is not None
    depths = torch.where(tree.node_mask, tree.depths, 0)
    index = torch.arange(kv_len, device=lengths.device).expand(len(lengths), -1)
    position = index.scatter(1, _node_keys(tree, lengths), lengths[:, None] + depths)
    return (lengths[:, None] + tree.depths)[:, :, None] - position[:, None] < window


def _node_keys(tree: DraftTree, lengths: Tensor) -> Tensor:
    """[B, N] index of the nodes' keys in the cache."""
    return lengths[:, None] + torch.arange(tree.num_nodes, device=lengths.device)
