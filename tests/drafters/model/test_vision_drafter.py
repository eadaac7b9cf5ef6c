"""A smaller vision-language model drafts with the images, all of their tokens or those that a compressor leaves."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import tiny_models as tiny
import torch

import mmspec
from mmspec.drafters.model.build import build_model_drafter
from mmspec.drafters.model.model_drafter import ModelDrafter
from mmspec.drafters.model.vision_drafter import VisionModelDrafter, compress_prompt
from mmspec.interfaces import Prompt, TargetInfo
from mmspec.targets.draft_model import HFDraftModel
from mmspec.vision.registry import build_compressor

FAMILIES = ("llava", "qwen2_5_vl", "llava_onevision", "gemma3")


@pytest.mark.every(3)
@pytest.mark.parametrize("compressor", [None, "stride:1000", "stride:2"])
@pytest.mark.parametrize("family", FAMILIES[:3])
def test_the_target_itself_drafts_what_it_emits(family: str, compressor: str | None, caplog: Any) -> None:
    """Embeddings, positions and the order of the tokens are right, or a draft token would be rejected."""
    model = tiny.build_model(tiny.ModelSpec(family=family, calm=True))
    model.generation_config.eos_token_id = None
    inputs = tiny.build_inputs(model, seed=1, batch=2)
    plain = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    drafter = VisionModelDrafter(HFDraftModel(copy.deepcopy(model)))
    drafter.top_k = 1
    mmspec.patch(model, drafter=drafter, compressor=compressor, tree_size=4)
    assert torch.equal(plain, model.generate(**inputs, max_new_tokens=16, do_sample=False))
    stats = mmspec.stats(model)
    least = 0.4 if compressor == "stride:2" else 0.7  # some emitted ids may not be drafted, such as the placeholder
    assert stats.num_accepted_tokens > least * stats.num_draft_tokens > 0
    assert not caplog.records
    if compressor == "stride:2" and family != "qwen2_5_vl":  # which has several position axes
        assert stats.num_compressed_tokens < stats.num_visual_tokens


def test_a_prompt_keeps_its_order_and_its_positions() -> None:
    ids = torch.tensor([[0, 4, 9, 9, 9, 9, 5], [6, 9, 9, 7, 9, 9, 8]])
    mask = torch.tensor([[False] + [True] * 6, [True] * 7])
    positions = torch.tensor([[1, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6]])
    prompt = Prompt(ids, mask, ids == 9, positions, vocab_size=20)
    embeds = positions[..., None].float() + torch.tensor([[[0.0]], [[100.0]]])
    joined, new_mask, new_positions = compress_prompt(prompt, embeds, build_compressor("stride:2"))
    for row, offset in ((0, 0.0), (1, 100.0)):
        kept = new_mask[row].bool()
        assert torch.equal(joined[row, kept, 0], new_positions[row, kept] + offset)
        assert new_positions[row, kept].tolist() == sorted(set(new_positions[row, kept].tolist()))
        assert int(kept.sum()) == (4 if row == 0 else 5)
        assert not bool(kept[: -int(kept.sum())].any()), "padding on the left"
    assert {0, 5} <= set(new_positions[0, new_mask[0].bool()].tolist())


def test_images_that_the_draft_model_rejects_are_left_out(caplog: Any) -> None:
    spec = tiny.ModelSpec()
    model, draft = tiny.build_model(spec), tiny.build_model(replace(spec, layers=1))
    inputs = tiny.build_inputs(model, seed=1)
    plain = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    draft.config.vision_feature_select_strategy = "full"  # one token more per image
    mmspec.patch(model, drafter=draft, tree_size=4)
    assert torch.equal(plain, model.generate(**inputs, max_new_tokens=12, do_sample=False))
    assert mmspec.stats(model).num_draft_tokens > 0
    assert "reads no images" in caplog.text


def test_placeholders_decide() -> None:
    source = HFDraftModel(tiny.build_model(tiny.ModelSpec()))
    info = TargetInfo("llava", 32, 120, 2, media_token_ids=source.media_token_ids)
    assert type(build_model_drafter(source, info)) is VisionModelDrafter
    assert type(build_model_drafter(source, replace(info, media_token_ids=(9,)))) is ModelDrafter
