"""The head of the target's checkpoint (MTP): its drafts against formulas written out, and its files."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import own_heads as own
import pytest
import tiny_models as tiny
import torch
from fuzz import patch_model
from parity import GREEDY, MODES, assert_parity, build_cached_model
from safetensors.torch import save_file
from tiny_processor import TinyProcessor
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel
from watched_nodes import WatchedNodes, watch_nodes

import mmspec
from mmspec.app.cli.main import main
from mmspec.app.scenes.render import render_scene
from mmspec.app.scenes.world import generate_scene
from mmspec.drafters import registry
from mmspec.drafters.mtp.drafter import MTPDrafter, MTPExpander
from mmspec.drafters.mtp.head import last_visible
from mmspec.engine.tree import DraftTree
from mmspec.interfaces import OwnHeadError, Prompt
from mmspec.resolve import resolve_drafter
from mmspec.targets.own_head import read_own_head
from mmspec.targets.registry import find_adapter

FAMILY = pytest.mark.parametrize("family", own.FAMILIES)
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def model_of(family: str, **changes: Any) -> PreTrainedModel:
    return build_cached_model(tiny.ModelSpec(family, **{"seed": 3, "layers": 3, **changes}))


def with_head(
    model: PreTrainedModel, folder: Path, tensors: Mapping[str, Tensor] | None = None, **options: Any
) -> dict[str, Tensor]:
    tensors = own.head_tensors(model) if tensors is None else dict(tensors)
    own.write_checkpoint(model, folder, tensors, **options)
    return tensors


def read(model: PreTrainedModel, **options: Any) -> MTPDrafter:
    return MTPDrafter(read_own_head(find_adapter(model)), **options)


@dataclass
class Row:
    """What a row's slow head reads: embeddings of the next tokens, states, positions of the rows."""

    embeds: Tensor
    hidden: Tensor
    position_ids: Tensor


@dataclass
class Watched:
    """A drafter whose rows and logits are compared with the slow head in every draft; half of its trees are right."""

    drafter: MTPDrafter
    slow: own.SlowHead
    answers: list[list[int]]
    nodes: WatchedNodes
    rows: list[Row] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    rounds: int = 0
    accepted: set[int] = field(default_factory=set)

    def begin(self, prompt: Prompt) -> None:
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
        self.emitted = [0] * len(self.rows)

    def observe(self, result: Any, hidden_states: Mapping[int, Tensor]) -> None:
        embed = self.slow.model.get_input_embeddings()
        for row, (ids, nodes) in enumerate(zip(result.emitted_ids, result.accepted_nodes, strict=True)):
            if not ids:
                continue
            one = self.rows[row]
            one.embeds = torch.cat((one.embeds, embed(torch.tensor(ids))))
            if hidden_states:
                self.accepted.add(len(ids) - 1)
                one.hidden = torch.cat((one.hidden, hidden_states[max(hidden_states)][row][nodes]))
                steps = torch.arange(1, len(ids) + 1)
                last = one.position_ids[..., -1:].amax() if self.emitted[row] == 1 else one.position_ids[..., -1:]
                one.position_ids = torch.cat(
                    (one.position_ids, last + steps.expand(*one.position_ids.shape[:-1], -1)), -1
                )
            self.emitted[row] += len(ids)

    def check(self) -> None:
        """The logits behind the last row of each sequence; now and then those of every node that was expanded."""
        self.rounds += 1
        assert self.nodes.levels, "drafted elsewhere"
        for logits, paths in self.nodes.levels if self.rounds % 9 == 1 else self.nodes.levels[:1]:
            for row, node_logits in enumerate(logits):
                for node, path in enumerate(paths[row]):
                    one = self.rows[row]
                    expected = self.slow.chain(one.embeds, one.hidden, one.position_ids, path)[-1]
                    found = node_logits[node]
                    is_draftable = found.isfinite()
                    torch.testing.assert_close(found[is_draftable], expected[is_draftable], **TOLERANCE)

    def mend(self, tree: DraftTree) -> DraftTree:
        """A chain of which the first tokens are right, and then one is wrong."""
        right = self.rounds % 4
        for row, done in enumerate(self.emitted):
            for depth in range(1, tree.num_nodes):
                tokens = self.answers[row]
                is_right = depth <= right and done + depth - 1 < len(tokens)
                tree.tokens[row, depth] = tokens[done + depth - 1] if is_right else 8
        tree.parents = torch.arange(-1, tree.num_nodes - 1).expand(len(self.emitted), -1).clone()
        tree.node_mask = torch.ones_like(tree.parents, dtype=torch.bool)
        return tree


