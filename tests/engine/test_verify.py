"""`accept_path` against a slow reference, row by row. No model."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from mmspec.engine.accept import accept_path
from mmspec.engine.tree import DraftTree, build_tree, replace_with_chain, root_only, sanitize


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


def chain(tokens: list[int]) -> DraftTree:
    """One row: a chain below root 9."""
    tree = build_tree([[(token, i, 1.0) for i, token in enumerate(tokens)]])
    return sanitize(tree, torch.tensor([9]), torch.ones(100, dtype=torch.bool))


def test_everything_accepted_emits_one_more_token() -> None:
    tree = chain([1, 2, 3])
    path, counts, tokens = accept_path(tree, torch.tensor([[1, 2, 3, 50]]), torch.tensor([4]))
    assert (path.tolist(), counts.tolist(), tokens.tolist()) == ([[0, 1, 2, 3]], [4], [[1, 2, 3, 50]])


def test_nothing_accepted_emits_the_sampled_id() -> None:
    _, counts, tokens = accept_path(chain([1, 2, 3]), torch.tensor([[50, 2, 3, 4]]), torch.tensor([4]))
    assert counts.tolist() == [1] and tokens[0, 0] == 50


def test_a_match_below_a_mismatch_is_not_accepted() -> None:
    _, counts, tokens = accept_path(chain([1, 2, 3]), torch.tensor([[1, 50, 3, 4]]), torch.tensor([4]))
    assert counts.tolist() == [2] and tokens[0, :2].tolist() == [1, 50]


@pytest.mark.parametrize("row_limit", range(5))
def test_limits_cut_a_path(row_limit: int) -> None:
    sampled_ids = torch.tensor([[1, 2, 3, 4]])
    path, counts, tokens = accept_path(chain([1, 2, 3]), sampled_ids, torch.tensor([row_limit]))
    assert counts.tolist() == [row_limit] and tokens[0, :row_limit].tolist() == [1, 2, 3, 4][:row_limit]
    assert path[0, :row_limit].tolist() == [0, 1, 2, 3][:row_limit]


def test_a_stop_id_within_a_path_is_the_last_token() -> None:
    sampled_ids = torch.tensor([[1, 2, 3, 4]])
    for stop, count in ((1, 1), (2, 2), (3, 3), (4, 4), (5, 4)):
        assert check(chain([1, 2, 3]), sampled_ids, torch.tensor([4]), torch.tensor([stop])) == [count]
    assert check(chain([1, 2, 3]), sampled_ids, torch.tensor([4]), torch.tensor([3, 2, 4])) == [2]
    assert check(chain([1, 2, 3]), sampled_ids, torch.tensor([1]), torch.tensor([2])) == [1], "the limit comes first"


def test_a_stop_id_at_a_node_that_is_not_accepted_has_no_effect() -> None:
    tree = build_tree([[(1, 0, 1.0), (2, 0, 1.0), (3, 1, 1.0)]])
    tree = sanitize(tree, torch.tensor([9]), torch.ones(100, dtype=torch.bool))
    assert check(tree, torch.tensor([[1, 3, 7, 8]]), torch.tensor([4]), torch.tensor([7])) == [3]


def test_finished_rows_emit_pads_even_if_the_pad_is_a_stop_id() -> None:
    tree = sanitize(root_only(2).pad(4), torch.tensor([0, 0]), torch.ones(100, dtype=torch.bool))
    finished = torch.tensor([True, False])
    tree = replace_with_chain(tree, finished, torch.tensor(0))
    sampled_ids = torch.tensor([[0, 0, 0, 0], [0, 5, 5, 5]])
    assert check(tree, sampled_ids, torch.tensor([3, 4]), torch.tensor([0]), finished) == [3, 1]


def test_root_only_is_one_step() -> None:
    path, counts, tokens = accept_path(
        root_only(3), torch.tensor([[4], [5], [6]]), torch.tensor([1, 0, 9]), torch.tensor([4])
    )
    assert path.tolist() == [[0], [0], [0]] and counts.tolist() == [1, 0, 1] and tokens.tolist() == [[4], [5], [6]]
