"""Recorded drafts of a head of the target's checkpoint: the same text and the same drafts as unrecorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fuzz
import own_heads as own
import pytest
import tiny_models as tiny
import torch
from parity import build_cached_model
from recorded_rounds import patched, recording
from torch import Tensor

import mmspec
from mmspec.drafters.mtp.drafter import MTPDrafter
from mmspec.engine.graph import Recorder, Replay, StaticFunction, record_nothing, record_trace
from mmspec.engine.round import ForwardFunction
from mmspec.targets.own_head import read_own_head
from mmspec.targets.registry import find_adapter


def trace_drafts(function: StaticFunction, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Replay:
    """Records drafts as traces; the target runs as it is."""
    recorder = record_nothing if isinstance(function, ForwardFunction) else record_trace
    return recorder(function, state, inputs)


@pytest.mark.parametrize(
    ("family", "sampled", "options", "recorder"),
    [
        ("glm_ocr", False, {"top_k": 2}, record_nothing),
        pytest.param("glm_ocr", False, {"top_k": 2}, trace_drafts, marks=pytest.mark.slow),
        pytest.param("glm_ocr", True, {"draft_ids": torch.arange(5, 100)}, trace_drafts, marks=pytest.mark.slow),
        pytest.param("exaone4_5", False, {"top_k": 2}, trace_drafts, marks=pytest.mark.slow),
        pytest.param("qwen3_5", True, {}, trace_drafts, marks=pytest.mark.slow),
    ],
)
def test_a_recorded_draft_on_other_prompts(
    family: str,
    sampled: bool,
    options: dict[str, Any],
    recorder: Recorder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A value that became a constant would be wrong in the other prompts: the text stays, fewer tokens are accepted."""
    if family not in own.FAMILIES:
        pytest.skip("an older transformers")
    monkeypatch.setattr("mmspec.engine.loop.can_record_rounds", lambda *args: False)
    window = 9 if family == "exaone4_5" else 0
    model = build_cached_model(tiny.ModelSpec(family, seed=3, layers=2, calm=True, window=window))
    own.write_checkpoint(model, tmp_path, own.head_tensors(model, echo=2.0))
    prompts = [tiny.build_inputs(model, seed, 2, images=[1, 0], padding="left") for seed in range(2)]
    limits: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": None, "do_sample": sampled}

    def generate(given: tiny.Inputs) -> Tensor:
        torch.manual_seed(1)
        return model.generate(**given, **limits)  # type: ignore[no-any-return,operator]

    plain = [generate(given) for given in prompts]

    def run() -> list[int]:
        drafter = MTPDrafter(read_own_head(find_adapter(model)), max_depth=3, **options)
        drafter.fix_switches(carry=drafter.head.rule.carries[0], visual_mode=drafter.head.visual_modes[0])
        with patched(model, drafter, tree_size=6):
            assert all(torch.equal(generate(given), text) for given, text in zip(prompts, plain, strict=True))
            stats = mmspec.stats(model)
            return [stats.num_accepted_tokens, stats.rounds]

    expected = run()
    with recording(recorder) as counted:
        found = run()
    assert counted.draft_recordings == 1 and counted.draft_replays > 6
    assert found == expected and found[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", own.FAMILIES)
@pytest.mark.parametrize("whole", [False, True])
def test_random_calls(family: str, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the exactness suite, with drafts recorded alone or as a part of whole rounds."""
    if not whole:
        monkeypatch.setattr("mmspec.engine.loop.can_record_rounds", lambda *args: False)
    with recording(record_nothing):
        for seed in range(7200, 7204):
            result = fuzz.run_case(replace(fuzz.draw_case(seed, family), drafter="mtp", nodes=5))
            assert not result.differences, result.report()
