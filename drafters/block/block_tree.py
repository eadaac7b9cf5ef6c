"""From the distributions of one block to a draft tree: best-first search over products, without a loop over nodes.

A forward of a block drafter gives a distribution for each of k positions. A path is a rank at each of them. A path is
among the N likeliest only if all paths with ranks at most as high are among them too, so a short table that depends on
k and N alone holds every candidate (`candidate_paths`), and one top-k over the table selects the tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.engine.tree import DraftTree

LEVEL_PENALTY = 1e-5
"""Subtracted from the log probability per level, so that a child of probability 1 still ranks after its parent."""


@lru_cache(maxsize=64)
def candidate_paths(block_size: int, num_nodes: int) -> tuple[tuple[int, ...], ...]:
    """Every path of ranks, up to `block_size` long, that can be among the `num_nodes` most likely; parents first.

    At least as likely as a path (r_1, ..., r_l) are all paths with at most its rank at each position and at most its
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
        block_size: k.
        top_k: K, number of ranks per position that occur in a path.
        path_lengths: [P] int64, from 1.
        step_indices: [P, k] int64 into the flat [k * (K + 1)] log probabilities; column K is 0, for absent steps.
        last_indices: [P] int64 into the flat [k * K] ids: the last step.
        parents: [P] int64 indices of paths, -1 on the first level.
        full_paths: [F] int64 indices of the paths of length k.
        token_indices: [F, k] int64 into the flat [k * K] ids: every step of those.
    """

    block_size: int
    top_k: int
    path_lengths: Tensor
    step_indices: Tensor
    last_indices: Tensor
    parents: Tensor
    full_paths: Tensor
    token_indices: Tensor

    @classmethod
    def build(cls, block_size: int, num_nodes: int, vocab_size: int, device: torch.device) -> PathTable:
        """The table for the `num_nodes` most likely paths (the root not counted) over a vocabulary."""
        paths = [path for path in candidate_paths(block_size, num_nodes) if max(path) < vocab_size]
        top_k = max(map(max, paths)) + 1
        index = {path: number for number, path in enumerate(paths)}
        steps = [
            [step * (top_k + 1) + (path[step] if step < len(path) else top_k) for step in range(block_size)]
            for path in paths
        ]
        full = [number for number, path in enumerate(paths) if len(path) == block_size]
        tokens = [[step * top_k + paths[number][step] for step in range(block_size)] for number in full]

        def to_tensor(values: list[int] | list[list[int]]) -> Tensor:
            return torch.tensor(values, device=device, dtype=torch.long)

        return cls(
            block_size=block_size,
            top_k=top_k,
            path_lengths=to_tensor([len(path) for path in paths]),
            step_indices=to_tensor(steps),
            last_indices=to_tensor([(len(path) - 1) * top_k + path[-1] for path in paths]),
            parents=to_tensor([index.get(path[:-1], -1) for path in paths]),
            full_paths=to_tensor(full),
            token_indices=to_tensor(tokens).view(-1, block_size),
        )

    def score_paths(self, log_probs: Tensor, beam_scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Score every path behind each of W followed nodes.

        Args:
            log_probs: [B, W, k, V'] of the k positions.
            beam_scores: [B, W] log probabilities of the followed nodes.

        Returns:
            [B, W, P] last id of each path (index into V'), [B, W, P] log probability of each path, [B, W, k * K] top
            ids of all positions, for `token_indices`.
        """
        values, ids = log_probs.topk(self.top_k)
        ids = ids.flatten(2)
        values = functional.pad(values, (0, 1)).flatten(2)
        scores = values[..., self.step_indices].sum(-1) + beam_scores[..., None] - LEVEL_PENALTY * self.path_lengths
        return ids[..., self.last_indices], scores, ids


def select_nodes(
    draft_ids: Tensor | None, tokens: Tensor, scores: Tensor, parents: Tensor, *, num_nodes: int
) -> DraftTree:
    """The `num_nodes` - 1 most likely nodes of a pool, most likely first; a parent is likelier than its children.

    Args:
        draft_ids: [V'] target ids of the draft vocabulary; None if `tokens` are target ids.
        tokens: [B, P] int64.
        scores: [B, P] log probabilities.
        parents: [B, P] int64 indices into the pool, -1 for the root.
        num_nodes: size of the tree, the root included.
    """
    scores, chosen = scores.topk(min(num_nodes - 1, scores.shape[1]))
    node_index = torch.arange(1, chosen.shape[1] + 1, device=tokens.device).expand(chosen.shape)
    node_of = torch.zeros_like(tokens).scatter(1, chosen, node_index)
    parents = parents.gather(1, chosen)
    parents = torch.where(parents < 0, 0, node_of.gather(1, parents.clamp(min=0)))
    tokens = tokens.gather(1, chosen)
    tokens = tokens if draft_ids is None else draft_ids[tokens]
    return DraftTree(
        tokens=functional.pad(tokens, (1, 0)),
        parents=functional.pad(parents, (1, 0), value=-1),
        node_mask=functional.pad(scores > float("-inf"), (1, 0), value=True),
        scores=functional.pad(scores.exp(), (1, 0), value=1.0),
    )


__all__ = ["LEVEL_PENALTY", "PathTable", "candidate_paths", "select_nodes"]