@contextmanager
def watched(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], answers: list[list[int]], monkeypatch: Any, **options: Any
) -> Iterator[Watched]:
    """Context with the model patched with a watched drafter."""
    drafter = read(model, max_depth=4)
    for name, value in options.items():
        setattr(drafter, name, value)
    nodes = watch_nodes(monkeypatch, MTPExpander)
    watch = Watched(drafter, own.SlowHead(model, tensors), answers, nodes)
    begin, observe, draft_tree = drafter.begin, drafter.observe, drafter.draft_tree

    def watched_begin(prompt: Prompt) -> Any:
        state = begin(prompt)
        watch.begin(prompt)
        return state

    def watched_observe(state: Any, result: Any, hidden_states: Any) -> None:
        observe(state, result, hidden_states)
        watch.observe(result, hidden_states)

    def watched_draft(state: Any, max_nodes: int, num_levels: int) -> DraftTree:
        nodes.restart(len(watch.rows))
        tree = draft_tree(state, max_nodes, num_levels)
        watch.check()
        return watch.mend(tree)

    for name, replaced in (("begin", watched_begin), ("observe", watched_observe), ("draft_tree", watched_draft)):
        monkeypatch.setattr(drafter, name, replaced)
    with patch_model(model, drafter=drafter, tree_size=5, backend="torch"):
        yield watch


