"""What drafts for a target and comes with it, MTP heads and assistants: against formulas, and transformers' model."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import assistants
import own_heads as own
import pytest
import tiny_models as tiny
import torch
from fuzz import patch_model
from parity import GREEDY, MODES, assert_parity, build_cached_model
from torch import Tensor
from transformers import PreTrainedModel
from watched_nodes import WatchedNodes, watch_nodes

import mmspec
from mmspec.drafters.heads.base.expand import AutoregressiveExpander
from mmspec.drafters.mtp.assistant import AssistantExpander
from mmspec.engine.tree import DraftTree
from mmspec.interfaces import Prompt

FAMILY = pytest.mark.parametrize("family", [*own.FAMILIES, *assistants.FAMILIES[:1]])
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def model_of(family: str, **changes: Any) -> PreTrainedModel:
    return build_cached_model(tiny.ModelSpec(family, **{"seed": 3, "layers": 3, **changes}))


@dataclass
class Watched:
    """A drafter whose logits are compared with slow ones in every draft; half of its trees are right.

    Attributes:
        drafter: what is watched.
        slow: the same, computed slowly.
        answers: what each row of the target says.
        nodes: what the drafter expands.
        emitted: what each row has emitted.
        rounds: how many drafts there were.
        accepted: how many draft tokens were accepted at once, of all rounds.
    """

    drafter: Any
    slow: Any
    answers: list[list[int]]
    nodes: WatchedNodes
    emitted: list[list[int]] = field(default_factory=list)
    rounds: int = 0
    accepted: set[int] = field(default_factory=set)

    def begin(self, prompt: Prompt) -> None:
        self.emitted = [[] for _ in prompt.input_ids]

    def observe(self, result: Any, hidden_states: Mapping[int, Tensor]) -> None:
        for row, ids in enumerate(result.emitted_ids):
            self.emitted[row] += ids
            if ids and hidden_states:
                self.accepted.add(len(ids) - 1)

    def expected(self, row: int, path: list[int]) -> Tensor:
        """[V] logits behind what a row has emitted and draft tokens."""
        logits: Tensor = self.slow.logits(self.emitted[row], path)
        return logits

    def check(self) -> None:
        """The logits behind the last row of each sequence; now and then those of every node that was expanded."""
        self.rounds += 1
        assert self.nodes.levels, "drafted elsewhere"
        for logits, paths in self.nodes.levels if self.rounds % 9 == 1 else self.nodes.levels[:1]:
            for row, node_logits in enumerate(logits):
                for found, path in zip(node_logits, paths[row], strict=False):
                    expected, is_draftable = self.expected(row, path), found.isfinite()
                    torch.testing.assert_close(found[is_draftable], expected[is_draftable], **TOLERANCE)
                    assert getattr(self.drafter.head, "centroids", None) is None or is_draftable.sum() <= 48

    def mend(self, tree: DraftTree) -> DraftTree:
        """A chain of which the first tokens are right, and then one is wrong."""
        right = self.rounds % 4
        for row, (done, tokens) in enumerate(zip(map(len, self.emitted), self.answers, strict=True)):
            for depth in range(1, tree.num_nodes):
                is_right = depth <= right and done + depth - 1 < len(tokens)
                tree.tokens[row, depth] = tokens[done + depth - 1] if is_right else 8
        tree.parents = torch.arange(-1, tree.num_nodes - 1).expand(len(self.emitted), -1).clone()
        tree.node_mask = torch.ones_like(tree.parents, dtype=torch.bool)
        return tree


@dataclass
class Row:
    """What a row's slow head reads: embeddings of the next tokens, states, positions of the rows."""

    embeds: Tensor
    hidden: Tensor
    position_ids: Tensor


