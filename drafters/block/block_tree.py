"""From what one pass says of several coming tokens to a draft tree: best-first over products, no loop over nodes.

A pass of a semi-autoregressive drafter gives a distribution for each of k coming positions. A path is a rank at each of
them. Among the N likeliest nodes there are only paths all of whose betters are among them too, so a short table that
hangs on k and N alone holds every candidate (`paths`), and one top-k over the table finds the tree. Knows tensors only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.engine.tree import DraftTree

LEVEL_PENALTY = 1e-5
"""What every level costs in log probability, so that a certain child still comes after its parent."""


@lru_cache(maxsize=64)
def candidate_paths(block_size: int, num_nodes: int) -> tuple[tuple[int, ...], ...]:
    """Every path of ranks, up to `slots` long, that may be among the `nodes` likeliest, parents first.

    At least as likely as a path are all that have at most its rank at each of their places: there are
    sum over j of prod over i <= j of (rank_i + 1) of them, itself counted.
    """
    found: list[tuple[int, ...]] = []

    def grow(path: tuple[int, ...], above: int, product: int) -> None:
        rank = 0
        while len(path) < block_size and above + product * (rank + 1) <= num_nodes:
            longer = (*path, rank)
            found.append(longer)
            grow(longer, above + product * (rank + 1), product * (rank + 1))
            rank += 1

    grow((), 0, 1)
    return tuple(sorted(found, key=len))


@dataclass(frozen=True)
class PathTable:
    """`paths` as tensors; P of them, of at most k ranks below `ranks`.

    Attributes:
        slots, ranks: k, and how many ranks are looked at. depth: [P] length of each, from 1.
        steps: [P, k] int64 into the flat [k * (ranks + 1)] chances, whose last column is 0, for steps not taken.
        last: [P] int64 into the flat [k * ranks] tokens. parent: [P] int64, -1 at the first level.
        full: [F] int64, the paths of all k steps. tokens: [F, k] int64 into the flat tokens, every step of those.
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
        """For the `nodes` likeliest (the root not counted) over a vocabulary of that size."""
        listed = [path for path in candidate_paths(block_size, num_nodes) if max(path) < vocab_size]
        ranks = max(map(max, listed)) + 1
        place = {path: number for number, path in enumerate(listed)}
        steps = [[s * (ranks + 1) + (p[s] if s < len(p) else ranks) for s in range(block_size)] for p in listed]
        last = [(len(path) - 1) * ranks + path[-1] for path in listed]
        parent = [place.get(path[:-1], -1) for path in listed]
        full = [number for number, path in enumerate(listed) if len(path) == block_size]
        tokens = [[s * ranks + listed[number][s] for s in range(block_size)] for number in full]
        parts = ([len(path) for path in listed], steps, last, parent, full, tokens)
        depths, *made, rows = (torch.tensor(part, device=device, dtype=torch.long) for part in parts)
        return cls(block_size, ranks, depths, made[0], made[1], made[2], made[3], rows.view(-1, block_size))

    def score_paths(self, log_probs: Tensor, beam_scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What a pass offers behind each of W followed nodes.

        Args:
            chances: [B, W, k, V'] log probabilities. reached: [B, W] of the nodes themselves.

        Returns:
            [B, W, P] ids (of V'), [B, W, P] log probabilities of the paths, [B, W, k * ranks] all ids that were looked
            at, for `tokens`.
        """
        values, ids = log_probs.topk(self.top_k)
        ids = ids.flatten(2)
        values = functional.pad(values, (0, 1)).flatten(2)
        totals = values[..., self.step_indices].sum(-1) + beam_scores[..., None] - LEVEL_PENALTY * self.path_lengths
        return ids[..., self.last_indices], totals, ids


def select_nodes(
    draft_ids: Tensor | None, tokens: Tensor, scores: Tensor, parents: Tensor, *, num_nodes: int
) -> DraftTree:
    """The likeliest `nodes` - 1 of a pool, likeliest first; a parent is likelier than its children.

    Args:
        ids: [V'] what the tokens stand for, None for themselves. tokens, reached: [B, P], the latter log probabilities.
        parents: [B, P] places in the pool, -1 for the root.
    """
    scores, chosen = scores.topk(min(num_nodes - 1, scores.shape[1]))
    places = torch.arange(1, chosen.shape[1] + 1, device=tokens.device).expand(chosen.shape)
    rank = torch.zeros_like(tokens).scatter(1, chosen, places)
    parents = parents.gather(1, chosen)
    parents = torch.where(parents < 0, 0, rank.gather(1, parents.clamp(min=0)))
    tokens = tokens.gather(1, chosen)
    tokens = tokens if draft_ids is None else draft_ids[tokens]
    return DraftTree(
        tokens=functional.pad(tokens, (1, 0)),
        parents=functional.pad(parents, (1, 0), value=-1),
        valid=functional.pad(scores > float("-inf"), (1, 0), value=True),
        scores=functional.pad(scores.exp(), (1, 0), value=1.0),
    )


__all__ = ["LEVEL_PENALTY", "PathTable", "select_nodes", "candidate_paths"]
