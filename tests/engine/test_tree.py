"""Draft trees: `sanitize` against a slow reference, shapes, and best-first growth against brute force. No model."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.engine.tree import (
    BUCKETS,
    DraftTree,
    best_first,
    bucket_size,
    build_tree,
    replace_with_chain,
    root_only,
    sanitize,
)

INVALID_INDICES = (-1, -2, -7, 2**40, -(2**40), 2**62)
"""Values that are out of range for every index."""


def copy_fields(tree: DraftTree) -> dict[str, Tensor]:
    """Copies of all tensors of a tree."""
    return {name: part.clone() for name, part in vars(tree).items() if part is not None}


def ancestors(parents: list[int], node: int) -> list[int]:
    """The node and its ancestors, node 0 last."""
    found = [node]
    while node > 0:
        node = parents[node]
        found.append(node)
    return found


# --- sanitize ---------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """The expected sanitized row, and which nodes remain."""

    tokens: list[int]
    parents: list[int]
    alive: list[bool]


def slow_sanitize(
    tokens: list[int], parents: list[int], node_mask: list[bool], root: int, draftable: list[bool], stops: list[int]
) -> Row:
    """One row, node by node, as the docstring of `sanitize` says."""
    well_formed = [False] * len(tokens)
    alive = [False] * len(tokens)
    alive[0] = True
    for i in range(1, len(tokens)):
        known = 0 <= tokens[i] < len(draftable) and draftable[tokens[i]]
        well_formed[i] = node_mask[i] and known and 0 <= parents[i] < i
        twin = any(well_formed[j] and (parents[j], tokens[j]) == (parents[i], tokens[i]) for j in range(1, i))
        below_stop = well_formed[i] and parents[i] > 0 and tokens[parents[i]] in stops
        alive[i] = well_formed[i] and not twin and alive[parents[i]] and not below_stop
    return Row([root, *tokens[1:]], [-1, *parents[1:]], alive)


def random_tree(rng: random.Random, batch: int, nodes: int, vocab: int, invalid_rate: float) -> DraftTree:
    """Trees with many duplicate siblings; a share of `invalid_rate` of all values is out of range."""

    def token() -> int:
        return rng.choice((*INVALID_INDICES, vocab, vocab + 1)) if rng.random() < invalid_rate else rng.randrange(vocab)

    def parent(i: int) -> int:
        if rng.random() < invalid_rate:
            return rng.choice((*INVALID_INDICES, i, i + 1, nodes - 1, nodes, nodes + 3))
        return rng.randrange(max(1, i))

    return DraftTree(
        tokens=torch.tensor([[token() for _ in range(nodes)] for _ in range(batch)]),
        parents=torch.tensor([[parent(i) for i in range(nodes)] for _ in range(batch)]),
        node_mask=torch.tensor([[rng.random() > invalid_rate for _ in range(nodes)] for _ in range(batch)]),
        scores=rng.choice((None, torch.full((batch, nodes), math.nan), torch.full((batch, nodes), 0.5))),
    )


def check_sanitized(
    tree: DraftTree, sanitized: DraftTree, root_ids: list[int], draftable: list[bool], stops: list[int]
) -> int:
    """Compare with the reference; returns the number of remaining nodes."""
    assert sanitized.ancestor_mask is not None and sanitized.depths is not None
    num_kept = 0
    for b, root in enumerate(root_ids):
        want = slow_sanitize(
            tree.tokens[b].tolist(), tree.parents[b].tolist(), tree.node_mask[b].tolist(), root, draftable, stops
        )
        tokens, parents = sanitized.tokens[b].tolist(), sanitized.parents[b].tolist()
        assert sanitized.node_mask[b].tolist() == want.alive
        assert tokens[0] == root and parents[0] == -1
        assert all(0 <= token < len(draftable) for token in tokens[1:]), "an id without an embedding"
        assert all(0 <= parent < i for i, parent in enumerate(parents) if i)
        for i, alive in enumerate(want.alive):
            if alive:
                assert (tokens[i], parents[i]) == (want.tokens[i], want.parents[i])
                assert i == 0 or draftable[tokens[i]]
            # Dropped nodes are scored too, so their masks must be consistent as well.
            path = ancestors(parents, i)
            assert sanitized.ancestor_mask[b, i].nonzero().flatten().tolist() == sorted(path)
            assert int(sanitized.depths[b, i]) == len(path) - 1
        siblings = [(parents[i], tokens[i]) for i, alive in enumerate(want.alive) if alive]
        assert len(set(siblings)) == len(siblings), "duplicate siblings"
        num_kept += sum(want.alive)
    return num_kept


@pytest.mark.parametrize("invalid_rate", [0.0, 0.05, 0.3, 0.9])
def test_sanitize_equals_the_reference(invalid_rate: float) -> None:
    rng, num_kept, total = random.Random(f"seal {invalid_rate}"), 0, 0
    for _ in range(150):
        batch, nodes, vocab = rng.choice((1, 2, 4)), rng.choice((1, 2, 3, 4, 7, 8, 16, 20)), rng.choice((2, 3, 9))
        draftable = [rng.random() > 0.5 * invalid_rate for _ in range(vocab)]
        tree = random_tree(rng, batch, nodes, vocab, invalid_rate)
        before, root_ids = copy_fields(tree), [rng.randrange(vocab) for _ in range(batch)]
        stops = rng.sample(range(vocab), rng.choice((0, 0, 1, 2)))
        stop_ids = torch.tensor(stops) if stops else None
        sanitized = sanitize(tree, torch.tensor(root_ids), torch.tensor(draftable), stop_ids)
        num_kept += check_sanitized(tree, sanitized, root_ids, draftable, stops)
        total += batch * nodes
        after = copy_fields(tree)
        assert before.keys() == after.keys(), "sanitize added fields to its argument"
        assert all(torch.equal(before[k].nan_to_num(), after[k].nan_to_num()) for k in before), (
            "sanitize wrote into its argument"
        )
    assert total / 20 < num_kept < total  # neither all nor nothing was dropped


def test_sanitize_at_full_size_and_depth() -> None:
    """A chain of 64 nodes needs every squaring of the ancestor matrix."""
    for nodes in (2, 3, 33, 63, 64):
        parents = torch.arange(-1, nodes - 1)[None]
        tree = DraftTree(torch.full((1, nodes), 3), parents, torch.ones(1, nodes, dtype=torch.bool))
        sanitized = sanitize(tree, torch.tensor([5]), torch.ones(9, dtype=torch.bool))
        assert sanitized.node_mask.all() and sanitized.depths is not None and sanitized.ancestor_mask is not None
        assert sanitized.depths[0].tolist() == list(range(nodes))
        assert torch.equal(sanitized.ancestor_mask[0], torch.ones(nodes, nodes, dtype=torch.bool).tril())


def test_sanitize_is_idempotent() -> None:
    rng = random.Random(3)
    draftable, root_ids = torch.ones(5, dtype=torch.bool), torch.tensor([1, 2, 3])
    for _ in range(20):
        once = sanitize(random_tree(rng, 3, 12, 5, 0.2), root_ids, draftable)
        twice = sanitize(once, root_ids, draftable)
        assert torch.equal(once.node_mask, twice.node_mask)
        mask = once.node_mask
        assert torch.equal(once.tokens[mask], twice.tokens[mask])
        assert once.ancestor_mask is not None and twice.ancestor_mask is not None
        assert torch.equal(once.ancestor_mask[mask], twice.ancestor_mask[mask])


# --- shapes -----------------------------------------------------------------------------------------------------------


def test_buckets() -> None:
    assert [bucket_size(n) for n in (0, 1, 2, 3, 4, 5, 8, 9, 33, 64)] == [1, 1, 2, 4, 4, 8, 8, 16, 64, 64]
    with pytest.raises(ValueError, match=r"at most 64 nodes.*got 65"):
        bucket_size(65)


def test_build_pads_ragged_rows_to_a_bucket() -> None:
    tree = build_tree([[(5, 0, 0.5), (6, 1, 0.25), (7, 0, 0.125), (8, 3, 0.0)], [], [(9, 0, 1.0)]])
    assert tree.num_nodes == 8 and tree.tokens.dtype == torch.long and tree.ancestor_mask is None
    assert tree.node_mask.sum(1).tolist() == [5, 1, 2]
    assert tree.tokens[0, 1:5].tolist() == [5, 6, 7, 8] and tree.parents[0, :5].tolist() == [-1, 0, 1, 0, 3]
    assert tree.parents[:, 0].tolist() == [-1, -1, -1]
    assert tree.scores is not None and tree.scores[0].tolist() == [1.0, 0.5, 0.25, 0.125, 0.0, 0, 0, 0]
    sanitized = sanitize(tree, torch.tensor([1, 2, 3]), torch.ones(10, dtype=torch.bool))
    assert torch.equal(sanitized.node_mask, tree.node_mask)


def test_build_of_empty_rows_is_root_only() -> None:
    assert build_tree([[], []]).tokens.shape == (2, 1) and build_tree([[], []]).ancestor_mask is not None
    assert build_tree([]).tokens.shape == (0, 1)
    with pytest.raises(ValueError, match="at most 64 nodes"):
        build_tree([[(1, 0, 1.0)] * 64])
    assert build_tree([[(1, 0, 1.0)] * 63]).num_nodes == 64


def test_root_only_shares_nothing_between_calls() -> None:
    """A drafter that writes into its tree must not change the trees of later rounds."""
    tree = root_only(3)
    before = copy_fields(tree)
    for part in vars(root_only(3)).values():
        part.fill_(1)
    assert tree.num_nodes == 1
    root_ids = torch.tensor([4, 5, 6])
    sanitized = sanitize(tree, root_ids, torch.ones(10, dtype=torch.bool))
    assert sanitized.tokens[:, 0].tolist() == [4, 5, 6] and sanitized.node_mask.all()
    longer = sanitize(tree.pad(4), root_ids, torch.ones(10, dtype=torch.bool))
    replace_with_chain(longer, torch.tensor([True, False, True]), torch.tensor(0))
    assert longer.node_mask.sum(1).tolist() == [1, 1, 1]
    assert all(torch.equal(before[name], part) for name, part in copy_fields(root_only(3)).items())


@pytest.mark.parametrize("sanitized", [False, True])
def test_trim_keeps_a_connected_tree(sanitized: bool) -> None:
    rng = random.Random(5)
    tree = random_tree(rng, 2, 16, 4, 0.1)
    tree.scores = torch.linspace(1, 0, 32).reshape(2, 16)
    draftable, root_ids = torch.ones(4, dtype=torch.bool), torch.tensor([1, 2])
    if sanitized:
        tree = sanitize(tree, root_ids, draftable)
    for nodes in (1, 2, 5, 15):
        small = tree.trim(nodes)
        assert small.num_nodes == nodes and small.scores is not None and small.scores.shape == (2, nodes)
        assert (small.ancestor_mask is not None) == sanitized
        assert torch.equal(small.tokens, tree.tokens[:, :nodes]) and torch.equal(
            small.node_mask, tree.node_mask[:, :nodes]
        )
        if sanitized:
            assert small.ancestor_mask is not None and tree.ancestor_mask is not None
            assert torch.equal(small.ancestor_mask.sum(-1), tree.ancestor_mask[:, :nodes].sum(-1)), (
                "an ancestor was cut off"
            )
    assert tree.trim(16) is tree and tree.trim(99) is tree


def test_pad_adds_masked_nodes() -> None:
    tree = build_tree([[(5, 0, 0.5)], []])
    assert tree.pad(2) is tree and tree.pad(1) is tree
    wide = tree.pad(8)
    assert wide.num_nodes == 8 and wide.node_mask.sum(1).tolist() == [2, 1] and wide.scores is not None
    assert wide.scores[:, 2:].sum() == 0 and wide.ancestor_mask is None and wide.depths is None
    no_scores = DraftTree(tree.tokens, tree.parents, tree.node_mask).pad(4)
    assert no_scores.scores is None


def test_padding_a_sanitized_tree_is_sanitizing_a_padded_one() -> None:
    rng, root_ids, draftable = random.Random(5), torch.tensor([1, 2, 3]), torch.ones(4, dtype=torch.bool)
    trees = [random_tree(rng, 3, num_nodes, 4, 0.2) for num_nodes in (1, 2, 5, 8) for _ in range(10)]
    for tree in [root_only(3, root_ids=root_ids), *trees]:
        after, before = sanitize(tree, root_ids, draftable).pad(16), sanitize(tree.pad(16), root_ids, draftable)
        for name in ("tokens", "parents", "node_mask", "ancestor_mask", "depths"):
            assert torch.equal(getattr(after, name), getattr(before, name)), name


def test_to_the_same_device_is_the_tree_itself() -> None:
    tree = build_tree([[(5, 0, 0.5)]])
    assert tree.to(torch.device("cpu")) is tree
    moved = tree.to(torch.device("meta"))
    assert moved.tokens.device.type == moved.node_mask.device.type == "meta" and moved.ancestor_mask is None


def test_replace_with_chain_changes_only_the_given_rows() -> None:
    rng = random.Random(6)
    tree = sanitize(random_tree(rng, 3, 8, 4, 0.2), torch.tensor([1, 2, 3]), torch.ones(4, dtype=torch.bool))
    replaced = replace_with_chain(tree, torch.tensor([True, False, True]), torch.tensor(9))
    assert replaced.ancestor_mask is not None and replaced.depths is not None
    for row in (0, 2):
        assert replaced.tokens[row].tolist() == [row + 1] + [9] * 7 and replaced.node_mask[row].all()
        assert replaced.parents[row].tolist() == list(range(-1, 7)) and replaced.depths[row].tolist() == list(range(8))
        assert torch.equal(replaced.ancestor_mask[row], torch.ones(8, 8, dtype=torch.bool).tril())
    for name, part in copy_fields(tree).items():
        assert torch.equal(part[1].nan_to_num(), getattr(replaced, name)[1].nan_to_num()), (
            f"{name} of another row changed"
        )


# --- growth -----------------------------------------------------------------------------------------------------------

World = dict[tuple[int, ...], list[tuple[int, float]]]


def random_world(rng: random.Random, depth: int, max_children: int) -> World:
    """Children of every node, with probabilities that sum to at most one; the state of a node is its path of tokens."""
    world: World = {}
    level: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        following: list[tuple[int, ...]] = []
        for path in level:
            shares = [rng.random() for _ in range(rng.randint(0, max_children))]
            total = sum(shares) * rng.uniform(1.0, 1.5) or 1.0
            world[path] = [(rng.randrange(10**9), share / total) for share in shares]
            following += [(*path, token) for token, _ in world[path]]
        level = following
    return world


def expand_in(world: World, expanded: list[Any] | None = None) -> Any:
    """An `expand` that reads a world and records the states it is called with."""

    def expand(path: tuple[int, ...]) -> list[tuple[int, float, tuple[int, ...]]]:
        if expanded is not None:
            expanded.append(path)
        return [(token, prob, (*path, token)) for token, prob in world.get(path, [])]

    return expand


def all_nodes(world: World) -> dict[tuple[int, ...], float]:
    """Every node of a world and the probability that it is reached."""
    reached: dict[tuple[int, ...], float] = {}
    for path, children in world.items():
        for token, prob in children:
            reached[(*path, token)] = (reached[path] if path else 1.0) * prob
    return reached


@pytest.mark.parametrize("min_score", [0.0, 0.02, 0.2])
def test_best_first_returns_the_most_probable_nodes_in_order(min_score: float) -> None:
    rng = random.Random(f"grow {min_score}")
    for _ in range(80):
        world, nodes = random_world(rng, depth=4, max_children=3), rng.choice((1, 2, 3, 8, 16, 64))
        expanded: list[Any] = []
        tree = best_first((), expand_in(world, expanded), nodes, min_score)
        paths: list[tuple[int, ...]] = [()]
        for i, (token, parent, _) in enumerate(tree, 1):
            assert 0 <= parent < i, "a child before its parent"
            paths.append((*paths[parent], token))
        reached = {path: prob for path, prob in all_nodes(world).items() if prob >= min_score}
        best = sorted(reached, key=lambda path: -reached[path])[: nodes - 1]
        assert paths[1:] == best  # random probabilities have no ties
        assert all(score == pytest.approx(reached[path]) for path, (_, _, score) in zip(best, tree, strict=True))
        assert len(expanded) <= max(1, nodes - 1), "nodes were expanded needlessly"


def test_every_prefix_equals_the_result_of_a_smaller_budget() -> None:
    world = random_world(random.Random(3), depth=6, max_children=4)
    large = best_first((), expand_in(world), 64, 0.0)
    assert len(large) > 20
    for nodes in BUCKETS:
        assert best_first((), expand_in(world), nodes, 0.0) == large[: nodes - 1]


def test_ties_prefer_the_better_ranked_and_shallower_node() -> None:
    even: World = {(): [(1, 0.5), (2, 0.5)], (1,): [(3, 1.0)], (2,): [(4, 1.0)], (1, 3): [(5, 1.0)]}
    assert [token for token, _, _ in best_first((), expand_in(even), 8)] == [1, 2, 3, 4, 5]


def test_min_score_and_invalid_probabilities() -> None:
    world: World = {(): [(1, 0.5), (2, 0.0199), (3, 0.02), (4, math.nan), (5, -1.0)], (1,): [(6, 0.03)]}
    assert [token for token, _, _ in best_first((), expand_in(world), 64)] == [1, 3]
    assert best_first((), expand_in(world), 1) == [] and best_first((), expand_in({}), 64) == []


def test_best_first_trees_can_be_built_and_sanitized() -> None:
    rng = random.Random(8)
    worlds = [random_world(rng, depth=4, max_children=3) for _ in range(3)]
    rows = [[(t % 50, p, s) for t, p, s in best_first((), expand_in(world), 16)] for world in worlds]
    tree = build_tree(rows)
    sanitized = sanitize(tree, torch.zeros(3, dtype=torch.long), torch.ones(50, dtype=torch.bool))
    assert sanitized.scores is not None and sanitized.num_nodes == 16
    assert (sanitized.node_mask <= tree.node_mask).all()
    assert (sanitized.scores[:, 1:] <= sanitized.scores[:, :-1]).all(), "not in descending order"
