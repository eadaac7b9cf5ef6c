"""Which draft tokens are accepted. A pure function: no model, no cache, no randomness, no transfer to the host.

This is the acceptance rule of the project, once in torch (`_accept_path`) and once in C (`trees.h`), which decides on
a CPU; both must agree bit for bit. At each node an id was *sampled from the target's own distribution*;
the path continues with the child that has this id. A rejection sampler (vLLM, assisted generation in
transformers) accepts a draft token with probability min(1, target / draft), else samples from the residual
distribution, which preserves the distribution of the output. Sampling at every node preserves the output itself, seed
for seed, so a drafter cannot change it (coupling of draft and target as in arXiv 2408.07978).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.cpu.trees import compiled_accept_path
from mmspec.engine.tree import DraftTree


def accept_path(
    tree: DraftTree,
    sampled_ids: Tensor,
    max_emit: Tensor,
    stop_ids: Tensor | None = None,
    finished: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Follow the sampled ids from node 0 of each row: emit the id, go to the child that has it, stop if there is none.

    Args:
        tree: a sanitized tree (no two siblings with the same token).
        sampled_ids: [B, N] int64, the id sampled at every node.
        max_emit: [B] int64, tokens that a row may emit; 0 for rows that do not take part.
        stop_ids: [E] int64 ids after which a row emits nothing more, or None.
        finished: [B] bool, rows that are past their end and emit padding, which may itself be a stop id; or None.

    Returns:
        path [B, N] int64, the accepted nodes, node 0 first; counts [B] int64, number of emitted tokens; tokens [B, N]
        int64, the emitted tokens. `path` and `tokens` are defined up to `counts`.
    """
    if sampled_ids.shape[1] == 1:
        return torch.zeros_like(sampled_ids), max_emit.clamp(max=1), sampled_ids
    nodes = (tree.tokens, tree.parents, tree.node_mask)
    accepted = compiled_accept_path(nodes, sampled_ids, max_emit, stop_ids, finished)
    return accepted or _accept_path(tree, sampled_ids, max_emit, stop_ids, finished)


def _accept_path(
    tree: DraftTree,
    sampled_ids: Tensor,
    max_emit: Tensor,
    stop_ids: Tensor | None = None,
    finished: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`accept_path` on any device. May be recorded."""
    batch, num_nodes = sampled_ids.shape
    assert tree.ancestor_mask is not None and tree.depths is not None
    index = torch.arange(num_nodes, device=sampled_ids.device)
    matches = (tree.tokens == sampled_ids.gather(1, tree.parents.clamp(min=0))) & tree.node_mask
    matches[:, 0] = True
    accepted = ~(tree.ancestor_mask & ~matches[:, None, :]).any(-1)
    # There is one accepted node per depth: write its index at its depth, all others to a column that is dropped.
    slot = torch.where(accepted, tree.depths, num_nodes)
    path = torch.zeros(batch, num_nodes + 1, dtype=torch.long, device=sampled_ids.device)
    path = path.scatter_(1, slot, index.expand(batch, num_nodes))[:, :num_nodes]
    tokens = sampled_ids.gather(1, path)
    counts = torch.minimum(accepted.sum(1), max_emit)
    if stop_ids is not None:
        is_stop = (tokens[..., None] == stop_ids).any(-1)
        if finished is not None:
            is_stop &= ~finished[:, None]
        first_stop = torch.where(is_stop, index, num_nodes).amin(1)
        counts = torch.minimum(counts, first_stop + 1)
    return path, counts, tokens
