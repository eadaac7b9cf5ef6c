"""Candidate paths of one block: best-first search over products of distributions, without a loop over nodes.

A forward of a block drafter gives a distribution for each of k positions. A path is a rank at each of them. A path is
among the N likeliest only if all paths with no larger rank anywhere are among them too, so a short table that depends
on k and N alone holds every candidate (`candidate_paths`), and one top-k over the table selects the tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.drafters.rerank import LEVEL_PENALTY


def candidate_paths(block_size: int, num_nodes: int) -> tuple[tuple[int, ...], ...]:
    """Every path of ranks, up to `block_size` long, that can be among the `num_nodes` most likely; parents first.

    At least as likely as a path (r_1, ..., r_l) are all paths with no larger rank at any position and no larger
    length: sum over j of prod over i <= j of (r_i + 1) of them, including itself.
    """
    found: list[tuple[int, ...]] = []

    def extend(path: tuple[int, ...], num_better: int, product: int) -> None:
        rank = 0
        while len(path) < block_size and num_better + product * (rank + 1) <= num_nodes:
            longer = (*path, rank)
            found.append(longer)
            extend(longer, num_better + product * (rank + 1), product * (rank + 1))
            rank += 1

    extend((), 0, 1)
    return tuple(sorted(found, key=len))


@dataclass(frozen=True)
class PathTable:
    """`candidate_paths` as tensors: P paths, F of them of full length k.

    Attributes:
        top_k: K, number of ranks per position that occur in a path.
        path_lengths: [P] int64, from 1.
        score_indices: [P, k] int64 into the flat [k * (K + 1)] log probabilities; column K is 0, for the
            positions behind a path's end.
        last_indices: [P] int64 into the flat [k * K] ids: the last token of the path.
        parents: [P] int64 indices of paths, -1 at the first position.
        full_paths: [F] int64 indices of the paths of length k.
        token_indices: [F, k] int64 into the flat [k * K] ids: every token of those.
    """

    top_k: int
    path_lengths: Tensor
    score_indices: Tensor
    last_indices: Tensor
    parents: Tensor
    full_paths: Tensor
    token_indices: Tensor

    def score_paths(self, log_probs: Tensor, node_log_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Score every path below each of W nodes.

        Args:
            log_probs: [B, W, k, V'] of the k positions after each node.
            node_log_probs: [B, W] log probabilities of the nodes from the root.

        Returns:
            [B, W, P] last id of each path (index into V'), [B, W, P] log probability from the root, [B, W, k * K] top
            ids of all positions, for `token_indices`.
        """
        values, ids = log_probs.topk(self.top_k)
        ids = ids.flatten(2)
        values = functional.pad(values, (0, 1)).flatten(2)
        path_log_probs = values[..., self.score_indices].sum(-1) + node_log_probs[..., None]
        return ids[..., self.last_indices], path_log_probs - LEVEL_PENALTY * self.path_lengths, ids


@cache  # recordings read the tensors of a table: none is ever dropped
def path_table(block_size: int, num_nodes: int, vocab_size: int, device: torch.device) -> PathTable:
    """The table for the `num_nodes` most likely paths (the root not counted) over a vocabulary."""
    paths = [path for path in candidate_paths(block_size, num_nodes) if max(path) < vocab_size]
    top_k = max(map(max, paths)) + 1
    index = {path: number for number, path in enumerate(paths)}
    scores = [[i * (top_k + 1) + (path[i] if i < len(path) else top_k) for i in range(block_size)] for path in paths]
    full = [number for number, path in enumerate(paths) if len(path) == block_size]
    tokens = [[i * top_k + paths[number][i] for i in range(block_size)] for number in full]

    def to_tensor(values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, device=device, dtype=torch.long)

    return PathTable(
        top_k=top_k,
        path_lengths=to_tensor([len(path) for path in paths]),
        score_indices=to_tensor(scores),
        last_indices=to_tensor([(len(path) - 1) * top_k + path[-1] for path in paths]),
        parents=to_tensor([index.get(path[:-1], -1) for path in paths]),
        full_paths=to_tensor(full),
        token_indices=to_tensor(tokens).view(-1, block_size),
    )
