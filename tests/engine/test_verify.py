"""`accept_path` against a slow reference, row by row. No model."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from mmspec.engine.accept import accept_path
from mmspec.engine.tree import DraftTree, replace_with_chain, sanitize


def slow_accept_path(
    tree: DraftTree, row: int, sampled_ids: list[int], row_limit: int, stop_ids: set[int], finished: bool
) -> tuple[list[int], list[int]]:
    """(accepted nodes, emitted tokens) of one row, one step at a time."""
    tokens, parents, node_mask = tree.tokens[row].tolist(), tree.parents[row].tolist(), tree.node_mask[row].tolist()
    path: list[int] = []
    emitted: list[int] = []
    node: int | None = 0
    while node is not None and len(emitted) < row_limit:
        path.append(node)
        emitted.append(sampled_ids[node])
        if emitted[-1] in stop_ids and not finished:
            break
        fits = [i for i, t in enumerate(tokens) if i and node_mask[i] and parents[i] == node and t == emitted[-1]]
        assert len(fits) <= 1, "duplicate siblings in a sanitized tree"
        node = fits[0] if fits else None
    return path, emitted


def check(
    tree: DraftTree,
    sampled_ids: Tensor,
    max_emit: Tensor,
    stop_ids: Tensor | None = None,
    finished: Tensor | None = None,
) -> list[int]:
    """Compare all rows with the reference; returns the counts."""
    inputs = [part.clone() for part in (sampled_ids, max_emit, tree.tokens)]
    path, counts, tokens = accept_path(tree, sampled_ids, max_emit, stop_ids, finished)
    assert path.shape == tokens.shape == sampled_ids.shape and counts.shape == max_emit.shape
    assert {path.dtype, counts.dtype, tokens.dtype} == {torch.long}
    assert all(torch.equal(a, b) for a, b in zip(inputs, (sampled_ids, max_emit, tree.tokens), strict=True))
    stop_set = set() if stop_ids is None else set(stop_ids.tolist())
    for row in range(sampled_ids.shape[0]):
        is_finished = finished is not None and bool(finished[row])
        want = slow_accept_path(tree, row, sampled_ids[row].tolist(), int(max_emit[row]), stop_set, is_finished)
        count = int(counts[row])
        assert (path[row, :count].tolist(), tokens[row, :count].tolist()) == want
    assert ((path >= 0) & (path < tree.num_nodes)).all(), "indices out of range"
    return counts.tolist()


def random_sanitized(rng: random.Random, batch: int, nodes: int, vocab: int) -> DraftTree:
    """Sanitized trees with dropped nodes of every kind."""
    tokens = torch.tensor([[rng.randrange(-1, vocab + 1) for _ in range(nodes)] for _ in range(batch)])
    deep = rng.random()
    parents = [[i - 1 if rng.random() < deep else rng.randrange(-1, i + 1) for i in range(nodes)] for _ in range(batch)]
    node_mask = torch.tensor([[rng.random() < 0.9 for _ in range(nodes)] for _ in range(batch)])
    root_ids = torch.tensor([rng.randrange(vocab) for _ in range(batch)])
    return sanitize(DraftTree(tokens, torch.tensor(parents), node_mask), root_ids, torch.ones(vocab, dtype=torch.bool))


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("vocab", [2, 4])
def test_accept_path_equals_the_reference(nodes: int, vocab: int) -> None:
    rng, counts = random.Random(f"walk {nodes} {vocab}"), set[int]()
    for number in range(40):
        batch = rng.choice((1, 3, 16))
        tree = random_sanitized(rng, batch, nodes, vocab)
        finished = torch.tensor([rng.random() < 0.3 for _ in range(batch)]) if number % 2 else None
        if finished is not None and number % 4 == 1 and nodes > 1:
            tree = replace_with_chain(tree, finished, torch.tensor(1))
        sampled_ids = torch.tensor([[rng.randrange(vocab) for _ in range(nodes)] for _ in range(batch)])
        if finished is not None:
            sampled_ids = torch.where(finished[:, None], 1, sampled_ids)
        max_emit = torch.tensor([rng.randint(0, nodes) for _ in range(batch)])
        stop_ids = rng.choice((None, torch.tensor([0]), torch.tensor([1]), torch.tensor([0, 1]), torch.tensor([77])))
        counts.update(check(tree, sampled_ids, max_emit, stop_ids, finished))
    assert len(counts) > min(nodes, 4), f"only counts {counts}"
