"""Gemma 4's assistants: their drafts against transformers' own model, and where they are found."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import assistants
import pytest
import tiny_models as tiny
import torch
import transformers
import zoo
from fuzz import patch_model
from parity import GREEDY, MODES, assert_parity, build_cached_model
from transformers import PreTrainedModel
from watched_nodes import watch_nodes

import mmspec
from mmspec.drafters import registry
from mmspec.drafters.mtp.assistant import AssistantDrafter, AssistantExpander
from mmspec.engine.tree import DraftTree
from mmspec.resolve import resolve_drafter
from mmspec.targets.assistant import assistant_parts, stored_layer_by_type
from mmspec.targets.registry import find_adapter

pytestmark = pytest.mark.skipif(
    "gemma4" not in zoo.ROWS or not hasattr(transformers, "Gemma4AssistantConfig"), reason="an older transformers"
)


def target_of(**changes: Any) -> PreTrainedModel:
    return build_cached_model(tiny.ModelSpec("gemma4", **{"seed": 3, "layers": 3, **changes}))


def drafter_of(target: PreTrainedModel, assistant: Any, **options: Any) -> AssistantDrafter:
    return AssistantDrafter(assistant_parts(assistant, find_adapter(target)), **options)


def trees_of(
    model: PreTrainedModel, drafter: AssistantDrafter, given: tiny.Inputs, tokens: int = 20
) -> list[DraftTree]:
    """The trees of a call."""
    trees: list[DraftTree] = []
    with pytest.MonkeyPatch.context() as patch:
        draft_tree = drafter.draft_tree
        patch.setattr(drafter, "draft_tree", lambda *args: trees.append(draft_tree(*args)) or trees[-1])
        with patch_model(model, drafter=drafter, tree_size=6):
            model.generate(**given, **{**GREEDY, "max_new_tokens": tokens, "eos_token_id": None})
            assert not mmspec.stats(model).fallback_reason
    return trees


@pytest.mark.every(2)
@pytest.mark.parametrize(("family", "centroids"), [("gemma4", True), ("gemma4", False), ("gemma4_unified", True)])
def test_every_node_is_that_of_transformers(family: str, centroids: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a prompt with images, over rounds with rejections and accepted tokens, beyond the window."""
    if family not in zoo.ROWS or (
        family == "gemma4_unified" and not hasattr(transformers, "Gemma4UnifiedAssistantConfig")
    ):
        pytest.skip("an older transformers")
    model = build_cached_model(tiny.ModelSpec(family, seed=3, layers=3, window=9))
    given = tiny.build_inputs(model, 5, 1, images=[1], padding="none")
    assistant = assistants.build_assistant(model, centroids=centroids)
    kwargs: dict[str, Any] = {"max_new_tokens": 125, "do_sample": False, "eos_token_id": None}
    answer = model.generate(**given, **kwargs)[0, given["input_ids"].shape[1] :].tolist()
    slow = assistants.SlowAssistant(model, assistant, given)
    drafter = drafter_of(model, assistant, max_depth=3, top_k=2)
    draft_tree, observe = drafter.draft_tree, drafter.observe
    nodes, emitted, accepted = watch_nodes(monkeypatch, AssistantExpander), list[int](), set[int]()
    rounds = 0

    def watched_draft(*args: Any) -> DraftTree:
        nonlocal rounds
        rounds += 1
        nodes.restart()
        tree = draft_tree(*args)
        for found, paths in nodes.levels if rounds % 9 == 1 else nodes.levels[:1]:
            for node, path in enumerate(paths[0]):
                expected, has_logit = slow.logits(emitted, path), found[0, node].isfinite()
                torch.testing.assert_close(found[0, node][has_logit], expected[has_logit], rtol=1e-4, atol=1e-4)
                assert not centroids or has_logit.sum() <= 48
        for depth in range(1, tree.num_nodes):  # a chain of which the first tokens are right
            right = depth <= rounds % 4 and len(emitted) + depth - 1 < len(answer)
            tree.tokens[0, depth] = answer[len(emitted) + depth - 1] if right else 8
        tree.parents = torch.arange(-1, tree.num_nodes - 1)[None]
        tree.node_mask = torch.ones_like(tree.parents, dtype=torch.bool)
        return tree

    def watched_observe(state: Any, result: Any, hidden_states: Any) -> None:
        observe(state, result, hidden_states)
        emitted.extend(result.emitted_ids[0])
        accepted.add(len(result.emitted_ids[0]) - 1)

    monkeypatch.setattr(drafter, "draft_tree", watched_draft)
    monkeypatch.setattr(drafter, "observe", watched_observe)
    with patch_model(model, drafter=drafter, tree_size=5, backend="torch"):
        assert model.generate(**given, **kwargs)[0, given["input_ids"].shape[1] :].tolist() == answer
    assert rounds >= 50 and {0, 1, 2} <= accepted


