"""`DraftTree`: draft continuations of each row that share prefixes; ancestor masks, depths and best-first growth.

Independent of models, caches and drafters.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.cpu.trees import SanitizedTensors, compiled_sanitize
from mmspec.engine.host_copy import from_host

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of nodes that trees are padded to, so that few shapes occur (each may become a captured CUDA graph)."""


def bucket_size(num_nodes: int) -> int:
    """Smallest bucket of at least `num_nodes` nodes.

    Raises:
        ValueError: `num_nodes` exceeds the largest bucket.
    """
    for size in BUCKETS:
        if num_nodes <= size:
            return size
    raise ValueError(f"a tree has at most {BUCKETS[-1]} nodes, root included; got {num_nodes}")


@dataclass
class DraftTree:
    """Draft trees of a batch, padded to the same number of nodes. Node 0 of each row is its last emitted token.

    Attributes:
        tokens: [B, N] int64. Node 0 is overwritten by the loop with the last emitted token.
        parents: [B, N] int64, index of each node's parent, smaller than the node's own index; -1 for node 0.
        node_mask: [B, N] bool, False for padding: rows with fewer nodes than N.
        scores: [B, N] float32, probability that the node is accepted, cumulative from the root (node 0: 1); or None if
            unknown.
        ancestor_mask: [B, N, N] bool, [b, i, j] is True if node j is node i or one of its ancestors. Set by `sanitize`.
        depths: [B, N] int64, number of edges from node 0. Set by `sanitize`.
    """

    tokens: Tensor
    parents: Tensor
    node_mask: Tensor
    scores: Tensor | None = None
    ancestor_mask: Tensor | None = None
    depths: Tensor | None = None

    def check(self, batch: int) -> None:
        """Check what `sanitize` takes for granted of the tree of any drafter.

        Args:
            batch: rows of the call.

        Raises:
            TypeError: a part is no dense tensor [batch, N] of its type.
        """
        width = self.tokens.shape[-1] if isinstance(self.tokens, Tensor) and self.tokens.dim() else 1
        shape = batch, max(width, 1)
        for name, dtype in (("tokens", torch.int64), ("parents", torch.int64), ("node_mask", torch.bool)):
            part = getattr(self, name)
            is_dense = isinstance(part, Tensor) and part.layout == torch.strided and not part.is_meta
            if not is_dense or part.dtype != dtype or part.shape != shape:
                found = f"{part.dtype} {list(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
                raise TypeError(f"{name} of a tree must be a dense {dtype} tensor {list(shape)}; got {found}")

    @property
    def num_nodes(self) -> int:
        """N, root included."""
        return self.tokens.shape[1]

    def with_root(self, root_ids: Tensor) -> DraftTree:
        """A tree of node 0 alone with other root tokens [B] int64; the other tensors are shared."""
        return DraftTree(root_ids[:, None], self.parents, self.node_mask, self.scores, self.ancestor_mask, self.depths)

    def trim(self, num_nodes: int) -> DraftTree:
        """The tree of the first `num_nodes` nodes; connected, since parents come before their children."""
        if num_nodes >= self.num_nodes:
            return self
        return replace(
            self,
            tokens=self.tokens[:, :num_nodes],
            parents=self.parents[:, :num_nodes],
            node_mask=self.node_mask[:, :num_nodes],
            scores=None if self.scores is None else self.scores[:, :num_nodes],
            ancestor_mask=None if self.ancestor_mask is None else self.ancestor_mask[:, :num_nodes, :num_nodes],
            depths=None if self.depths is None else self.depths[:, :num_nodes],
        )

    def to(self, device: torch.device) -> DraftTree:
        """The tree on `device`; itself if it is there already."""
        if self.tokens.device == device:
            return self
        tensors = {item.name: getattr(self, item.name) for item in fields(self)}
        moved = {name: tensor.to(device) for name, tensor in tensors.items() if tensor is not None}
        return replace(self, **moved)

    def pad(self, num_nodes: int) -> DraftTree:
        """The tree padded to `num_nodes` nodes: children of the root with False in `node_mask`, as in `sanitize`."""
        num_extra = num_nodes - self.num_nodes
        if num_extra <= 0:
            return self
        ancestor_mask = self.ancestor_mask
        if ancestor_mask is not None:
            ancestor_mask = functional.pad(ancestor_mask, (0, num_extra, 0, num_extra))
            ancestor_mask |= torch.eye(num_nodes, dtype=torch.bool, device=ancestor_mask.device)
            ancestor_mask[:, self.num_nodes :, 0] = True
        return DraftTree(
            tokens=functional.pad(self.tokens, (0, num_extra)),
            parents=functional.pad(self.parents, (0, num_extra)),
            node_mask=functional.pad(self.node_mask, (0, num_extra)),
            scores=None if self.scores is None else functional.pad(self.scores, (0, num_extra)),
            ancestor_mask=ancestor_mask,
            depths=None if self.depths is None else functional.pad(self.depths, (0, num_extra), value=1),
        )