# --- the drafts -------------------------------------------------------------------------------------------------------


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_5", {}),
        ("qwen3_5", {"visual_mode": "placeholder"}),
        ("qwen3_5_moe", {}),
        ("glm_ocr", {"top_k": 2}),
        ("glm_ocr", {"visual_mode": "coupled"}),
        ("exaone4_5", {"top_k": 2}),
    ],
)
def test_every_row_of_every_draft_is_that_of_the_formulas(
    family: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over 24 rounds with rejections behind prompts with images, in ragged rows: a refill equals one pass."""
    model = model_of(family, window=9 if family == "exaone4_5" else 0)
    tensors = with_head(model, tmp_path)
    given = tiny.build_inputs(model, 5, 2, images=[1, 0], padding="left")
    kwargs: dict[str, Any] = {"max_new_tokens": 72, "do_sample": False, "eos_token_id": None}
    plain = model.generate(**given, **kwargs)
    answers = plain[:, given["input_ids"].shape[1] :].tolist()
    with watched(model, tensors, answers, monkeypatch, **options) as watch:
        assert torch.equal(model.generate(**given, **kwargs), plain)
        assert not mmspec.stats(model).fallback_reason
    assert watch.rounds >= 24 and {0, 1, 2} <= watch.accepted


@pytest.mark.every(2)
@FAMILY
@MODES
def test_the_output_is_the_targets(family: str, mode: dict[str, Any], tmp_path: Path) -> None:
    model = model_of(family, calm=True)
    with_head(model, tmp_path, own.head_tensors(model, echo=2.0))
    given = tiny.build_inputs(model, 7, 3, padding="left")
    stats = assert_parity(model, given, "mtp", patch_options={"tree_size": 6}, **{**mode, "max_new_tokens": 30})
    assert stats.num_draft_tokens > 0 and not stats.fallback_reason and stats.drafter.startswith("mtp")


def test_a_job_runs_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`mmspec caption` with a recurrent target and its head: the captions are those of single rows without drafts."""
    model = model_of(own.FAMILIES[0], calm=True)
    with_head(model, tmp_path / "model", own.head_tensors(model, echo=2.0))
    monkeypatch.setattr("mmspec.app.modeling.load.load_model", lambda *args, **options: (model, TinyProcessor(model)))
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number in range(5):
        render_scene(generate_scene(number)).save(pictures / f"{number}.png")
    given = ["caption", str(pictures), "--model", str(tmp_path / "model"), "--prompt", "abc", "--dtype", "float32"]
    found = []
    for drafter, size in (("none", "1"), ("auto", "3")):
        out = tmp_path / f"{drafter}.jsonl"
        flags = ["--drafter", drafter, "--batch-size", size, "--max-new-tokens", "10", "--out", str(out)]
        assert main([*given, *flags, "--no-progress"]) == 0
        found.append([json.loads(line) for line in out.read_text().splitlines()])
    assert len({row["caption"] for row in found[0]}) > 1 and {row["drafter"] for row in found[1]} == {"mtp"}
    assert [row["caption"] for row in found[0]] == [row["caption"] for row in found[1]]


@FAMILY
def test_rows_of_a_batch_draft_as_alone(family: str, tmp_path: Path) -> None:
    """The first trees of a ragged batch, and those of its text row alone."""
    model = model_of(family)
    with_head(model, tmp_path)
    drafter = read(model)
    given = tiny.build_inputs(model, 5, 3, images=[2, 0, 1], padding="left")
    mask = given["attention_mask"][1].bool()
    alone = {"input_ids": given["input_ids"][1:2, mask], "attention_mask": torch.ones(1, int(mask.sum())).long()}
    trees = [first_tree(model, drafter, one) for one in (given, alone)]
    assert torch.equal(trees[0].tokens[1], trees[1].tokens[0]) and torch.equal(trees[0].parents[1], trees[1].parents[0])


def first_tree(model: PreTrainedModel, drafter: MTPDrafter, given: tiny.Inputs) -> DraftTree:
    """The first tree that a drafter proposes in a call."""
    trees: list[DraftTree] = []
    with pytest.MonkeyPatch.context() as patch:
        draft_tree = drafter.draft_tree
        patch.setattr(drafter, "draft_tree", lambda *args: trees.append(draft_tree(*args)) or trees[-1])
        with patch_model(model, drafter=drafter, tree_size=6):
            model.generate(**given, **GREEDY)
    return trees[0]


def test_pictures_and_positions_reach_the_drafts(tmp_path: Path) -> None:
    """In text all visual modes and axes are one function; with images they are not."""
    model = model_of("glm_ocr")
    with_head(model, tmp_path)
    drafter = read(model)
    text = tiny.build_inputs(model, 5, 1, images=[0], padding="none")
    image = tiny.build_inputs(model, 5, 1, images=[1], padding="none")
    scores: dict[str, list[Tensor]] = {}
    for mode in ("coupled", "placeholder"):
        drafter.fix_visual_mode(mode)
        scores[mode] = [first_tree(model, drafter, given).scores for given in (text, image)]  # type: ignore[misc]
    torch.testing.assert_close(scores["coupled"][0], scores["placeholder"][0])
    assert not torch.allclose(scores["coupled"][1], scores["placeholder"][1])


def test_the_window_counts_what_a_row_sees() -> None:
    mask = torch.tensor([[1, 1, 1, 0, 0, 1], [1, 0, 0, 0, 1, 1]], dtype=torch.bool)
    assert last_visible(mask, 2).int().tolist() == [[0, 0, 1, 0, 0, 1], [0, 0, 0, 0, 1, 1]]


# --- acceptance -------------------------------------------------------------------------------------------------------


def test_a_bad_head_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmspec.drafters.mtp.own.MIN_DRAFTS", 12)
    model = model_of("qwen3_5")
    with_head(model, tmp_path)
    given = tiny.build_inputs(model, 5, 1, images=[0], padding="none")
    with patch_model(model, drafter="mtp", tree_size=3), caplog.at_level(logging.WARNING, "mmspec"):
        for _ in range(2):
            model.generate(**given, max_new_tokens=20, do_sample=False, eos_token_id=None)
    warnings = [record.message for record in caplog.records if "first tokens accepted" in record.message]
    assert len(warnings) == 1 and len(warnings[0]) <= 300 and warnings[0].startswith("mmspec: the MTP head has ")


def test_a_copy_shares_the_weights_only(tmp_path: Path) -> None:
    model = model_of("qwen3_5")
    with_head(model, tmp_path)
    drafter = read(model)
    twin = drafter.replicate()
    assert twin is not drafter and twin.head is drafter.head


# --- files ------------------------------------------------------------------------------------------------------------


def weights(model: PreTrainedModel) -> dict[str, Tensor]:
    return dict(read_own_head(find_adapter(model)).block.state_dict())


@FAMILY
@pytest.mark.parametrize("indexed", [True, False])
def test_fused_and_split_tensors_are_one_head(family: str, indexed: bool, tmp_path: Path) -> None:
    model = model_of(family)
    tensors = with_head(model, tmp_path / "fused", indexed=indexed)
    fused = weights(model)
    with_head(model, tmp_path / "split", own.split_experts(tensors), indexed=indexed)
    split = weights(model)
    assert fused.keys() == split.keys() and all(torch.equal(fused[name], split[name]) for name in fused)


def test_fp8_blocks_are_dequantised(tmp_path: Path) -> None:
    model = model_of("qwen3_5")
    tensors = own.head_tensors(model)
    name = "mtp.layers.0.mlp.up_proj.weight"
    scale = tensors[name].abs().amax() / 448
    quantised = {name: (tensors[name] / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale.view(1, 1)}
    with_head(model, tmp_path, tensors | quantised)
    found = weights(model)["layer.mlp.up_proj.weight"]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), tensors[name], rtol=0.1, atol=float(scale))
    with_head(model, tmp_path, tensors | {name: quantised[name]})
    with pytest.raises(OwnHeadError, match="without scales"):
        weights(model)
    with_head(model, tmp_path, tensors | quantised | {f"{name}_scale_inv": torch.ones(2, 1)})
    with pytest.raises(OwnHeadError, match="scale for each block"):
        weights(model)


