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
from recorded_rounds import patched, recording
from recorders import record_nothing, record_trace
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel
from watched_nodes import watch_nodes

import mmspec
from mmspec.drafters.mtp.drafter import MTPDrafter, MTPExpander
from mmspec.drafters.mtp.layered import LayeredMTPDrafter, LayeredMTPExpander, mtp_drafter
from mmspec.engine.graph import Recorder
from mmspec.interfaces import HeadRule, OwnHeadError
from mmspec.targets.own_head import read_own_head
from mmspec.targets.own_head_layouts import LAYOUTS, HeadLayout
from mmspec.targets.registry import find_adapter

STEP_NAMES = {
    "fc": "eh_proj.weight",
    "embedding_norm": "enorm.weight",
    "hidden_norm": "hnorm.weight",
    "output_norm": "transformer.shared_head.norm.weight",
}
PARTS = {"fc": "fc", "e": "embedding_norm", "h": "hidden_norm", "o": "output_norm"}
"""Of `own_heads.names_of`, as parts of a layout."""
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
    slow = SlowStep(model, tensors, carry=rule.carry)
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


def scored_nodes(
    monkeypatch: pytest.MonkeyPatch, drafter: MTPDrafter, expander: type[Any]
) -> list[tuple[int, list[int], Tensor]]:
    """Of every node that a drafter scores in calls of one row: tokens of the text so far, path and [V] logits."""
    nodes, draft_tree, seen = watch_nodes(monkeypatch, expander), drafter.draft_tree, []

    def watched_tree(state: Any, max_nodes: int, num_levels: int) -> Any:
        nodes.restart()
        length = state.kv_cache.seq_lens[0] + 1
        tree = draft_tree(state, max_nodes, num_levels)
        seen.extend((length, path, found[0, i]) for found, paths in nodes.levels for i, path in enumerate(paths[0]))
        return tree

    monkeypatch.setattr(drafter, "draft_tree", watched_tree)
    return seen