def root_only(batch: int, device: torch.device | str = "cpu", root_ids: Tensor | None = None) -> DraftTree:
    """Sanitized trees of node 0 alone: plain decoding. New tensors in every call, so the caller may write into them.

    Args:
        batch: number of rows.
        device: device of the tensors.
        root_ids: [B] int64, the last emitted tokens, on `device`; None for zeros.
    """
    depths = torch.zeros(batch, 1, dtype=torch.long, device=device)
    node_mask = torch.ones(batch, 1, dtype=torch.bool, device=device)
    return DraftTree(
        tokens=torch.zeros_like(depths) if root_ids is None else root_ids[:, None],
        parents=depths - 1,
        node_mask=node_mask,
        scores=node_mask.float(),
        ancestor_mask=node_mask[:, :, None],
        depths=depths,
    )


Node = tuple[int, int, float]
"""(token, parent, score) of one draft node. Parent 0 is the root, 1 the first draft node of the row, and so on."""


def build_tree(rows: Sequence[Sequence[Node]], device: torch.device | str = "cpu") -> DraftTree:
    """Trees from lists of draft nodes on the host (without the root), one list per row, padded to a common bucket."""
    size = bucket_size(1 + max((len(nodes) for nodes in rows), default=0))
    if size == 1:
        return root_only(len(rows), device)
    padded = [[(0, -1, 1.0), *nodes, *[(0, -2, 0.0)] * (size - 1 - len(nodes))] for nodes in rows]
    device = torch.device(device)
    ids = from_host([[[node[0], node[1]] for node in nodes] for nodes in padded], device)
    scores = from_host([[node[2] for node in nodes] for nodes in padded], device)
    tokens, parents = ids.unbind(-1)
    return DraftTree(tokens=tokens, parents=parents, node_mask=parents > -2, scores=scores)


Expand = Callable[[Any], Iterable[tuple[int, float, Any]]]
"""State of a node -> (token, probability given its parent, state of the child) of its children, in any order."""


def best_first(root: Any, expand: Expand, num_nodes: int, min_score: float = 0.02) -> list[Node]:
    """The `num_nodes` - 1 descendants of the root with the highest probability, best first (DySpec, arXiv 2410.11744).

    A child's probability is at most its parent's, so every prefix of the result is a connected tree, and the best tree
    of its size under the given probabilities.

    Args:
        root: state of the root, the argument of the first call of `expand`.
        expand: lists the children of a node.
        num_nodes: size of the tree, root included.
        min_score: nodes with a smaller probability are left out.
    """
    tree: list[Node] = []
    heap: list[tuple[float, int, int, int, Any]] = []
    num_pushed = 0

    def push_children(state: Any, parent: int, parent_score: float) -> None:
        nonlocal num_pushed
        for token, probability, child in expand(state):
            score = parent_score * probability
            if score >= min_score:
                num_pushed += 1  # on equal scores the earlier, so shallower or better ranked node comes first
                heapq.heappush(heap, (-score, num_pushed, token, parent, child))

    push_children(root, 0, 1.0)
    while heap and len(tree) < num_nodes - 1:
        negative_score, _, token, parent, state = heapq.heappop(heap)
        tree.append((token, parent, -negative_score))
        if len(tree) < num_nodes - 1:
            push_children(state, len(tree), -negative_score)
    return tree


def sanitize(
    tree: DraftTree, root_ids: Tensor, draftable: Tensor, stop_ids: Tensor | None = None, max_depth: int | None = None
) -> DraftTree:
    """Make the tree of any drafter safe to score, on the device of `root_ids` and without a transfer to the host.

    A node is dropped, with all its descendants, if its id is outside the vocabulary or not draftable, if its parent
    does not come before it, or if an earlier sibling has the same token. So are the descendants of a node that ends the
    row: they can never be accepted.

    Args:
        tree: any tree.
        root_ids: [B] int64, the last emitted tokens.
        draftable: [V] bool, False for ids that must never be drafted.
        stop_ids: [E] int64, ids that end a row; None if there are none.
        max_depth: largest depth of a node, of a tree whose parents are known to come before their children and whose
            siblings differ; None for any tree.
    """
    batch, num_nodes = tree.tokens.shape
    device = root_ids.device
    if num_nodes == 1:
        return root_only(batch, device, root_ids)
    parts = (tree.tokens.to(device), tree.parents.to(device), tree.node_mask.to(device))
    checked = compiled_sanitize(*parts, root_ids, draftable, stop_ids)
    tokens, parents, node_mask, ancestor_mask, depths = checked or _sanitize(
        *parts, root_ids, draftable, stop_ids, max_depth
    )
    return replace(
        tree, tokens=tokens, parents=parents, node_mask=node_mask, ancestor_mask=ancestor_mask, depths=depths
    )