def test_a_head_with_its_own_lm_head(tmp_path: Path) -> None:
    """A copy of the target's is shared; another one is used."""
    model = model_of("glm_ocr")
    prefix, tensors = own.head_prefix(model), own.head_tensors(model)
    lm_head = model.get_output_embeddings().weight.detach()
    embeds = {f"{prefix}embed_tokens.weight": model.get_input_embeddings().weight.detach().clone()}
    with_head(model, tmp_path / "copy", tensors | embeds | {f"{prefix}shared_head.head.weight": lm_head.clone()})
    assert read(model).head.lm_head is None
    with_head(model, tmp_path / "own", tensors | {f"{prefix}shared_head.head.weight": lm_head + 1})
    drafter = read(model)
    hidden = torch.randn(1, 1, lm_head.shape[1])
    own_logits = drafter.head.logits(hidden, find_adapter(model).shared_embeddings, None)
    torch.testing.assert_close(own_logits, drafter.head.output_norm(hidden) @ (lm_head + 1).T)


def broken(kind: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a checkpoint with a fault."""
    some = "mtp.layers.0.mlp.up_proj.weight"
    if kind == "none":
        return {"other": torch.zeros(1)}
    if kind == "half":
        return {name: value for name, value in tensors.items() if "mlp" not in name}
    if kind == "shape":
        return tensors | {some: tensors[some][:-1].clone()}
    if kind == "nan":
        return tensors | {some: tensors[some] * torch.nan}
    if kind == "integers":
        return tensors | {some: tensors[some].to(torch.int8)}
    return tensors | {"mtp.hyper_connection_mixer.weight": torch.zeros(1)}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("none", "has dropped its head"),
        ("half", "lacks 3 of 15 tensors"),
        ("shape", "must have the shape"),
        ("integers", "without scales"),
        ("nan", "not finite"),
        ("further", "a part that is not known"),
    ],
)
def test_a_bad_checkpoint_is_one_line_and_hybrid(
    kind: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of("qwen3_5")
    with_head(model, tmp_path, broken(kind, own.head_tensors(model)))
    registry.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "mmspec"):
        assert resolve_drafter("mtp", find_adapter(model)).name == "hybrid"
    lines = [record.message for record in caplog.records]
    assert len(lines) == 1 and reason in lines[0] and "hybrid" in lines[0]
    assert resolve_drafter("auto", find_adapter(model)).name == "arbitrated"


def test_files_that_lead_elsewhere_or_are_damaged(tmp_path: Path) -> None:
    model = model_of("qwen3_5")
    folder = tmp_path / "model"
    tensors = with_head(model, folder)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    save_file(tensors, tmp_path / "head.safetensors")
    for name in ("../head.safetensors", str(tmp_path / "head.safetensors")):
        changed = {key: name if key.startswith("mtp.") else value for key, value in content["weight_map"].items()}
        index.write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(OwnHeadError, match="files of its own folder"):
            weights(model)
    pickled = {key: "head.bin" if key.startswith("mtp.") else value for key, value in content["weight_map"].items()}
    index.write_text(json.dumps({"weight_map": pickled}))
    torch.save(tensors, folder / "head.bin")
    with pytest.raises(OwnHeadError, match="has no tensors"):
        weights(model)
    index.write_text(json.dumps(content))
    (folder / "head.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(OwnHeadError, match="damaged"):
        weights(model)
    (folder / "head.safetensors").unlink()
    with pytest.raises(OwnHeadError, match="missing"):
        weights(model)


def test_where_the_checkpoint_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder, or the snapshot of the model's own revision; nothing is fetched."""
    model = model_of("qwen3_5")
    monkeypatch.setattr(model.config, "_name_or_path", "")
    with pytest.raises(OwnHeadError, match="not loaded from a checkpoint") as raised:
        read(model)
    assert not raised.value.is_expected
    monkeypatch.setattr(model.config, "_name_or_path", "some-owner/some-model")
    asked: dict[str, Any] = {}

    def snapshot(name: str, **options: Any) -> str:
        asked.update(options)
        raise OSError("offline")

    monkeypatch.setattr("mmspec.targets.own_checkpoint.snapshot_download", snapshot)
    monkeypatch.setattr(model.config, "_commit_hash", "abc", raising=False)
    with pytest.raises(OwnHeadError, match="not in the local cache"):
        read(model)
    assert asked == {"revision": "abc", "local_files_only": True}


def test_dedicated_embeddings_and_other_families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3_5")
    with_head(model, tmp_path)
    monkeypatch.setattr(model.config.get_text_config(), "mtp_use_dedicated_embeddings", True, raising=False)
    with pytest.raises(OwnHeadError, match="mtp_use_dedicated_embeddings"):
        read(model)
    with pytest.raises(OwnHeadError, match="no draft head of llava is known"):
        read(model_of("llava"))
    with pytest.raises(ValueError, match="comes with the checkpoint"):
        registry.build_drafter("mtp")


def test_auto_takes_the_checkpoints_head_of_a_loaded_model(tmp_path: Path) -> None:
    """transformers loads the target without it."""
    model = model_of("qwen3_5")
    with_head(model, tmp_path)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path)
    drafter = resolve_drafter("auto", find_adapter(loaded))
    assert isinstance(drafter, MTPDrafter) and "15 tensors" in drafter.description
    state = torch.random.get_rng_state()
    read(model)
    assert torch.equal(torch.random.get_rng_state(), state)
