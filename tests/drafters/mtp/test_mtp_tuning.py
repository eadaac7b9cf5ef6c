"""Heads of a target's checkpoint that are tuned: the loss against the formulas, `train`, `export`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import own_heads as own
import pytest
import tiny_models as tiny
import torch
from fuzz import patch_model
from safetensors import safe_open
from tiny_processor import TinyProcessor
from torch import Tensor
from transformers import PreTrainedModel

import mmspec
from mmspec.app.cli.main import main
from mmspec.app.scenes.render import render_scene
from mmspec.app.scenes.world import generate_scene
from mmspec.app.train.data import Teacher
from mmspec.app.train.datasets import Request
from mmspec.drafters.checkpoints.export import export_head
from mmspec.drafters.heads.registry import find_method
from mmspec.drafters.mtp.drafter import MTPDrafter
from mmspec.drafters.training.batch import DraftModel, TrainBatch
from mmspec.drafters.training.losses import LossAccumulator, LossInputs, LossWeights
from mmspec.patching import patch_state
from mmspec.resolve import resolve_drafter, target_info
from mmspec.targets.own_head import read_own_head
from mmspec.targets.registry import find_adapter

FAMILY = pytest.mark.parametrize("family", own.FAMILIES)
IMAGES = [render_scene(generate_scene(number)) for number in range(3)]


def build(family: str, folder: Path, **changes: Any) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A tiny target that generates text alone, with a head in its checkpoint; and the tensors of the head."""
    spec = tiny.ModelSpec(family, seed=1, calm=True, layers=2, **changes)
    model = tiny.build_model(spec)
    model.generation_config.eos_token_id = None
    model.generation_config.suppress_tokens = sorted(set(range(spec.vocab)) - set(tiny.special_ids(spec).text))
    tensors = own.head_tensors(model)
    own.write_checkpoint(model, folder, tensors)
    return model, tensors


def stored(folder: Path, name: str = "model.safetensors") -> dict[str, Tensor]:
    with safe_open(folder / name, "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)


def read(model: PreTrainedModel, **options: Any) -> MTPDrafter:
    return MTPDrafter(read_own_head(find_adapter(model)), **options)


# --- the loss ---------------------------------------------------------------------------------------------------------


@FAMILY
def test_the_loss_reads_what_drafts_read(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows, image positions included, and those of its rollout are those of the formulas, row by row."""
    monkeypatch.setattr("mmspec.app.train.data.bf16_is_faster", lambda device: False)
    model, tensors = build(family, tmp_path, window=7 if family == "exaone4_5" else 0)
    requests: Any = [Request(IMAGES[0], "abc"), Request((), "bad"), Request(tuple(IMAGES[1:3]), "deaf cab")]
    teacher: Any = Teacher(model, TinyProcessor(model), requests)
    teacher.generate_answers(tmp_path / "run", 2, 6)
    teacher.has_axes = True
    batch = teacher.make_batch([0, 1, 2])
    head = read(model).head.trainable_copy()
    found: list[Tensor] = []
    monkeypatch.setattr(LossAccumulator, "add", lambda self, step, states, *args, **options: found.append(states))
    draft_model = DraftModel(head, "coupled", "mtp")
    placeholder = torch.zeros(batch.inputs_embeds.shape[-1])
    loss = find_method("mtp").loss()
    loss(LossInputs(draft_model, batch, teacher.adapter.shared_embeddings, placeholder, LossWeights(ttt_steps=3)))
    assert len(found) == 3 and all(len(states) for states in found)
    for step, states in enumerate(found):
        logits = head.logits(states, teacher.adapter.shared_embeddings, None)
        torch.testing.assert_close(logits, expected_logits(model, tensors, batch, step), rtol=1e-4, atol=1e-4)


def expected_logits(model: PreTrainedModel, tensors: dict[str, Tensor], batch: TrainBatch, steps: int) -> Tensor:
    """[rows that are learned, V] logits behind `steps` further tokens of the answers, of a slow head."""
    slow, rows = own.SlowHead(model, tensors), []
    for row, mask in enumerate(batch.attention_mask):
        n, answer = int(mask.sum()), int(batch.response_mask[row].nonzero()[0])
        ids, hidden, embeds = batch.input_ids[row, :n].tolist(), batch.hidden_states[row], batch.inputs_embeds[row, 1:]
        positions = torch.arange(n) if batch.position_ids is None else batch.position_ids[row]
        if model.config.model_type == "glm_ocr":
            embeds = torch.cat((torch.zeros_like(embeds[:1]), embeds[1:]))
        for at in range(answer - 1, n - 2 - steps):
            read_to = slice(at + 1)
            drafted = ids[at + 2 : at + 2 + steps]
            rows.append(slow.chain(embeds[read_to], hidden[read_to], positions[..., read_to], drafted)[-1])
    return torch.stack(rows).detach()


# --- mmspec train and export ------------------------------------------------------------------------------------------


def train(model: PreTrainedModel, folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    """`mmspec train` on pictures and a loaded model; the run is in `folder`/run."""
    rows = []
    for number, image in enumerate(IMAGES):
        image.save(folder / f"{number}.png")
        rows.append({"file_name": f"{number}.png", "prompt": "abcd"[number:]})
    (folder / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr("mmspec.app.modeling.load.load_model", lambda *args, **options: (model, TinyProcessor(model)))
    args = ["--target", "any", "--data", str(folder / "list.jsonl"), "--out", str(folder / "run"), "--drafter", "mtp"]
    sizes = ["--steps", "12", "--batch-size", "3", "--max-new-tokens", "12", "--evaluate", "0"]
    return main(["train", *args, *sizes, *flags])


def names_in_vllm(names: set[str]) -> set[str]:
    """Parameters that vLLM's `qwen3_5_mtp` has for tensors with these names, as its `load_weights` maps them."""
    found = set()
    for name in names:
        if name.startswith("mtp."):
            found.add(name.replace("mtp.", "model."))
        elif "embed_tokens" in name or "lm_head" in name:
            found.add(name.replace("language_model.", "") if "embed_tokens" in name else name)
    return found


def test_from_the_command_line_to_an_engine_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tensors = build("qwen3_5", tmp_path / "target")
    assert train(model, tmp_path, monkeypatch, "--lr", "0.02") == 0
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < log[0]["loss"]
    tuned = stored(tmp_path / "run" / "mtp")
    assert set(tuned) == set(tensors) and all(tuned[name].shape == value.shape for name, value in tensors.items())
    assert not any(torch.equal(tuned[name], value.to(tuned[name].dtype)) for name, value in tensors.items())

    folder = tmp_path / "served"
    assert main(["export", str(tmp_path / "run"), "--format", "vllm", "--out", str(folder)]) == 2
    assert "--target" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), "--format", "vllm", "--target", "any", "--out", str(folder)]) == 0
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    held = {shard: stored(folder, shard) for shard in set(index["weight_map"].values())}
    assert {name: shard for shard, part in held.items() for name in part} == index["weight_map"]
    assert sum(value.nbytes for part in held.values() for value in part.values()) == index["metadata"]["total_size"]
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "qwen3_5" and config["text_config"]["mtp_num_hidden_layers"] == 1
    expected = {f"model.{name.removeprefix('mtp.')}" for name in tensors}
    assert names_in_vllm(set(index["weight_map"])) == expected | {"model.embed_tokens.weight", "lm_head.weight"}

    given = tiny.build_inputs(model, 5, 2, images=[1, 0], padding="left")
    plain = model.generate(**given, max_new_tokens=16, do_sample=False)
    for head in (tmp_path / "run" / "mtp", folder):
        with patch_model(model, drafter=str(head), tree_size=4):
            assert torch.equal(model.generate(**given, max_new_tokens=16, do_sample=False), plain)
            assert mmspec.stats(model).num_draft_tokens > 0
            drafter = patch_state(model).config.drafter
        assert isinstance(drafter, MTPDrafter)
        found = drafter.head.stored_tensors()
        assert all(torch.equal(found[name].to(value.dtype), value) for name, value in tuned.items())
    assert train(model, tmp_path, monkeypatch, "--start-from", str(folder), "--out", str(tmp_path / "more")) == 2


