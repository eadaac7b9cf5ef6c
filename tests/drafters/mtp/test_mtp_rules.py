"""Rules of families that are not entered: heads that read states before the final norm, with an LM head of their own.

Step-3.7's are such; its layout is made up here over the layers of another family.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import own_heads as own
import pytest
import tiny_models as tiny
import torch
import zoo
from parity import GREEDY
from torch import Tensor
from transformers import PreTrainedModel

import mmspec
from mmspec.drafters.mtp.drafter import MTPDrafter, MTPExpander
from mmspec.interfaces import HeadRule
from mmspec.targets.own_head import read_own_head
from mmspec.targets.own_head_layouts import LAYOUTS, HeadLayout
from mmspec.targets.registry import find_adapter

STEP_NAMES = {
    "fc": "eh_proj.weight",
    "embedding_norm": "enorm.weight",
    "hidden_norm": "hnorm.weight",
    "output_norm": "transformer.shared_head.norm.weight",
}
LM_HEAD = "transformer.shared_head.output.weight"


class SlowStep(own.SlowHead):
    """The formulas with an LM head of the head's own."""

    def logits(self, states: Tensor) -> Tensor:
        return self.norm("o", states) @ self.lm_head.T  # type: ignore[no-any-return]

    lm_head: Tensor


def step_like(folder: Path, monkeypatch: pytest.MonkeyPatch, rule: HeadRule) -> tuple[PreTrainedModel, SlowStep]:
    """A tiny target with such a head in its checkpoint, and the head as formulas."""
    model = tiny.build_model(tiny.ModelSpec("glm_ocr", seed=3, layers=3, calm=True))
    generator = torch.Generator().manual_seed(5)
    norm = model.get_decoder().norm.weight
    norm.data = torch.randn(norm.shape, generator=generator).exp()  # as uneven as those of large models
    prefix = own.head_prefix(model)
    layout = HeadLayout(rule, (prefix,), STEP_NAMES, block="", lm_head=LM_HEAD)
    monkeypatch.setitem(LAYOUTS, "glm_ocr", layout)
    tensors = own.head_tensors(model)
    slow = SlowStep(model, tensors, carry=rule.carries[0])
    slow.lm_head = torch.randn(model.get_output_embeddings().weight.shape, generator=generator)
    renamed = {
        name.replace("shared_head.norm", "transformer.shared_head.norm"): value for name, value in tensors.items()
    }
    own.write_checkpoint(model, folder, renamed | {prefix + LM_HEAD: slow.lm_head})
    return model, slow


def states_before_the_norm(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """[L, D] inputs of the final norm over a text."""
    seen: list[Tensor] = []
    handle = model.get_decoder().norm.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
    try:
        model(input_ids=ids)
    finally:
        handle.remove()
    return seen[0].detach()


@pytest.mark.skipif("glm_ocr" not in zoo.ROWS, reason="this transformers has no GLM-OCR")
@pytest.mark.parametrize("carry", ["pre", "post"])
def test_a_head_before_the_norm_with_its_own_lm_head(
    carry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of every level of every draft, against states that a hook takes from a plain forward."""
    model, slow = step_like(tmp_path, monkeypatch, HeadRule(hidden="pre", carries=(carry,)))
    drafter = MTPDrafter(read_own_head(find_adapter(model)), max_depth=3, top_k=1)
    levels: list[tuple[int, int, Tensor]] = []
    drafts = [0]
    logits, draft_tree = MTPExpander.logits, drafter.draft_tree

    def watched_logits(self: Any, level: int, hidden: Tensor) -> Tensor:
        found = logits(self, level, hidden)
        levels.append((drafts[0], level, found[0, 0]))
        return found

    def watched_tree(state: Any, max_nodes: int, num_levels: int) -> Any:
        drafts[0] = state.next_positions[0] + 1  # tokens of the text so far
        return draft_tree(state, max_nodes, num_levels)

    monkeypatch.setattr(MTPExpander, "logits", watched_logits)
    monkeypatch.setattr(drafter, "draft_tree", watched_tree)
    given = tiny.build_inputs(model, 7, 1, images=[0], padding="none")
    options = {**GREEDY, "max_new_tokens": 12}
    plain = model.generate(**given, **options)
    mmspec.patch(model, drafter=drafter, tree_size=4, deterministic=True)
    try:
        assert torch.equal(model.generate(**given, **options), plain)
    finally:
        mmspec.unpatch(model)
    hidden, embeds = states_before_the_norm(model, plain), model.get_input_embeddings()(plain[0]).detach()
    assert len(levels) >= 12 and {level for _, level, _ in levels} == {0, 1, 2}
    drafted: list[int] = []
    for length, level, found in levels:
        drafted = drafted if level else []
        n = length - 1  # rows: the last token is pending
        expected = slow.chain(embeds[1:length], hidden[:n], torch.arange(n), drafted)[-1]
        torch.testing.assert_close(found, expected.where(found.isfinite(), found), rtol=1e-3, atol=1e-3)
        drafted = [*drafted, int(found.argmax())]