@pytest.mark.skipif("glm_ocr" not in zoo.ROWS, reason="this transformers has no GLM-OCR")
@pytest.mark.parametrize("carry", ["pre", "post"])
def test_a_head_before_the_norm_with_its_own_lm_head(
    carry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of every level of every draft, against states that a hook takes from a plain forward."""
    model, slow = step_like(tmp_path, monkeypatch, HeadRule(hidden="pre", carry=carry))
    drafter = MTPDrafter(read_own_head(find_adapter(model)), max_depth=3, top_k=1)
    seen = scored_nodes(monkeypatch, drafter, MTPExpander)
    given = tiny.build_inputs(model, 7, 1, images=[0], padding="none")
    options = {**GREEDY, "max_new_tokens": 12}
    plain = model.generate(**given, **options)
    mmspec.patch(model, drafter=drafter, tree_size=4, deterministic=True)
    try:
        assert torch.equal(model.generate(**given, **options), plain)
    finally:
        mmspec.unpatch(model)
    hidden, embeds = states_before_the_norm(model, plain), model.get_input_embeddings()(plain[0]).detach()
    assert len(seen) >= 12 and {len(path) for _, path, _ in seen} == {0, 1, 2}
    for length, path, found in seen:
        n = length - 1  # rows: the last token is pending
        expected = slow.chain(embeds[1:length], hidden[:n], torch.arange(n), path)[-1]
        torch.testing.assert_close(found, expected.where(found.isfinite(), found), rtol=1e-3, atol=1e-3)


class SlowLayers:
    """Heads in a chain by their definition: layer k at row p reads token p + k + 1 and what layer k - 1 carries on."""

    def __init__(self, layers: list[SlowStep]) -> None:
        self.layers = layers

    def logits(self, ids: list[int], hidden: Tensor, drafted: list[int], embeds: Tensor | None = None) -> Tensor:
        """[V] logits behind ids and a path of drafted tokens, of the layer that ranks them.

        Args:
            ids: of a text, the last of which the target has not read.
            hidden: [L - 1, D] states of the others.
            drafted: path.
            embeds: [L, D] of the ids as the target reads them.
        """
        embed = self.layers[0].model.get_input_embeddings()
        known = embed(torch.tensor(ids)) if embeds is None else embeds
        known = torch.cat((known, embed(torch.tensor(drafted, dtype=torch.long))))
        n = len(ids) - 1
        for index, layer in enumerate(self.layers[: len(drafted) + 1]):
            states = layer.states(known[index + 1 : index + 1 + n], hidden, torch.arange(n))
            hidden = layer.norm("o", states) if layer.carry == "post" else states
        return layer.logits(states[-1])


def layered(
    folder: Path, monkeypatch: pytest.MonkeyPatch, family: str, carry: str
) -> tuple[PreTrainedModel, SlowLayers]:
    """A tiny target with a head of three layers, two of them with LM heads of their own, and the head as formulas."""
    model = tiny.build_model(
        tiny.ModelSpec(family, seed=3, layers=3, calm=True, window=7 if family == "exaone4_5" else 0)
    )
    rule = HeadRule(hidden="post", carry=carry, layered=True)
    generator = torch.Generator().manual_seed(5)
    prefix, number = "model.language_model.layers.{layers}.", model.config.get_text_config().num_hidden_layers
    layout = HeadLayout(rule, (prefix,), STEP_NAMES, block="", lm_head=LM_HEAD)
    monkeypatch.setitem(LAYOUTS, family, layout)
    names, tensors, layers = own.names_of(model), dict[str, Tensor](), []
    for index in range(3):
        stored = own.head_tensors(model, seed=index)
        slow = SlowStep(model, stored, carry=carry)
        slow.lm_head = model.get_output_embeddings().weight.detach()
        new = prefix.format(layers=number + index)
        if index:
            slow.lm_head = torch.randn(slow.lm_head.shape, generator=generator)
            tensors[new + LM_HEAD] = slow.lm_head
        own_names = {names[part] + ".weight": STEP_NAMES[what] for part, what in PARTS.items()}
        for name, value in stored.items():
            short = name.removeprefix(own.head_prefix(model))
            tensors[new + own_names.get(short, short.removeprefix(names["block"]))] = value
        layers.append(slow)
    own.write_checkpoint(model, folder, tensors)
    return model, SlowLayers(layers)


@pytest.mark.skipif("glm_ocr" not in zoo.ROWS, reason="this transformers has no GLM-OCR")
@pytest.mark.parametrize(
    ("family", "carry", "top_k"),
    [("glm_ocr", "pre", 2), ("exaone4_5", "post", 1), pytest.param("exaone4_5", "pre", 2, marks=pytest.mark.slow)],
)
def test_layer_i_drafts_token_i(
    family: str, carry: str, top_k: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of every node of trees over rounds with rejections, against rows that the definition counts."""
    model, slow = layered(tmp_path, monkeypatch, family, carry)
    drafter = mtp_drafter(read_own_head(find_adapter(model)), max_depth=6, top_k=top_k)
    assert isinstance(drafter, LayeredMTPDrafter) and drafter.max_depth == 3
    drafter.carry = carry
    drafter.fix_visual_mode("coupled")
    seen = scored_nodes(monkeypatch, drafter, LayeredMTPExpander)
    given = tiny.build_inputs(model, 7, 1, images=[0], padding="none")
    options = {**GREEDY, "max_new_tokens": 12}
    plain = model.generate(**given, **options)
    mmspec.patch(model, drafter=drafter, tree_size=6, deterministic=True)
    try:
        assert torch.equal(model.generate(**given, **options), plain)
    finally:
        mmspec.unpatch(model)
    hidden, ids = model(input_ids=plain, output_hidden_states=True).hidden_states[-1][0].detach(), plain[0].tolist()
    assert len(seen) > 24 and {len(path) for _, path, _ in seen} == {0, 1, 2}
    for n, path, found in seen:
        expected = slow.logits(ids[:n], hidden[: n - 1], path)
        torch.testing.assert_close(found, expected.where(found.isfinite(), found), rtol=1e-3, atol=1e-3)


@pytest.mark.skipif("glm_ocr" not in zoo.ROWS, reason="this transformers has no GLM-OCR")
@pytest.mark.parametrize("recorder", [record_nothing, pytest.param(record_trace, marks=pytest.mark.slow)])
def test_a_head_of_several_layers_in_batches_and_recorded(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of different lengths, sampled, with a reduced LM head: the text, and recorded the same drafts."""
    model, _ = layered(tmp_path, monkeypatch, "glm_ocr", "pre")
    drafter = mtp_drafter(read_own_head(find_adapter(model)), top_k=2, draft_ids=torch.arange(5, 100))
    drafter.carry = "pre"
    drafter.fix_visual_mode("coupled")
    given = tiny.build_inputs(model, 5, 3, images=[1, 0, 1], padding="left")
    options: dict[str, Any] = {"max_new_tokens": 14, "do_sample": True, "eos_token_id": None}

    def generate() -> Tensor:
        torch.manual_seed(1)
        return model.generate(**given, **options)  # type: ignore[no-any-return,operator]

    plain, counts = generate(), []
    with patched(model, drafter, tree_size=6):
        assert torch.equal(generate(), plain)
        counts.append(mmspec.stats(model).num_accepted_tokens)
    with recording(recorder) as counted, patched(model, drafter, tree_size=6):
        assert torch.equal(generate(), plain)
        counts.append(mmspec.stats(model).num_accepted_tokens)
    assert counted.whole_replays > 6 and counts[0] == counts[1] > 0


@pytest.mark.skipif("glm_ocr" not in zoo.ROWS, reason="this transformers has no GLM-OCR")
def test_half_a_further_layer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = layered(tmp_path, monkeypatch, "glm_ocr", "pre")
    tensors = load_file(tmp_path / "head.safetensors")
    lost = sorted(name for name in tensors if ".layers.5." in name and "mlp" in name)
    own.write_checkpoint(model, tmp_path, {name: value for name, value in tensors.items() if name not in lost})
    with pytest.raises(OwnHeadError, match=r"lacks \d+ of \d+ tensors, such as .*layers\.5\.mlp"):
        read_own_head(find_adapter(model))
