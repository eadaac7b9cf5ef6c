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

STEP = 1e-5
"""What every level costs in log probability, so that a certain child still comes after its parent."""


@lru_cache(maxsize=64)
def paths(slots: int, nodes: int) -> tuple[tuple[int, ...], ...]:
    """Every path of ranks, up to `slots` long, that may be among the `nodes` likeliest, parents first.

    At least as likely as a path are all that have at most its rank at each of their places: there are
    sum over j of prod over i <= j of (rank_i + 1) of them, itself counted.
    """
    found: list[tuple[int, ...]] = []

    def grow(path: tuple[int, ...], above: int, product: int) -> None:
        rank = 0
        while len(path) < slots and above + product * (rank + 1) <= nodes:
            longer = (*path, rank)
            found.append(longer)
            grow(longer, above + product * (rank + 1), product * (rank + 1))
            rank += 1

    grow((), 0, 1)
    return tuple(sorted(found, key=len))


@dataclass(frozen=True)
class Table:
    """`paths` as tensors; P of them, of at most k ranks below `ranks`.

    Attributes:
        slots, ranks: k, and how many ranks are looked at. depth: [P] length of each, from 1.
        steps: [P, k] int64 into the flat [k * (ranks + 1)] chances, whose last column is 0, for steps not taken.
        last: [P] int64 into the flat [k * ranks] tokens. parent: [P] int64, -1 at the first level.
        full: [F] int64, the paths of all k steps. tokens: [F, k] int64 into the flat tokens, every step of those.
    """

    slots: int
    ranks: int
    depth: Tensor
    steps: Tensor
    last: Tensor
    parent: Tensor
    full: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, slots: int, nodes: int, vocab: int, device: torch.device) -> Table:
        """For the `nodes` likeliest (the root not counted) over a vocabulary of that size."""
        listed = [path for path in paths(slots, nodes) if max(path) < vocab]
        ranks = max(map(max, listed)) + 1
        place = {path: number for number, path in enumerate(listed)}
        steps = [[s * (ranks + 1) + (p[s] if s < len(p) else ranks) for s in range(slots)] for p in listed]
        last = [(len(path) - 1) * ranks + path[-1] for path in listed]
        parent = [place.get(path[:-1], -1) for path in listed]
        full = [number for number, path in enumerate(listed) if len(path) == slots]
        tokens = [[s * ranks + listed[number][s] for s in range(slots)] for number in full]
        parts = ([len(path) for path in listed], steps, last, parent, full, tokens)
        depths, *made, rows = (torch.tensor(part, device=device, dtype=torch.long) for part in parts)
        return cls(slots, ranks, depths, made[0], made[1], made[2], made[3], rows.view(-1, slots))

    def offers(self, chances: Tensor, reached: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What a pass offers behind each of W followed nodes.

        Args:
            chances: [B, W, k, V'] log probabilities. reached: [B, W] of the nodes themselves.

        Returns:
            [B, W, P] ids (of V'), [B, W, P] log probabilities of the paths, [B, W, k * ranks] all ids that were looked
            at, for `tokens`.
        """
        values, ids = chances.topk(self.ranks)
        ids = ids.flatten(2)
        values = functional.pad(values, (0, 1)).flatten(2)
        totals = values[..., self.steps].sum(-1) + reached[..., None] - STEP * self.depth
        return ids[..., self.last], totals, ids


def best(ids: Tensor | None, tokens: Tensor, reached: Tensor, parents: Tensor, *, nodes: int) -> DraftTree:
    """The likeliest `nodes` - 1 of a pool, likeliest first; a parent is likelier than its children.

    Args:
        ids: [V'] what the tokens stand for, None for themselves. tokens, reached: [B, P], the latter log probabilities.
        parents: [B, P] places in the pool, -1 for the root.
    """
    scores, chosen = reached.topk(min(nodes - 1, reached.shape[1]))
    places = torch.arange(1, chosen.shape[1] + 1, device=tokens.device).expand(chosen.shape)
    rank = torch.zeros_like(tokens).scatter(1, chosen, places)
    parents = parents.gather(1, chosen)
    parents = torch.where(parents < 0, 0, rank.gather(1, parents.clamp(min=0)))
    tokens = tokens.gather(1, chosen)
    tokens = tokens if ids is None else ids[tokens]
    return DraftTree(
        tokens=functional.pad(tokens, (1, 0)),
        parents=functional.pad(parents, (1, 0), value=-1),
        valid=functional.pad(scores > float("-inf"), (1, 0), value=True),
        scores=functional.pad(scores.exp(), (1, 0), value=1.0),
    )


__all__ = ["STEP", "Table", "best", "paths"]