@dataclass
class WatchedHead(Watched):
    """An MTP head, whose slow one reads the same rows, over all of them at once."""

    rows: list[Row] = field(default_factory=list)

    def begin(self, prompt: Prompt) -> None:
        super().begin(prompt)
        model, family = self.slow.model, self.slow.model.config.model_type
        embed, merged, last = model.get_input_embeddings(), prompt.hidden_states[0], max(prompt.hidden_states)
        if self.drafter.visual_mode == "placeholder":
            merged = torch.where(prompt.visual_mask[..., None], embed(prompt.input_ids), merged)
        for row, mask in enumerate(prompt.attention_mask):
            own_embeds, axes = merged[row][mask][1:].clone(), prompt.position_ids[..., row, :]
            positions = axes[-3:][:, mask] if axes.dim() == 2 and len(axes) >= 3 else torch.arange(int(mask.sum()))
            if family == "glm_ocr":
                own_embeds[0] = 0
            self.rows.append(Row(own_embeds, prompt.hidden_states[last][row][mask], positions))

    def observe(self, result: Any, hidden_states: Mapping[int, Tensor]) -> None:
        embed = self.slow.model.get_input_embeddings()
        for row, (ids, nodes) in enumerate(zip(result.emitted_ids, result.accepted_nodes, strict=True)):
            if not ids:
                continue
            one = self.rows[row]
            one.embeds = torch.cat((one.embeds, embed(torch.tensor(ids))))
            if hidden_states:
                one.hidden = torch.cat((one.hidden, hidden_states[max(hidden_states)][row][nodes]))
                steps, last = torch.arange(1, len(ids) + 1), one.position_ids[..., -1:]
                last = last.amax() if len(self.emitted[row]) == 1 else last
                new = last + steps.expand(*one.position_ids.shape[:-1], -1)
                one.position_ids = torch.cat((one.position_ids, new), -1)
        super().observe(result, hidden_states)

    def expected(self, row: int, path: list[int]) -> Tensor:
        one = self.rows[row]
        logits: Tensor = self.slow.chain(one.embeds, one.hidden, one.position_ids, path)[-1]
        return logits


