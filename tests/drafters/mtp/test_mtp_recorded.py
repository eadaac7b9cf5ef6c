"""Recorded drafts of what comes with a target, head or assistant: the same text and drafts as unrecorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import assistants
import fuzz
import own_heads as own
import pytest
import tiny_models as tiny
import torch
from fuzz import patch_model
from parity import build_cached_model
from recorded_rounds import drafts_only, recording
from recorders import record_nothing, record_trace
from torch import Tensor

import mmspec
from mmspec.engine.graph import Recorder

trace_drafts = drafts_only(record_trace)
FAMILIES = (*own.FAMILIES, *assistants.FAMILIES[:1])


@pytest.mark.parametrize(
    ("family", "sampled", "options", "recorder", "whole"),
    [
        ("glm_ocr", False, {"top_k": 2}, record_nothing, False),
        ("qwen3_5", False, {}, record_nothing, True),
        ("gemma4", True, {"top_k": 2}, record_nothing, True),
        pytest.param("gemma4", True, {"draft_ids": torch.arange(5, 100)}, trace_drafts, False, marks=pytest.mark.slow),
        pytest.param("gemma4", True, {"top_k": 2}, record_trace, True, marks=pytest.mark.slow),
        pytest.param("glm_ocr", False, {"top_k": 2}, trace_drafts, False, marks=pytest.mark.slow),
        pytest.param("glm_ocr", True, {"draft_ids": torch.arange(5, 100)}, trace_drafts, False, marks=pytest.mark.slow),
        pytest.param("exaone4_5", False, {"top_k": 2}, trace_drafts, False, marks=pytest.mark.slow),
        pytest.param("qwen3_5", True, {}, trace_drafts, False, marks=pytest.mark.slow),
        pytest.param("qwen3_5", True, {}, record_trace, True, marks=pytest.mark.slow),
    ],
)
def test_a_recorded_draft_on_other_prompts(
    family: str,
    sampled: bool,
    options: dict[str, Any],
    recorder: Recorder,
    whole: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A value that became a constant would be wrong in the other prompts: the text stays, fewer tokens are accepted."""
    own.needs_family(family)
    if not whole:
        monkeypatch.setattr("mmspec.engine.loop.can_record_rounds", lambda *args: False)
    window = 9 if family in ("exaone4_5", "gemma4") else 0
    layers = 3 if family == "gemma4" else 2
    model = build_cached_model(tiny.ModelSpec(family, seed=3, layers=layers, calm=True, window=window))
    prompts = [tiny.build_inputs(model, seed, 2, images=[1, 0], padding="left") for seed in range(2)]
    limits: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": None, "do_sample": sampled}

    def generate(given: tiny.Inputs) -> Tensor:
        torch.manual_seed(1)
        return model.generate(**given, **limits)  # type: ignore[no-any-return,operator]

    plain = [generate(given) for given in prompts]

    def run() -> list[int]:
        drafter = own.new_drafter(model, tmp_path, max_depth=3, **options)
        with patch_model(model, drafter, tree_size=6):
            assert all(torch.equal(generate(given), text) for given, text in zip(prompts, plain, strict=True))
            stats = mmspec.stats(model)
            return [stats.num_accepted_tokens, stats.rounds]

    expected = run()
    with recording(recorder) as counted:
        found = run()
    recordings, replays = counted.draft_recordings, counted.draft_replays
    if whole:
        recordings, replays = counted.whole_recordings, counted.whole_replays
    assert recordings == 1 and replays > 6
    assert found == expected and found[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("whole", [False, True])
def test_random_calls(family: str, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the exactness suite, with drafts recorded alone or as a part of whole rounds."""
    if not whole:
        monkeypatch.setattr("mmspec.engine.loop.can_record_rounds", lambda *args: False)
    kind = "assistant" if family == "gemma4" else "mtp"
    with recording(record_nothing):
        for seed in range(7200, 7204):
            result = fuzz.run_case(replace(fuzz.draw_case(seed, family), drafter=kind, nodes=5))
            assert not result.differences, result.report()