@MODES
def test_the_output_is_the_targets(mode: dict[str, Any]) -> None:
    """Of a ragged batch with images, with the assistant's own model as `drafter=`."""
    model = target_of(window=9)
    assistant = assistants.build_assistant(model)
    given = tiny.build_inputs(model, 7, 3)
    stats = assert_parity(model, given, lambda plain: assistant, patch_options={"tree_size": 6}, **mode)
    assert stats.num_draft_tokens > 0 and not stats.fallback_reason and stats.drafter.startswith("assistant")


def test_rows_of_a_batch_draft_as_alone() -> None:
    """Left pads are not seen."""
    model = target_of(window=9)
    drafter = drafter_of(model, assistants.build_assistant(model))
    given = tiny.build_inputs(model, 5, 3, images=[2, 0, 1], padding="left")
    mask = given["attention_mask"][1].bool()
    alone = {"input_ids": given["input_ids"][1:2, mask], "attention_mask": torch.ones(1, int(mask.sum())).long()}
    alone["mm_token_type_ids"] = torch.zeros_like(alone["input_ids"])
    trees = [trees_of(model, drafter, one, 3)[0] for one in (given, alone)]
    assert torch.equal(trees[0].tokens[1], trees[1].tokens[0]) and torch.equal(trees[0].parents[1], trees[1].parents[0])


def test_a_bad_assistant_is_reported_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As what it is, since its target's checkpoint has no head."""
    monkeypatch.setattr("mmspec.drafters.mtp.own.MIN_DRAFTS", 6)
    model = target_of()
    with caplog.at_level(logging.WARNING, "mmspec"), patch_model(model, assistants.build_assistant(model), tree_size=3):
        for _ in range(4):
            model.generate(**tiny.build_inputs(model, 5, 1), **{**GREEDY, "max_new_tokens": 10, "eos_token_id": None})
        assert mmspec.stats(model).num_draft_tokens > 12
    warnings = [record.message for record in caplog.records if "first tokens accepted" in record.message]
    assert len(warnings) == 1 and all(len(warning) <= 300 for warning in warnings)
    assert all(one.startswith("mmspec: the assistant has ") and "head" not in one for one in warnings)


@pytest.mark.parametrize("ids", [[0] * 119 + [500], [-1] * 120])
def test_groups_of_ids_that_are_none_are_refused(ids: list[int]) -> None:
    model = target_of()
    assistant = assistants.build_assistant(model)
    assistant.masked_embedding.token_ordering = torch.tensor(ids)
    with pytest.raises(ValueError, match="token_ordering"):
        assistant_parts(assistant, find_adapter(model))


def test_layers_that_store() -> None:
    config = target_of().config.get_text_config()
    assert stored_layer_by_type(config) == {"sliding_attention": 0, "full_attention": 1}


def test_it_is_found_beside_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By its name, as published; another target's is refused in one line."""
    model = target_of()
    adapter = find_adapter(model)
    monkeypatch.setattr(model.config, "_name_or_path", str(tmp_path / "gemma"))
    assert resolve_drafter("auto", adapter).name == "arbitrated"
    assistant = assistants.build_assistant(model)
    folder = tmp_path / "gemma-assistant"
    assistant.save_pretrained(folder)
    for name in ("auto", "assistant", str(folder)):
        found = resolve_drafter(name, adapter)
        assert isinstance(found, AssistantDrafter) and "4 layers" in found.description
    other = find_adapter(build_cached_model(tiny.ModelSpec("gemma4", seed=3, layers=3, hidden=48)))
    monkeypatch.setattr(other.model.config, "_name_or_path", str(tmp_path / "gemma"))
    registry.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "mmspec"):
        assert resolve_drafter("assistant", other).name == "hybrid"
    assert [record.message for record in caplog.records if "another target's" in record.message]
    with pytest.raises(ValueError, match="another target's"):
        resolve_drafter(str(folder), other)