def _sanitize(
    tokens: Tensor,
    parents: Tensor,
    node_mask: Tensor,
    root_ids: Tensor,
    draftable: Tensor,
    stop_ids: Tensor | None,
    max_depth: int | None = None,
) -> SanitizedTensors:
    """`sanitize` on any device. May be recorded."""
    index = torch.arange(tokens.shape[1], device=tokens.device)
    clamped = tokens.clamp(0, draftable.shape[0] - 1)
    well_formed = node_mask & (clamped == tokens) & draftable[clamped]
    if max_depth is None:
        well_formed &= (parents >= 0) & (parents < index)
        same_parent = parents[:, :, None] == parents[:, None, :]
        same_token = clamped[:, :, None] == clamped[:, None, :]
        well_formed &= ~(same_parent & same_token & well_formed[:, None, :]).tril(-1).any(-1)
        max_depth = tokens.shape[1]
    well_formed = well_formed | (index == 0)
    # Dropped nodes become children of the root, so that their attention masks are not empty. They are never accepted.
    parents = torch.where(well_formed, parents, 0)
    parents[:, 0] = -1
    num_paths = ((parents[:, :, None] == index) | (index[:, None] == index)).float()
    for _ in range((max_depth - 1).bit_length()):  # each squaring doubles the number of generations
        num_paths = torch.matmul(num_paths, num_paths)  # positive numbers, at most 2 ** 64
    ancestor_mask = num_paths > 0
    node_mask = ~(ancestor_mask & ~well_formed[:, None, :]).any(-1)
    tokens = torch.where(well_formed, clamped, 0)
    tokens[:, 0] = root_ids
    if stop_ids is not None:
        ends_row = (tokens[:, :, None] == stop_ids).any(-1)
        ends_row[:, 0] = False
        node_mask &= ~(ancestor_mask & ends_row[:, None, :]).tril(-1).any(-1)  # ancestors come before their descendants
    return tokens, parents, node_mask, ancestor_mask, ancestor_mask.sum(-1) - 1


def first_chain(tree: DraftTree) -> DraftTree:
    """The chain from the root through the first, so best, child of each node; what is left of N are invalid nodes.

    For targets that can score no branches.
    """
    batch, num_nodes = tree.tokens.shape
    if num_nodes == 1:
        return tree
    index = torch.arange(num_nodes, device=tree.tokens.device)
    parents = tree.parents.clamp(0, num_nodes - 1)
    valid = tree.node_mask & (tree.parents < index)
    has_earlier_sibling = ((parents[:, :, None] == parents[:, None, :]) & valid[:, None, :]).tril(-1)[:, :, 1:].any(-1)
    is_first = valid & ~has_earlier_sibling
    is_first[:, 0] = True
    parents[:, 0] = 0
    ancestor = (
        parents  # pointer doubling: after the loop a node is in the chain if all its ancestors are first children
    )
    for _ in range((num_nodes - 1).bit_length()):
        is_first = is_first & is_first.gather(1, ancestor)
        ancestor = ancestor.gather(1, ancestor)
    order = (~is_first).to(torch.uint8).sort(dim=1, stable=True).indices
    return replace(
        tree,
        tokens=tree.tokens.gather(1, order),
        parents=(index - 1).expand(batch, -1).contiguous(),
        node_mask=is_first.gather(1, order),
        scores=None if tree.scores is None else tree.scores.gather(1, order),
    )


def replace_with_chain(tree: DraftTree, rows: Tensor, token: int | Tensor) -> DraftTree:
    """Replace the trees of some rows by a chain of one token: the padding of finished rows.

    Args:
        tree: a sanitized tree.
        rows: [B] bool, the rows to replace.
        token: the pad id, a number or a scalar int64 tensor.
    """
    index = torch.arange(tree.num_nodes, device=rows.device)
    replaced = rows[:, None]
    is_root = index == 0
    assert tree.ancestor_mask is not None and tree.depths is not None
    return replace(
        tree,
        tokens=torch.where(replaced & ~is_root, token, tree.tokens),
        parents=torch.where(replaced, index - 1, tree.parents),
        node_mask=tree.node_mask | replaced,
        ancestor_mask=torch.where(replaced[:, :, None], index[:, None] >= index, tree.ancestor_mask),
        depths=torch.where(replaced, index, tree.depths),
    )
