"""Drafts in C of what comes with a target: those of its own forward, in ragged batches and with a reduced LM head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import own_heads as own
import pytest
import tiny_models as tiny
import torch
from c_bugs import faulty_kernel
from fake_target import scores_by_path
from fuzz import patch_model
from spies import spy_on

import mmspec
from mmspec.cpu.c_kernel import load_kernel
from mmspec.drafters.heads.base import c_draft
from mmspec.drafters.heads.base.c_draft import CDraft
from mmspec.drafters.heads.base.state import DraftState, Pending
from mmspec.drafters.mtp.own import OwnDrafter
from mmspec.engine.tree import DraftTree
from mmspec.targets.c_forwards import CForwards

pytestmark = pytest.mark.skipif(load_kernel() is None, reason="no compiler or another processor")
REDUCED = {"draft_ids": torch.arange(5, 100, 2)}


@dataclass
class Compared:
    """What was drafted twice, in C and in torch."""

    drafts: int = 0
    reads: int = 0
    refused: int = 0
    paths: int = 0
    common: int = 0
    differences: int = 0


@contextmanager
def compared(drafter: OwnDrafter, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compared]:
    """Each draft in C is drafted again in torch from the same state, and what was read is read again."""
    counted, tree, extend = Compared(), CDraft.tree, CDraft.extend_context
    error = 1e-4 if dtype is torch.float32 else 6e-2

    def both_trees(self: CDraft, state: DraftState, *sizes: int) -> DraftTree | None:
        mine, (_, max_nodes, num_levels) = tree(self, state, *sizes), sizes
        state.c_draft = None
        want = drafter.draft_tree(state, max_nodes, num_levels)
        state.c_draft = self
        counted.drafts, counted.refused = counted.drafts + 1, counted.refused + (mine is None)
        for row in range(len(want.tokens)) if mine is not None and state.active else ():
            if not state.active[row]:
                continue
            found, expected = scores_by_path(mine, row), scores_by_path(want, row)
            counted.paths, counted.common = (
                counted.paths + len(expected),
                counted.common + len(found.keys() & expected.keys()),
            )
            if dtype is torch.float32:
                counted.differences += found != pytest.approx(expected, rel=1e-3, abs=1e-6)
        return mine

    def both_reads(self: CDraft, state: DraftState, pending: Pending) -> bool:
        if state.target_keys is not None:  # an assistant, which reads the last token alone
            return extend(self, state, pending)
        before = state.kv_cache.seq_lens, state.last_hidden
        is_done, mine = extend(self, state, pending), state.last_hidden
        counted.reads, counted.refused = counted.reads + 1, counted.refused + (not is_done)
        state.kv_cache.seq_lens, state.last_hidden = before
        inputs, positions = drafter.pending_inputs(state, pending.tokens, pending.hidden_states)
        drafter.extend_context(state, inputs, positions, pending.counts)
        difference, size = (mine - state.last_hidden).abs().float().mean(), state.last_hidden.abs().float().mean()
        counted.differences += not (mine.dtype is dtype and float(difference) <= error * float(size))
        return True

    with monkeypatch.context() as patched:
        patched.setattr(CDraft, "tree", both_trees)
        patched.setattr(CDraft, "extend_context", both_reads)
        yield counted


def run(model: Any, drafter: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Compared:
    """Two calls of ragged rows, one with an image; the text must be that of plain decoding."""
    given = tiny.build_inputs(model, 5, 2, images=[1, 0], padding="left")
    if dtype is not torch.float32:
        given = {name: one.to(dtype) if one.is_floating_point() else one for name, one in given.items()}
    limits: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": None, **options}
    torch.manual_seed(1)
    plain = model.generate(**given, **limits)
    with (
        patch_model(model, drafter=drafter, tree_size=6, backend="c"),
        compared(drafter, dtype, monkeypatch) as counted,
    ):
        torch.manual_seed(1)
        assert torch.equal(model.generate(**given, **limits), plain) or dtype is not torch.float32
        assert not mmspec.stats(model).fallback_reason
    return counted


CASES: tuple[tuple[str, torch.dtype, dict[str, Any], dict[str, Any]], ...] = (
    ("qwen3_5", torch.float32, {}, {}),
    ("qwen3_5", torch.bfloat16, REDUCED, {}),
    ("qwen3_5", torch.float16, {}, {}),
    ("glm_ocr", torch.float32, {"top_k": 3}, {}),
    ("glm_ocr", torch.bfloat16, {"top_k": 2}, {}),
    ("glm_ocr", torch.float32, {"top_k": 2, **REDUCED}, {"do_sample": True}),
    ("exaone4_5", torch.float32, {"top_k": 2}, {}),
    ("gemma4", torch.float32, {"top_k": 3}, {}),
    ("gemma4", torch.float32, REDUCED, {"do_sample": True}),
    ("gemma4", torch.float32, {"top_k": 2}, {"do_sample": True}),
    ("gemma4", torch.bfloat16, {"top_k": 1}, {}),
    ("gemma4", torch.float16, {"top_k": 2, "centroids": False}, {}),
)


def build(family: str, dtype: torch.dtype, folder: Path, **options: Any) -> tuple[Any, Any]:
    """A tiny model of a family, with a short window if it has an assistant, and what drafts for it."""
    own.needs_family(family)
    window = 9 if family == "gemma4" else 0
    model = tiny.build_model(tiny.ModelSpec(family, seed=3, layers=3, window=window)).to(dtype)
    return model, own.new_drafter(model, folder, max_depth=4, **options)


@pytest.mark.parametrize(("family", "dtype", "options", "limits"), CASES)
def test_drafts_are_those_in_torch(
    family: str,
    dtype: torch.dtype,
    options: dict[str, Any],
    limits: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind prompts of two lengths, one with an image."""
    model, drafter = build(family, dtype, tmp_path, **options)
    counted = run(model, drafter, dtype, monkeypatch, **{"do_sample": False, **limits})
    assert counted.drafts > 4 and not counted.refused and not counted.differences
    assert counted.reads > 4 or family == "gemma4"
    assert counted.common >= (1.0 if dtype is torch.float32 else 0.85) * counted.paths > 20