@FAMILY
@pytest.mark.parametrize("split", [False, True])
def test_an_export_has_the_tensors_of_the_checkpoint(family: str, split: bool, tmp_path: Path) -> None:
    """Bit for bit, under the same names, experts one by one where they were; and is read back."""
    model, tensors = build(family, tmp_path / "target")
    tensors = own.split_experts(tensors) if split else tensors
    own.write_checkpoint(model, tmp_path / "target", tensors)
    adapter = find_adapter(model)
    export_head(tmp_path / "out", read(model), target_info(adapter, None), "vllm", adapter.shared_embeddings)
    names = set(json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"])
    prefix, vlm = own.head_prefix(model), "model.language_model.embed_tokens.weight"
    glm = {f"{prefix}embed_tokens.weight", f"{prefix}shared_head.head.weight"}
    assert names - set(tensors) == (glm if family == "glm_ocr" else {vlm, "lm_head.weight"})
    drafter = resolve_drafter(str(tmp_path / "out"), adapter)
    assert isinstance(drafter, MTPDrafter) and drafter.head.lm_head is None
    found = drafter.head.stored_tensors()
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], value) for name, value in tensors.items())


@pytest.mark.parametrize(
    ("family", "flags", "message"),
    [
        ("qwen3_5", ["--set", "visual_mode=decoupled"], "--set visual_mode must be one of coupled, placeholder, mixed"),
        ("qwen3_5", ["--set", "layers=1"], "--set layers is for heads that read several hidden states"),
        ("qwen3_5", ["--set", "head_layers=2"], "--set head_layers is for dspark and dflash2 and lilicorr heads"),
        ("qwen3_vl", [], "no draft head of qwen3_vl is known"),
    ],
)
def test_what_cannot_be_tuned_is_refused_in_one_line(
    family: str,
    flags: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if family in own.FAMILIES:
        model, _ = build(family, tmp_path / "target")
    else:
        model = tiny.build_model(tiny.ModelSpec(family))
    capsys.readouterr()  # the bar of transformers that writes the target
    assert train(model, tmp_path, monkeypatch, *flags) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_vllm_feeds_image_positions_as_the_family_does(tmp_path: Path) -> None:
    model, _ = build("glm_ocr", tmp_path / "target")
    drafter, adapter = read(model), find_adapter(model)
    drafter.fix_visual_mode("coupled")
    with pytest.raises(ValueError, match=r"vLLM feeds such heads 'placeholder'.*trained 'coupled'"):
        export_head(tmp_path / "out", drafter, target_info(adapter, None), "vllm", adapter.shared_embeddings)
    with pytest.raises(ValueError, match="use --format vllm"):
        export_head(tmp_path / "out", read(model), target_info(adapter, None), "sglang", adapter.shared_embeddings)
