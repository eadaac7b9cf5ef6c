"""The re-ranking of EAGLE-2 (arXiv 2406.16858, section 4.2): the most likely of all candidate nodes make the tree.

Probabilities are those under the noise with which the target is sampled (`next_log_probs`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.engine.tree import DraftTree

LEVEL_PENALTY = 1e-5
"""Subtracted from the log probability per level, so that a child of probability 1 still ranks after its parent."""


def next_log_probs(logits: Tensor, temperature: float | Tensor, log_noise: Tensor | None) -> Tensor:
    """[..., V] log probability of each next token: of the argmax, or of the sample under the given noise.

    Args:
        logits: [..., V] float32.
        temperature: of the sampling, a number or a scalar tensor.
        log_noise: [..., V] logarithm of the exponential noise; None for greedy decoding.
    """
    if log_noise is None:
        return logits.log_softmax(-1)
    return ((logits / temperature).log_softmax(-1) - log_noise).log_softmax(-1)


class NodePool:
    """Candidate nodes of a draft, added level by level or block by block; parents before their children.

    Attributes:
        num_nodes: nodes per batch row so far, which is the pool index of the next one.
    """

    def __init__(self) -> None:
        self.num_nodes = 0
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, tokens: Tensor, path_log_probs: Tensor, parents: Tensor) -> None:
        """Append nodes; arguments [B, n] as in `select_nodes`."""
        self._parts.append((tokens, path_log_probs, parents))
        self.num_nodes += tokens.shape[1]

    def select(self, draft_ids: Tensor | None, max_nodes: int) -> DraftTree:
        """The tree of the most likely nodes, see `select_nodes`."""
        tokens, path_log_probs, parents = (torch.cat(parts, dim=1) for parts in zip(*self._parts, strict=True))
        return select_nodes(draft_ids, tokens, path_log_probs, parents, max_nodes=max_nodes)


def select_nodes(
    draft_ids: Tensor | None, tokens: Tensor, path_log_probs: Tensor, parents: Tensor, *, max_nodes: int
) -> DraftTree:
    """The `max_nodes` - 1 most likely nodes, most likely first; a parent must be likelier than its children.

    Args:
        draft_ids: [V'] target ids of the draft vocabulary; None if `tokens` are target ids.
        tokens: [B, P] int64.
        path_log_probs: [B, P] log probabilities of the paths from the root.
        parents: [B, P] int64 indices of nodes, -1 for the root.
        max_nodes: size of the tree, the root included.
    """
    path_log_probs, chosen = path_log_probs.topk(min(max_nodes - 1, path_log_probs.shape[1]))
    tree_index = torch.arange(1, chosen.shape[1] + 1, device=tokens.device).expand(chosen.shape)
    tree_index_of = torch.zeros_like(tokens).scatter(1, chosen, tree_index)
    parents = parents.gather(1, chosen)
    parents = torch.where(parents < 0, 0, tree_index_of.gather(1, parents.clamp(min=0)))
    tokens = tokens.gather(1, chosen)
    tokens = tokens if draft_ids is None else draft_ids[tokens]
    return DraftTree(
        tokens=functional.pad(tokens, (1, 0)),
        parents=functional.pad(parents, (1, 0), value=-1),
        node_mask=functional.pad(path_log_probs > float("-inf"), (1, 0), value=True),
        scores=functional.pad(path_log_probs.exp(), (1, 0), value=1.0),
    )
