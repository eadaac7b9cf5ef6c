"""`DraftTree`: guessed continuations of each row, sharing their beginnings; its masks, depths and best-first growth.

Knows nothing of models, caches or where guesses come from.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
"""Sizes that trees are padded to, so that few shapes ever occur (and each can become a captured graph)."""


def bucket_size(nodes: int) -> int:
    """Smallest bucket that holds `nodes` nodes."""
    for size in BUCKETS:
        if nodes <= size:
            return size
    raise ValueError(f"a tree may have at most {BUCKETS[-1]} nodes, the root counted; got {nodes}")


@dataclass
class DraftTree:
    """Draft trees of a batch, padded to the same number of nodes. Node 0 of each row is its last emitted token.

    Attributes:
        tokens: [B, N] int64. Column 0 is overwritten by the caller with the last emitted tokens.
        parents: [B, N] int64, index of each node's parent, always smaller than the node's own; -1 for node 0.
        valid: [B, N] bool, False where a row has fewer nodes than N.
        scores: [B, N] float32 probability that the node is reached (node 0: 1), or None if the drafter cannot tell.
        ancestors: [B, N, N] bool, [b, i, j] = node j is node i or above it. None until `seal`.
        depths: [B, N] int64, number of steps below node 0. None until `seal`.
    """

    tokens: Tensor
    parents: Tensor
    valid: Tensor
    scores: Tensor | None = None
    ancestor_mask: Tensor | None = None
    depths: Tensor | None = None

    @property
    def num_nodes(self) -> int:
        """N, the root counted."""
        return self.tokens.shape[1]

    def trim(self, nodes: int) -> DraftTree:
        """The tree of the first `nodes` nodes (parents come first, so it is connected)."""
        if nodes >= self.num_nodes:
            return self
        return replace(
            self,
            tokens=self.tokens[:, :nodes],
            parents=self.parents[:, :nodes],
            valid=self.valid[:, :nodes],
            scores=None if self.scores is None else self.scores[:, :nodes],
            ancestor_mask=None if self.ancestor_mask is None else self.ancestor_mask[:, :nodes, :nodes],
            depths=None if self.depths is None else self.depths[:, :nodes],
        )

    def to(self, device: torch.device) -> DraftTree:
        """The tree on another device; itself if it is there already."""
        if self.tokens.device == device:
            return self
        moved = {item.name: part.to(device) for item in fields(self) if (part := getattr(self, item.name)) is not None}
        return replace(self, **moved)

    def pad(self, nodes: int) -> DraftTree:
        """The tree with places for `nodes` nodes, the new ones empty."""
        more = nodes - self.num_nodes
        if more <= 0:
            return self
        return DraftTree(
            tokens=functional.pad(self.tokens, (0, more)),
            parents=functional.pad(self.parents, (0, more)),
            valid=functional.pad(self.valid, (0, more)),
            scores=None if self.scores is None else functional.pad(self.scores, (0, more)),
        )


@lru_cache(maxsize=64)
def _root_only(batch: int, device: torch.device) -> DraftTree:
    """Made once per shape, since plain decoding asks for it in every round; nobody writes into it."""
    return DraftTree(
        tokens=torch.zeros(batch, 1, dtype=torch.long, device=device),
        parents=torch.full((batch, 1), -1, dtype=torch.long, device=device),
        valid=torch.ones(batch, 1, dtype=torch.bool, device=device),
        scores=torch.ones(batch, 1, device=device),
        ancestor_mask=torch.ones(batch, 1, 1, dtype=torch.bool, device=device),
        depths=torch.zeros(batch, 1, dtype=torch.long, device=device),
    )


def root_only(batch: int, device: torch.device | str = "cpu") -> DraftTree:
    """`batch` trees of node 0 alone: plain decoding. Shared, so not to be written into."""
    return _root_only(batch, torch.device(device))


Node = tuple[int, int, float]
"""(token, parent, score) of one guessed node; parents count the root as 0, the first guessed node as 1, ..."""


def build_tree(rows: Sequence[Sequence[Node]], device: torch.device | str = "cpu") -> DraftTree:
    """Trees from host lists, one list of nodes per row (the root left out), padded to a common bucket."""
    size = bucket_size(1 + max((len(nodes) for nodes in rows), default=0))
    if size == 1:
        return root_only(len(rows), device)
    filled = [[(0, -1, 1.0), *nodes, *[(0, -2, 0.0)] * (size - 1 - len(nodes))] for nodes in rows]
    whole = torch.tensor([[[node[0], node[1]] for node in nodes] for nodes in filled], device=device)
    scores = torch.tensor([[node[2] for node in nodes] for nodes in filled], device=device)
    tokens, parents = whole.unbind(-1)
    return DraftTree(tokens=tokens, parents=parents, valid=parents > -2, scores=scores)


Expand = Callable[[Any], Iterable[tuple[int, float, Any]]]
"""cursor -> (token, probability given its parent, cursor of the child), in any order."""


def best_first(root: Any, expand: Expand, nodes: int, min_score: float = 0.02) -> list[Node]:
    """Best-first growth (DySpec's order): the `nodes` - 1 likeliest nodes below `root`, likeliest first.

    A child is never likelier than its parent, so every prefix of the result is a connected tree, and the best one of
    its size under the given probabilities. Nodes reached with less than `floor` are not worth a place.
    """
    grown: list[Node] = []
    heap: list[tuple[float, int, int, int, Any]] = []
    ticket = 0

    def offer(cursor: Any, parent: int, reached: float) -> None:
        nonlocal ticket
        for token, probability, child in expand(cursor):
            score = reached * probability
            if score >= min_score:
                ticket += 1  # ties go to the older offer, so the shallower and the better ranked
                heapq.heappush(heap, (-score, ticket, token, parent, child))

    offer(root, 0, 1.0)
    while heap and len(grown) < nodes - 1:
        score, _, token, parent, cursor = heapq.heappop(heap)
        grown.append((token, parent, -score))
        if len(grown) < nodes - 1:
            offer(cursor, len(grown), -score)
    return grown


def sanitize(tree: DraftTree, roots: Tensor, draftable: Tensor) -> DraftTree:
    """Make a tree from anyone safe to score, on `roots`' device and without looking at a value on the host.

    A node is dropped, with all below it, if its id is outside the vocabulary or not allowed, if its parent does not
    come before it, or if an earlier sibling has the same token.

    Args:
        roots: [B] int64, the last emitted tokens.
        allowed: [V] bool, False for ids that must never be drafted.
    """
    batch, nodes = tree.tokens.shape
    device = roots.device
    if nodes == 1:
        return replace(_root_only(batch, device), tokens=roots[:, None])
    index = torch.arange(nodes, device=device)
    tokens, parents = tree.tokens.to(device), tree.parents.to(device)
    known = tokens.clamp(0, draftable.shape[0] - 1)
    good = tree.valid.to(device) & (known == tokens) & draftable[known] & (parents >= 0) & (parents < index)
    twins = (parents[:, :, None] == parents[:, None, :]) & (known[:, :, None] == known[:, None, :]) & good[:, None, :]
    good &= ~twins.tril(-1).any(-1)
    good[:, 0] = True
    # Dropped nodes hang below the root, so that their masks are finite; they are never reached.
    parents = torch.where(good, parents, 0)
    parents[:, 0] = -1
    ancestors = parents[:, :, None] == index
    ancestors |= index[:, None] == index
    for _ in range((nodes - 1).bit_length()):  # each squaring doubles the reach
        ancestors = torch.matmul(ancestors.float(), ancestors.float()) > 0
    valid = ~(ancestors & ~good[:, None, :]).any(-1)
    tokens = torch.where(good, known, 0)
    tokens[:, 0] = roots
    return replace(
        tree,
        tokens=tokens,
        parents=parents,
        valid=valid,
        ancestor_mask=ancestors,
        depths=ancestors.sum(-1) - 1,
    )


def replace_with_chain(tree: DraftTree, rows: Tensor, token: Tensor) -> DraftTree:
    """Replace the trees of some rows by a chain of one token: what a finished row is fed while others go on.

    Args:
        rows: [B] bool, the rows to replace. token: scalar int64, the pad id.
    """
    nodes = tree.num_nodes
    index = torch.arange(nodes, device=rows.device)
    pick = rows[:, None]
    root = index == 0
    assert tree.ancestor_mask is not None and tree.depths is not None
    return replace(
        tree,
        tokens=torch.where(pick & ~root, token, tree.tokens),
        parents=torch.where(pick, index - 1, tree.parents),
        valid=tree.valid | pick,
        ancestor_mask=torch.where(pick[:, :, None], index[:, None] >= index, tree.ancestor_mask),
        depths=torch.where(pick, index, tree.depths),
    )
