"""The walk through a scored tree against a slow reference, row by row. No model here."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from mmspec.engine.tree import DraftTree, build_tree, replace_with_chain, root_only, sanitize
from mmspec.engine.verify import accept_path


def slow_walk(
    tree: DraftTree, row: int, picks: list[int], limit: int, stops: set[int], ended: bool
) -> tuple[list[int], list[int]]:
    """(nodes walked, tokens emitted) of one row, one step at a time."""
    tokens, parents, valid = tree.tokens[row].tolist(), tree.parents[row].tolist(), tree.valid[row].tolist()
    path: list[int] = []
    emitted: list[int] = []
    node: int | None = 0
    while node is not None and len(emitted) < limit:
        path.append(node)
        emitted.append(picks[node])
        if emitted[-1] in stops and not ended:
            break
        fits = [i for i, t in enumerate(tokens) if i and valid[i] and parents[i] == node and t == emitted[-1]]
        assert len(fits) <= 1, "twins in a sealed tree"
        node = fits[0] if fits else None
    return path, emitted


def check(
    tree: DraftTree, picks: Tensor, limits: Tensor, stops: Tensor | None = None, ended: Tensor | None = None
) -> list[int]:
    """Compare all rows with the slow way; the counts."""
    inputs = [part.clone() for part in (picks, limits, tree.tokens)]
    path, counts, tokens = accept_path(tree, picks, limits, stops, ended)
    assert path.shape == tokens.shape == picks.shape and counts.shape == limits.shape
    assert {path.dtype, counts.dtype, tokens.dtype} == {torch.long}
    assert all(torch.equal(a, b) for a, b in zip(inputs, (picks, limits, tree.tokens), strict=True))
    ends = set() if stops is None else set(stops.tolist())
    for row in range(picks.shape[0]):
        over = ended is not None and bool(ended[row])
        want = slow_walk(tree, row, picks[row].tolist(), int(limits[row]), ends, over)
        count = int(counts[row])
        assert (path[row, :count].tolist(), tokens[row, :count].tolist()) == want
    assert ((path >= 0) & (path < tree.num_nodes)).all(), "indices that nothing can be gathered with"
    return counts.tolist()


def random_sealed(rng: random.Random, batch: int, nodes: int, vocab: int) -> DraftTree:
    """Sealed trees with all sorts of dropped nodes."""
    tokens = torch.tensor([[rng.randrange(-1, vocab + 1) for _ in range(nodes)] for _ in range(batch)])
    deep = rng.random()
    above = [[i - 1 if rng.random() < deep else rng.randrange(-1, i + 1) for i in range(nodes)] for _ in range(batch)]
    valid = torch.tensor([[rng.random() < 0.9 for _ in range(nodes)] for _ in range(batch)])
    roots = torch.tensor([rng.randrange(vocab) for _ in range(batch)])
    return sanitize(DraftTree(tokens, torch.tensor(above), valid), roots, torch.ones(vocab, dtype=torch.bool))


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("vocab", [2, 4])
def test_walk_equals_the_slow_way(nodes: int, vocab: int) -> None:
    rng, seen = random.Random(f"walk {nodes} {vocab}"), set[int]()
    for number in range(40):
        batch = rng.choice((1, 3, 16))
        tree = random_sealed(rng, batch, nodes, vocab)
        ended = torch.tensor([rng.random() < 0.3 for _ in range(batch)]) if number % 2 else None
        if ended is not None and number % 4 == 1 and nodes > 1:
            tree = replace_with_chain(tree, ended, torch.tensor(1))
        picks = torch.tensor([[rng.randrange(vocab) for _ in range(nodes)] for _ in range(batch)])
        if ended is not None:
            picks = torch.where(ended[:, None], 1, picks)
        limits = torch.tensor([rng.randint(0, nodes) for _ in range(batch)])
        stops = rng.choice((None, torch.tensor([0]), torch.tensor([1]), torch.tensor([0, 1]), torch.tensor([77])))
        seen.update(check(tree, picks, limits, stops, ended))
    assert len(seen) > min(nodes, 4), f"only counts {seen}"


def chain(tokens: list[int]) -> DraftTree:
    """One row: a chain below root 9."""
    tree = build_tree([[(token, i, 1.0) for i, token in enumerate(tokens)]])
    return sanitize(tree, torch.tensor([9]), torch.ones(100, dtype=torch.bool))


def test_everything_accepted_emits_one_more_than_was_drafted() -> None:
    tree = chain([1, 2, 3])
    path, counts, tokens = accept_path(tree, torch.tensor([[1, 2, 3, 50]]), torch.tensor([4]))
    assert (path.tolist(), counts.tolist(), tokens.tolist()) == ([[0, 1, 2, 3]], [4], [[1, 2, 3, 50]])


def test_nothing_accepted_emits_the_pick_not_the_draft() -> None:
    _, counts, tokens = accept_path(chain([1, 2, 3]), torch.tensor([[50, 2, 3, 4]]), torch.tensor([4]))
    assert counts.tolist() == [1] and tokens[0, 0] == 50


def test_a_node_that_agrees_below_one_that_does_not_is_not_reached() -> None:
    _, counts, tokens = accept_path(chain([1, 2, 3]), torch.tensor([[1, 50, 3, 4]]), torch.tensor([4]))
    assert counts.tolist() == [2] and tokens[0, :2].tolist() == [1, 50]


@pytest.mark.parametrize("limit", range(5))
def test_limits_cut_a_path(limit: int) -> None:
    picks = torch.tensor([[1, 2, 3, 4]])
    path, counts, tokens = accept_path(chain([1, 2, 3]), picks, torch.tensor([limit]))
    assert counts.tolist() == [limit] and tokens[0, :limit].tolist() == [1, 2, 3, 4][:limit]
    assert path[0, :limit].tolist() == [0, 1, 2, 3][:limit]


def test_a_stop_in_mid_path_is_the_last_token() -> None:
    picks = torch.tensor([[1, 2, 3, 4]])
    for stop, count in ((1, 1), (2, 2), (3, 3), (4, 4), (5, 4)):
        assert check(chain([1, 2, 3]), picks, torch.tensor([4]), torch.tensor([stop])) == [count]
    assert check(chain([1, 2, 3]), picks, torch.tensor([4]), torch.tensor([3, 2, 4])) == [2]
    assert check(chain([1, 2, 3]), picks, torch.tensor([1]), torch.tensor([2])) == [1], "the limit comes first"


def test_a_stop_on_a_node_that_is_not_reached_stops_nothing() -> None:
    tree = build_tree([[(1, 0, 1.0), (2, 0, 1.0), (3, 1, 1.0)]])
    tree = sanitize(tree, torch.tensor([9]), torch.ones(100, dtype=torch.bool))
    assert check(tree, torch.tensor([[1, 3, 7, 8]]), torch.tensor([4]), torch.tensor([7])) == [3]


def test_ended_rows_emit_pads_even_if_the_pad_is_a_stop() -> None:
    tree = sanitize(root_only(2).pad(4), torch.tensor([0, 0]), torch.ones(100, dtype=torch.bool))
    ended = torch.tensor([True, False])
    tree = replace_with_chain(tree, ended, torch.tensor(0))
    picks = torch.tensor([[0, 0, 0, 0], [0, 5, 5, 5]])
    assert check(tree, picks, torch.tensor([3, 4]), torch.tensor([0]), ended) == [3, 1]


def test_a_bare_tree_is_one_step() -> None:
    path, counts, tokens = accept_path(
        root_only(3), torch.tensor([[4], [5], [6]]), torch.tensor([1, 0, 9]), torch.tensor([4])
    )
    assert path.tolist() == [[0], [0], [0]] and counts.tolist() == [1, 0, 1] and tokens.tolist() == [[4], [5], [6]]
