"""Checks of trees and accepted paths in C: the same tensors as torch computes, and what is left to torch.

Both are compared with slow references in tests/engine/test_tree.py and tests/engine/test_verify.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from c_bugs import faulty_kernel, faulty_sources
from torch import Tensor

from mmspec.cpu import trees
from mmspec.cpu.c_kernel import load_kernel
from mmspec.cpu.trees import compiled_accept_path, compiled_sanitize
from mmspec.engine import accept
from mmspec.engine.tree import DraftTree, _sanitize

pytestmark = pytest.mark.skipif(load_kernel() is None, reason="no compiler or another processor")
VOCAB = 5


def random_inputs(seed: int) -> tuple[Any, ...]:
    """Arguments of `compiled_sanitize`: trees with faults of every kind, in every second case views of larger ones."""
    rng = torch.Generator().manual_seed(seed)
    batch, size = 1 + seed % 4, (2, 3, 4, 8, 16, 33)[seed % 6]
    shape = (batch, size + 3 * (seed % 2))
    tokens = torch.randint(-1 if seed % 5 else 0, VOCAB + (seed % 4 == 3), shape, generator=rng)
    chain = torch.arange(-1, shape[1] - 1).expand(shape)
    earlier = (torch.rand(shape, generator=rng) * torch.arange(shape[1])).long()
    parents = torch.where(torch.rand(shape, generator=rng) < 0.5, chain, earlier)
    faulty = torch.rand(shape, generator=rng) < 0.05
    parents = torch.where(faulty, torch.randint(-2, size, shape, generator=rng), parents)
    node_mask = torch.rand(shape, generator=rng) < 0.9
    parts = [part[:, :size] for part in (tokens, parents, node_mask)]
    root_ids = torch.randint(0, VOCAB, (batch, 2), generator=rng)[:, seed % 2]
    draftable = torch.rand(VOCAB, generator=rng) < 0.97
    stop_ids = None if seed % 3 == 0 else torch.randint(0, VOCAB, (seed % 3,), generator=rng)
    return (*parts, root_ids, draftable, stop_ids)


def walk_inputs(seed: int) -> tuple[DraftTree, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Arguments of `accept_path`."""
    rng = torch.Generator().manual_seed(1000 + seed)
    inputs = random_inputs(seed)
    tree = DraftTree(*inputs[:3])
    tree.tokens, tree.parents, tree.node_mask, tree.ancestor_mask, tree.depths = _sanitize(*inputs)
    batch, size = tree.tokens.shape
    sampled_ids = torch.randint(0, VOCAB, (batch, size), generator=rng)
    for node in range(1, size):  # else hardly any token matches
        parent = tree.parents[:, node : node + 1]
        follows = torch.rand(batch, 1, generator=rng) < 0.8
        sampled_ids.scatter_(1, parent, torch.where(follows, tree.tokens[:, [node]], sampled_ids.gather(1, parent)))
    max_emit = torch.randint(0, size + 1, (batch,), generator=rng)
    finished = None if seed % 2 else torch.rand(batch, generator=rng) < 0.3
    return tree, sampled_ids, max_emit, inputs[-1], finished


def differ(seed: int) -> bool:
    """Whether the compiled functions differ from torch."""
    inputs = random_inputs(seed)
    mine, want = compiled_sanitize(*inputs), _sanitize(*inputs)
    assert mine is not None
    if not all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(mine, want, strict=True)):
        return True
    tree, *others = walk_inputs(seed)
    walked = compiled_accept_path((tree.tokens, tree.parents, tree.node_mask), *others)
    assert walked is not None
    return not all(
        a.dtype == b.dtype and torch.equal(a, b)
        for a, b in zip(walked, accept._accept_path(tree, *others), strict=True)
    )


def test_compiled_code_equals_torch() -> None:
    assert not [seed for seed in range(600) if differ(seed)]
    counts = torch.cat([accept._accept_path(*walk_inputs(seed))[1] for seed in range(600)])
    assert int(counts.max()) > 4 and int((counts > 1).sum()) > 200, "paths that end at once show nothing"


class Traced(Tensor):
    """A subclass, as tracers have them."""


def test_other_tensors_are_left_to_torch() -> None:
    tokens, *others = random_inputs(4)
    assert compiled_sanitize(tokens, *others) is not None
    assert compiled_sanitize(tokens.int(), *others) is None
    assert compiled_sanitize(tokens.to("meta"), *others) is None
    assert compiled_sanitize(tokens.as_subclass(Traced), *others) is None
    tree, sampled_ids, *rest = walk_inputs(4)
    nodes = (tree.tokens, tree.parents, tree.node_mask)
    assert compiled_accept_path(nodes, sampled_ids, *rest) is not None
    assert compiled_accept_path(nodes, sampled_ids.int(), *rest) is None
    assert compiled_accept_path(nodes, sampled_ids.to("meta"), *rest) is None


def test_without_a_kernel_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "load_kernel", lambda: None)
    assert compiled_sanitize(*random_inputs(4)) is None


BUGS = {
    "parents come first": ("p[i] >= 0 && p[i] < i;", "p[i] >= 0 && p[i] < N;"),
    "ids beyond the vocabulary": ("t[i] < V && draftable[t[i]]", "draftable[t[i] < V ? t[i] : 0]"),
    "duplicates of what is dropped": ("valid[j] && p[j] == p[i]", "p[j] == p[i]"),
    "descendants of what is dropped": ("valid[i] && (!i || valid[parent]);", "valid[i];"),
    "descendants of what ends a row": ("ended[i] = i && ended[parent];", "ended[i] = 0;"),
    "a mismatch ends the path": ("tokens[first + i] == sampled[first + node])", "1)"),
    "limits": ("n = min64(n, max_emit[b]);", ";"),
    "padding may be a stop id": ("!(finished && finished[b])", "1"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_can_be_planted(bug: str) -> None:
    assert faulty_sources(*BUGS[bug], "trees.h")


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_in_the_tree_code_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = faulty_kernel(*BUGS[bug], "trees.h")
    monkeypatch.setattr(trees, "load_kernel", lambda: kernel)
    assert any(differ(seed) for seed in range(600))


def test_trees_of_inconsistent_shapes_are_left_to_torch() -> None:
    """A drafter of a user may return them: C would read beyond the end."""
    tokens, parents, node_mask, root_ids, draftable, stop_ids = random_inputs(3)
    assert compiled_sanitize(tokens, parents, node_mask, root_ids, draftable, stop_ids) is not None
    assert compiled_sanitize(tokens, parents[:, 1:], node_mask, root_ids, draftable, stop_ids) is None
    assert compiled_sanitize(tokens, parents, node_mask[:1], root_ids, draftable, stop_ids) is None
    assert compiled_sanitize(tokens, parents, node_mask, root_ids[1:], draftable, stop_ids) is None
    tree, sampled_ids, max_emit, stop_ids, finished = walk_inputs(4)
    nodes = (tree.tokens, tree.parents, tree.node_mask)
    assert compiled_accept_path(nodes, sampled_ids, max_emit, stop_ids, finished) is not None
    assert compiled_accept_path(nodes, sampled_ids[:, 1:], max_emit, stop_ids, finished) is None
    assert compiled_accept_path(nodes, sampled_ids, max_emit[1:], stop_ids, finished) is None