@contextmanager
def watched(
    model: PreTrainedModel, drafter: Any, given: tiny.Inputs, answers: list[list[int]], monkeypatch: Any
) -> Iterator[Watched]:
    """Context with the model patched with a watched drafter."""
    if model.config.model_type in own.FAMILIES:
        nodes, slow = watch_nodes(monkeypatch, AutoregressiveExpander), own.SlowHead(model, own.head_tensors(model))
        watch: Watched = WatchedHead(drafter, slow, answers, nodes)
    else:
        assistant = assistants.build_assistant(model, centroids=drafter.head.centroids is not None)
        nodes = watch_nodes(monkeypatch, AssistantExpander)
        watch = Watched(drafter, assistants.SlowAssistant(model, assistant, given), answers, nodes)
    begin, observe, draft_tree = drafter.begin, drafter.observe, drafter.draft_tree

    def watched_begin(prompt: Prompt) -> Any:
        state = begin(prompt)
        watch.begin(prompt)
        return state

    def watched_observe(state: Any, result: Any, hidden_states: Any) -> None:
        observe(state, result, hidden_states)
        watch.observe(result, hidden_states)

    def watched_draft(state: Any, max_nodes: int, num_levels: int) -> DraftTree:
        nodes.restart(len(watch.emitted))
        tree = draft_tree(state, max_nodes, num_levels)
        watch.check()
        return watch.mend(tree)

    for name, replaced in (("begin", watched_begin), ("observe", watched_observe), ("draft_tree", watched_draft)):
        monkeypatch.setattr(drafter, name, replaced)
    with patch_model(model, drafter=drafter, tree_size=5, backend="torch"):
        yield watch


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_5", {}),
        ("qwen3_5", {"visual_mode": "placeholder"}),
        ("qwen3_5_moe", {}),
        ("glm_ocr", {"top_k": 2}),
        ("glm_ocr", {"visual_mode": "coupled"}),
        ("exaone4_5", {"top_k": 2}),
        ("gemma4", {"top_k": 2, "centroids": False}),
        ("gemma4", {"top_k": 2}),
        ("gemma4_unified", {"top_k": 2}),
    ],
)
def test_every_node_of_every_draft_is_that_of_the_formulas(
    family: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over rounds with rejections behind prompts with images, beyond a window: a refill of an MTP head, whose rows are
    ragged, equals one pass; an assistant's is that of transformers' own model."""
    own.needs_family(family)
    is_head = family in own.FAMILIES
    model = model_of(family, window=9 if family == "exaone4_5" or not is_head else 0)
    given = tiny.build_inputs(
        model, 5, 2 if is_head else 1, images=[1, 0][: 1 + is_head], padding="left" if is_head else "none"
    )
    kwargs: dict[str, Any] = {"max_new_tokens": 72 if is_head else 125, "do_sample": False, "eos_token_id": None}
    plain = model.generate(**given, **kwargs)
    answers = plain[:, given["input_ids"].shape[1] :].tolist()
    visual_mode, rest = options.get("visual_mode"), {k: v for k, v in options.items() if k != "visual_mode"}
    drafter = own.new_drafter(model, tmp_path, echo=0.0, max_depth=4 if is_head else 3, **rest)
    if visual_mode:
        drafter.visual_mode = visual_mode
    with watched(model, drafter, given, answers, monkeypatch) as watch:
        assert torch.equal(model.generate(**given, **kwargs), plain)
        assert not mmspec.stats(model).fallback_reason
    assert watch.rounds >= (24 if is_head else 50) and {0, 1, 2} <= watch.accepted


@pytest.mark.every(2)
@MODES
@pytest.mark.parametrize("family", [*own.FAMILIES, *assistants.FAMILIES[:1], "reduced"])
def test_the_output_is_the_targets(family: str, mode: dict[str, Any], tmp_path: Path) -> None:
    """Of ragged batches with images; by the name, with a reduced LM head, and with the assistant's own model."""
    is_head, name = family != "gemma4", "mtp:24" if family == "reduced" else "mtp"
    family = own.FAMILIES[-1] if family == "reduced" else family
    model = model_of(family, calm=is_head, window=0 if is_head else 9)
    if is_head:
        own.write_checkpoint(model, tmp_path, own.head_tensors(model, echo=2.0))
    given = tiny.build_inputs(model, 7, 3, padding="left")
    drafter = name if is_head else lambda plain: assistants.build_assistant(model)
    stats = assert_parity(model, given, drafter, patch_options={"tree_size": 6}, **{**mode, "max_new_tokens": 30})
    assert stats.num_draft_tokens > 0 and not stats.fallback_reason
    assert stats.drafter.startswith("mtp" if is_head else "assistant")


@FAMILY
def test_rows_of_a_batch_draft_as_alone(family: str, tmp_path: Path) -> None:
    """The first trees of a ragged batch, and those of its text row alone."""
    model = model_of(family, window=9 if family == "gemma4" else 0)
    drafter = own.new_drafter(model, tmp_path, echo=0.0)
    given = tiny.build_inputs(model, 5, 3, images=[2, 0, 1], padding="left")
    mask = given["attention_mask"][1].bool()
    alone = {"input_ids": given["input_ids"][1:2, mask], "attention_mask": torch.ones(1, int(mask.sum())).long()}
    if family == "gemma4":
        alone["mm_token_type_ids"] = torch.zeros_like(alone["input_ids"])
    trees = [own.trees_of(model, drafter, one, 3)[0] for one in (given, alone)]
    assert torch.equal(trees[0].tokens[1], trees[1].tokens[0]) and torch.equal(trees[0].parents[1], trees[1].parents[0])


@pytest.mark.parametrize("family", ["qwen3_5", "gemma4"])
def test_what_drafts_badly_is_reported_once(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As what it is: an assistant is no head of its target's checkpoint."""
    own.needs_family(family)
    monkeypatch.setattr("mmspec.drafters.mtp.own.MIN_DRAFTS", 6)
    model = model_of(family)
    drafter = own.new_drafter(model, tmp_path, echo=0.0)
    given = tiny.build_inputs(model, 5, 1, images=[0] if family == "qwen3_5" else None, padding="none")
    with patch_model(model, drafter, tree_size=3), caplog.at_level(logging.WARNING, "mmspec"):
        for _ in range(4):
            model.generate(**given, **{**GREEDY, "eos_token_id": None})
        assert mmspec.stats(model).num_draft_tokens > 12
    warnings = [record.message for record in caplog.records if "first tokens accepted" in record.message]
    named = "mmspec: the MTP head has " if family == "qwen3_5" else "mmspec: the assistant has "
    assert len(warnings) == 1 and len(warnings[0]) <= 300 and warnings[0].startswith(named)
    assert family == "qwen3_5" or "head" not in warnings[0]
