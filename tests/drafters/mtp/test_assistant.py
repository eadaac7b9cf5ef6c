"""Gemma 4's assistants: where they are found, and what is refused. Their drafts: `test_own_drafters`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import assistants
import pytest
import tiny_models as tiny
import torch
from parity import build_cached_model
from transformers import PreTrainedModel

from mmspec.drafters import registry
from mmspec.drafters.mtp.assistant import AssistantDrafter
from mmspec.resolve import resolve_drafter
from mmspec.targets.assistant import assistant_parts, stored_layer_by_type
from mmspec.targets.registry import find_adapter

pytestmark = assistants.needs_assistants


def target_of(**changes: Any) -> PreTrainedModel:
    return build_cached_model(tiny.ModelSpec("gemma4", **{"seed": 3, "layers": 3, **changes}))


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
