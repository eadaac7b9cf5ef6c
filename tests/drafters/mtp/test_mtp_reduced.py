"""Reduced LM heads of the drafters that come with a target: which ids they have, and that the text stays."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import assistants
import own_heads as own
import pytest
import tiny_models as tiny
import torch
from fuzz import patch_model
from parity import GREEDY, build_cached_model
from torch import Tensor
from transformers import PreTrainedModel

from mmspec.drafters.mtp import build
from mmspec.drafters.mtp.assistant import AssistantDrafter
from mmspec.drafters.mtp.drafter import MTPDrafter
from mmspec.drafters.mtp.vocabulary import FrequentIds, RowCache, read_ids
from mmspec.drafters.registry import is_known_drafter, warn_once
from mmspec.engine.tree import DraftTree
from mmspec.patching import patch_state
from mmspec.resolve import resolve_drafter
from mmspec.targets.assistant import assistant_parts
from mmspec.targets.own_head import read_own_head
from mmspec.targets.registry import find_adapter

FAMILY = next(name for name in ("glm_ocr", *own.FAMILIES) if name in own.FAMILIES)


def target(folder: Path, echo: float = 2.0) -> PreTrainedModel:
    """A tiny target with a head, which draws trees."""
    model = build_cached_model(tiny.ModelSpec(FAMILY, seed=3, layers=2, calm=True))
    own.write_checkpoint(model, folder, own.head_tensors(model, echo=echo))
    return model


def tokens_of(trees: list[DraftTree]) -> set[int]:
    """All drafted ids, without the roots."""
    return {int(token) for tree in trees for token in tree.tokens[:, 1:][tree.node_mask[:, 1:]]}


# --- drafts -----------------------------------------------------------------------------------------------------------


def test_drafts_are_of_the_ids_that_are_given(tmp_path: Path) -> None:
    model, ids = target(tmp_path), torch.arange(5, 60, 3)
    given = tiny.build_inputs(model, 7, 2, padding="left")
    reduced = MTPDrafter(read_own_head(find_adapter(model)), draft_ids=ids)
    found = tokens_of(own.trees_of(model, reduced, given))
    assert found and found <= set(ids.tolist())
    full = MTPDrafter(read_own_head(find_adapter(model)))
    shared, states = find_adapter(model).shared_embeddings, torch.randn(2, 3, reduced.head.config.hidden_size)
    rows = reduced.head.draft_lm_head(shared, ids)
    torch.testing.assert_close(
        reduced.head.logits(states, shared, rows), full.head.logits(states, shared, None)[..., ids]
    )


@assistants.needs_assistants
def test_an_assistant_is_reduced_too_but_one_with_centroids_is_refused() -> None:
    model = build_cached_model(tiny.ModelSpec("gemma4", seed=3))
    adapter = find_adapter(model)
    parts = assistant_parts(assistants.build_assistant(model, centroids=False), adapter)
    drafter = AssistantDrafter(parts, draft_ids=torch.arange(8, 80, 2))
    drafter.suppressed_ids = (8, 9, 10)
    found = tokens_of(own.trees_of(model, drafter, tiny.build_inputs(model, 7, 2, padding="left")))
    assert found and found <= set(range(12, 80, 2))
    clustered = assistant_parts(assistants.build_assistant(model), adapter)
    with pytest.raises(ValueError, match="its LM head is reduced already"):
        AssistantDrafter(clustered, frequent_ids=FrequentIds(8))


# --- which ids --------------------------------------------------------------------------------------------------------


def test_the_most_frequent_ids_come_first_then_the_lowest() -> None:
    frequent = FrequentIds(4)
    first = frequent.choose(100)
    assert first is not None and first.tolist() == [0, 1, 2, 3]
    frequent.count([50, 50, 70, 120, -1])
    assert frequent.choose(100) is first, "too few new ids for another copy of rows"
    frequent.count([60] * 600)
    second = frequent.choose(100)
    assert second is not None and second.tolist() == [0, 50, 60, 70]
    assert copy.deepcopy(frequent) is frequent and FrequentIds(100).choose(100) is None


def test_prompts_and_outputs_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmspec.drafters.mtp.vocabulary.MIN_NEW_IDS", 4)
    model = target(tmp_path)
    given = tiny.build_inputs(model, 7, 2, images=[1, 0], padding="left")
    with patch_model(model, drafter="mtp:12", tree_size=6):
        outputs = [model.generate(**given, **GREEDY) for _ in range(2)]
        drafter: Any = patch_state(model).config.drafter
        model.generate(**given, **GREEDY)
    counts, length = drafter.frequent_ids._counts, given["input_ids"].shape[1]
    emitted = outputs[0][:, length:].flatten().unique().tolist()
    assert set(emitted) <= set(counts) and find_adapter(model).media_token_ids[0] not in counts
    assert set(counts) & set(given["input_ids"][given["attention_mask"].bool()].tolist()) - set(emitted)
    assert len(set(drafter.draft_ids.tolist()) & set(emitted)) >= min(6, len(emitted))


def test_rows_are_copied_once() -> None:
    weight, ids, calls = torch.randn(10, 4), torch.tensor([1, 3]), [0]

    def read(chosen: Tensor) -> Tensor:
        calls[0] += 1
        return weight[chosen]

    cache = RowCache()
    assert cache.rows(weight, ids, read) is cache.rows(weight, ids.clone(), read) and calls == [1]
    weight[3] = 0
    changed = cache.rows(weight, ids, read)
    assert changed is not None and calls == [2] and not changed[1].any()
    cache.rows(weight, torch.tensor([1, 4]), read)
    assert calls == [3]
    cache.rows(None, ids, read)
    cache.rows(None, ids, read)
    assert calls == [5]


@pytest.mark.parametrize("text", ["7 8\n9", "[9, 7, 8]", "9,8,7\n", "7"])
def test_files_of_ids(text: str, tmp_path: Path) -> None:
    (tmp_path / "ids").write_text(text)
    found = read_ids(tmp_path / "ids").tolist()
    assert found == ([7] if text == "7" else [7, 8, 9])


@pytest.mark.parametrize("text", ["", "a b", "[1, 2.5]", "[1, true]", "-3", "[[1]]", "[", "99999999999", '["1"]'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "ids").write_text(text)
    with pytest.raises(ValueError, match=r"must hold ids of a vocabulary.*; got another"):
        read_ids(tmp_path / "ids")


def test_options_behind_the_name(tmp_path: Path) -> None:
    model = target(tmp_path / "target")
    adapter = find_adapter(model)
    (tmp_path / "ids").write_text("5 6 7")
    (tmp_path / "large").write_text("5 999999")
    drafter: Any = resolve_drafter(f"mtp:{tmp_path / 'ids'}", adapter)
    assert drafter.draft_ids.tolist() == [5, 6, 7]
    with pytest.raises(ValueError, match="must hold ids below"):
        resolve_drafter(f"mtp:{tmp_path / 'large'}", adapter)
    with pytest.raises(ValueError, match="at least 1 id; got 0"):
        resolve_drafter("mtp:0", adapter)
    for name in ("mtp:", "mtp:nothing", "assistant:a/b", "msd:5", f"assistant:{tmp_path}"):
        assert not is_known_drafter(name), name
    with pytest.raises(ValueError, match="unknown drafter 'mtp:nothing'"):
        resolve_drafter("mtp:nothing", adapter)


def test_the_head_of_a_base_model_on_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A fine-tune that has lost its head; a base that is not in the cache is one line, and hybrid drafts."""
    model = target(tmp_path / "base")
    model.save_pretrained(tmp_path / "tuned")
    model.config._name_or_path = str(tmp_path / "tuned")
    adapter = find_adapter(model)
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert resolve_drafter("mtp", adapter).name == "hybrid"
        assert "drafter='mtp:BASE'" in caplog.text and len(caplog.records) == 1
        drafter = resolve_drafter(f"mtp:{tmp_path / 'base'}", adapter)
        assert isinstance(drafter, MTPDrafter) and len(caplog.records) == 1
        assert resolve_drafter("mtp:nobody/nothing", adapter).name == "hybrid"
        assert len(caplog.records) == 2 and "not in the local cache" in caplog.text
    assert build.is_own_drafter("mtp:nobody/nothing")
