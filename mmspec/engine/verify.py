"""Which drafted tokens survive. Pure: no model, no cache, no randomness, no value read on the host.

The only acceptance rule of the project: at each node a token has been *picked from the target's own distribution*; the
walk goes on to the child that carries it. There is no accept test and no bonus branch, so nothing that a drafter does
can bend the output (design: `methods`, speculative sampling without a ratio test; coupling as in arXiv 2408.07978).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.engine.tree import DraftTree


def accept_path(
    tree: DraftTree,
    sampled_ids: Tensor,
    max_emit: Tensor,
    stop_ids: Tensor | None = None,
    finished: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk every row from node 0: emit the pick, step into the child that carries it, stop where there is none.

    Args:
        tree: a sealed tree (no two siblings with the same token).
        picks: [B, N] int64, the token picked at every node.
        limits: [B] int64, how many tokens a row may emit at most; 0 for rows that do not take part.
        stops: [E] int64 ids after which a row emits nothing more, or None.
        ended: [B] bool rows that are past their end and only emit padding, which may itself be a stop id, or None.

    Returns:
        path [B, N] int64 (walked nodes, node 0 first), counts [B] int64 (tokens emitted), tokens [B, N] int64
        (tokens emitted); path and tokens are meaningful up to counts.
    """
    batch, nodes = sampled_ids.shape
    if nodes == 1:
        return torch.zeros_like(sampled_ids), max_emit.clamp(max=1), sampled_ids
    assert tree.ancestor_mask is not None and tree.depths is not None
    index = torch.arange(nodes, device=sampled_ids.device)
    agrees = (tree.tokens == sampled_ids.gather(1, tree.parents.clamp(min=0))) & tree.valid
    agrees[:, 0] = True
    reached = ~(tree.ancestor_mask & ~agrees[:, None, :]).any(-1)
    # One reached node per depth: scatter each to its depth, all others to a slot that is thrown away.
    slot = torch.where(reached, tree.depths, nodes)
    path = torch.zeros(batch, nodes + 1, dtype=torch.long, device=sampled_ids.device)
    path = path.scatter_(1, slot, index.expand(batch, nodes))[:, :nodes]
    tokens = sampled_ids.gather(1, path)
    counts = torch.minimum(reached.sum(1), max_emit)
    if stop_ids is not None:
        last = torch.isin(tokens, stop_ids)
        if finished is not None:
            last &= ~finished[:, None]
        first = torch.where(last, index, nodes).amin(1)
        counts = torch.minimum(counts, first + 1)
    return path, counts, tokens