@pytest.mark.every(3)
@pytest.mark.parametrize("how", ["c", "refused", "torch"])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.6}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_trees_over_recurrent_states(
    family: str, options: Mapping[str, Any], how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees where the rounds of the call run in C, even if the head does not; chains once they no longer do."""
    model, drafter = build(family, torch.float32, tmp_path)
    drafted, scored, accepted = list[bool](), list[bool](), list[list[int]]()
    draft_tree, observe, score = drafter.draft_tree, drafter.observe, CForwards.score

    def watched_draft(*args: Any) -> DraftTree:
        tree = draft_tree(*args)
        drafted.append(has_branches(tree))
        return tree

    def watched_score(self: CForwards, tree: DraftTree, *args: Any) -> Any:
        if how == "refused" and any(scored):
            return None
        scored.append(has_branches(tree))
        return score(self, tree, *args)

    def watched_observe(state: Any, result: Any, hidden_states: Any) -> None:
        accepted.extend(nodes for nodes in result.accepted_nodes if nodes)
        observe(state, result, hidden_states)

    monkeypatch.setattr(drafter, "draft_tree", watched_draft)
    monkeypatch.setattr(drafter, "observe", watched_observe)
    monkeypatch.setattr(CForwards, "score", watched_score)
    given = tiny.build_inputs(model, 5, 3, images=[1, 0, 2], padding="left")
    limits: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": None, "do_sample": False, **options}
    torch.manual_seed(1)
    plain = model.generate(**given, **limits)
    with patch_model(model, drafter=drafter, tree_size=8, backend="torch" if how == "torch" else "c"):
        torch.manual_seed(1)
        assert torch.equal(model.generate(**given, **limits), plain)
        stats = mmspec.stats(model)
    assert not stats.fallback_reason and stats.num_accepted_tokens > 0 and len(drafted) > 4
    num_branched = sum(nodes != list(range(len(nodes))) for nodes in accepted)
    if how == "c":
        assert all(drafted) and sum(scored) >= len(drafted) - 1 and num_branched
    else:
        assert drafted.count(True) == 2 * len(scored) == 2 * (how == "refused") and not num_branched


def has_branches(tree: DraftTree) -> bool:
    """Whether a node is not below the one before it."""
    return bool((tree.node_mask & (tree.parents != torch.arange(-1, tree.num_nodes - 1))).any())


BUGS = {
    "if (is_mtp(h) && h->levels)": "if (0)",
    "is_mtp(h) ? h->embedding_norm :": "0 ? h->embedding_norm :",
    "(h->d.hides_nodes ? 0 : level)": "level",
    "l->window && d->depths ? depths[node] : 0": "l->window && d->depths ? depths[node] : 1",
    "!is_eagle3(h) && !is_root": "!is_eagle3(h)",
    "(level ? parent : b) * E : output": "b * E : output",
    "+ h->bias[ids[i]]": "",
    "noise ? z / h->temperature - noise[ids[i]] : z": "z",
    "g->best[row * h->num_best + child[i] / S] * S + child[i] % S": "child[i]",
    "round1(to[i] * h->d.embed_scale, h->d.type)": "to[i]",
}
"""{text of the sources: replacement}, of MTP heads where it says so, else of assistants."""


@pytest.mark.slow
@pytest.mark.parametrize("part", BUGS)
def test_planted_bugs_are_caught(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = faulty_kernel(part, BUGS[part], optimized=False)
    monkeypatch.setattr(c_draft, "active_kernel", lambda: faulty)
    is_head = "is_mtp" in part
    options = {} if is_head else {"top_k": 2}
    model, drafter = build("qwen3_5" if is_head else "gemma4", torch.float32, tmp_path, **options)
    if not is_head:
        drafter.suppressed_ids = tuple(range(5, 60))
        monkeypatch.setattr(drafter, "_agrees", lambda *_: True)  # the drafter's own check would refuse the faulty C
    assert run(model, drafter, torch.float32, monkeypatch, do_sample=not is_head).differences


@pytest.mark.parametrize("activation", [torch.nn.SiLU(), torch.nn.Identity()])
def test_an_assistant_of_other_layers_drafts_in_torch(
    activation: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Than its target's, which one line says."""
    model, drafter = build("gemma4", torch.float32, tmp_path, top_k=2)
    for layer in drafter.head.body.layers:
        layer.mlp.act_fn = activation
    trees, agrees = spy_on(monkeypatch, drafter, "c_draft"), spy_on(monkeypatch, drafter, "_agrees")
    counted = run(model, drafter, torch.float32, monkeypatch, do_sample=False)
    assert trees == [None] and agrees == [False] and counted.drafts == 1  # that of the comparison
