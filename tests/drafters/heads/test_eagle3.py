"""EAGLE-3 heads: their training against a slow reference, losses on distributions, storage, the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_target import HEAD_CONFIG, FakeTarget, build_train_batch, descend
from slow_readers import attend, rms_norm, rotate
from torch import Tensor

import mmspec
from mmspec.app.cli.main import main
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.random_models import random_model
from mmspec.app.scenes.render import render_scene
from mmspec.app.scenes.world import generate_scene
from mmspec.app.train import config as train
from mmspec.drafters.checkpoints.format import HeadMetadata, load_head, save_head
from mmspec.drafters.checkpoints.load import load_trained
from mmspec.drafters.heads.eagle3.head import Eagle3Config, Eagle3Head, eagle3_layers
from mmspec.drafters.training.batch import MIXED, DraftModel, TrainBatch, mix_visual_inputs
from mmspec.drafters.training.distribution_losses import DISTRIBUTION_LOSSES, overlap
from mmspec.drafters.training.losses import LossInputs, LossWeights, eagle_loss

DRAFT_IDS = torch.tensor([1, 2, 5, *range(8, 30)])
LAYERS = (0, 2, 1)
CONFIG = Eagle3Config.of(HEAD_CONFIG, draft_vocab_size=len(DRAFT_IDS), hidden_state_layers=LAYERS)


def new_draft_model(visual_mode: str = "coupled") -> DraftModel:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(7)
        head = Eagle3Head(CONFIG)
    for weight in head.parameters():
        weight.data.mul_(1.5)
    draft_model = DraftModel(head, visual_mode, "eagle3")
    draft_model.draft_ids = DRAFT_IDS
    return draft_model


def new_batch(target: FakeTarget) -> TrainBatch:
    """A batch with hidden states of three layers, as a target of any number of layers gives them."""
    batch = build_train_batch(target)
    states = {
        layer: torch.randn(batch.hidden_states.shape, generator=torch.Generator().manual_seed(layer))
        for layer in LAYERS
    }
    return replace(batch, inputs_embeds=batch.inputs_embeds.detach(), aux_hidden_states=states)


# --- the rollout, once more and slowly --------------------------------------------------------------------------------


def _slow_layer(
    head: Eagle3Head, embed: Tensor, state: Tensor, position: int, others: list[tuple[Tensor, Tensor]]
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """(output before the norm, own key and value) of one position that attends to `others` and itself."""
    layer, config = head.layer, head.config
    assert layer.input_norm is not None and layer.hidden_norm is not None
    normed = torch.cat(
        [rms_norm(embed, layer.input_norm.weight, 1e-5), rms_norm(state, layer.hidden_norm.weight, 1e-5)]
    )
    projected = (layer.qkv_proj.weight @ normed + layer.qkv_proj.bias).view(-1, config.head_dim)
    queries, keys, values = projected.split([config.num_attention_heads, *[config.num_key_value_heads] * 2])
    own = (rotate(keys, position, config.rope_theta), values)
    attended = attend(rotate(queries, position, config.rope_theta), [*others, own])
    state = state + layer.o_proj.weight @ attended
    gate, up = (layer.gate_up_proj.weight @ rms_norm(state, layer.post_norm.weight, 1e-5)).chunk(2)
    return state + layer.down_proj.weight @ (torch.nn.functional.silu(gate) * up), own


def _slow_losses(target: FakeTarget, head: Eagle3Head, batch: TrainBatch, ttt_steps: int) -> list[float]:
    """Mean cross-entropy of each step, every position on its own."""
    losses: list[list[float]] = [[] for _ in range(ttt_steps)]
    embeddings = target.shared_embeddings
    for row in range(len(batch.input_ids)):
        n = int(batch.attention_mask[row].sum())
        fused = [head.fc.weight @ batch.select_hidden_states(LAYERS)[row, i] for i in range(n)]
        embeds = batch.inputs_embeds[row]
        first = [_slow_layer(head, embeds[i + 1], fused[i], i, [])[1] for i in range(n - 1)]
        for i in range(n - 2):
            if not (batch.response_mask[row, i + 1] and batch.response_mask[row, i + 2]):
                continue
            state, drafted = fused[i], list[tuple[Tensor, Tensor]]()
            for step in range(min(ttt_steps, n - 2 - i)):
                context = first[:i] if not step else first[: i + 1]
                state, own = _slow_layer(head, embeds[i + 1 + step], state, i + step, [*context, *drafted])
                drafted += [own] if step else []
                logits = head.lm_head.weight @ rms_norm(state, head.norm.weight, 1e-5)
                labels = embeddings.lm_head(batch.hidden_states[row, i + 1 + step])
                is_draftable = int(labels.argmax()) in DRAFT_IDS.tolist()
                ce = -(labels[DRAFT_IDS].softmax(-1) * logits.log_softmax(-1)).sum()
                losses[step].append(float(ce) if is_draftable else 0.0)
    return [sum(values) / len(values) for values in losses]


def test_training_equals_the_slow_reference(target: FakeTarget) -> None:
    draft_model, batch = new_draft_model(), new_batch(target)
    weights = LossWeights(hidden=1.0, logits=0.3, ttt_steps=3, step_decay=0.7)
    with torch.no_grad():
        loss, metrics = eagle_loss(LossInputs(draft_model, batch, target.shared_embeddings, torch.zeros(32), weights))
        expected = _slow_losses(target, draft_model.head, batch, 3)
    assert float(loss) == pytest.approx(sum(0.3 * 0.7**i * value for i, value in enumerate(expected)), rel=1e-4)
    assert metrics["logits_loss"] == pytest.approx(expected[0], rel=1e-4) and "hidden_loss" not in metrics


def test_mixed_training_feeds_both_image_inputs(target: FakeTarget) -> None:
    batch, placeholder = new_batch(target), torch.full((32,), 9.0)
    found = set()
    for seed in range(8):
        mixed = mix_visual_inputs(batch, placeholder, torch.Generator().manual_seed(seed))
        for row in range(2):
            is_placeholder = (mixed.inputs_embeds[row] == 9).all(-1)
            found.add(bool(is_placeholder.any()))
            assert torch.equal(is_placeholder, batch.visual_mask[row] & is_placeholder.any())
            rest = ~is_placeholder
            assert torch.equal(mixed.inputs_embeds[row][rest], batch.inputs_embeds[row][rest])
    assert found == {False, True}
    losses = set()
    for mode in ("coupled", "placeholder", MIXED):
        with torch.no_grad():
            loss, _ = eagle_loss(LossInputs(new_draft_model(mode), batch, target.shared_embeddings, placeholder))
        losses.add(float(loss))
    assert len(losses) > 1 and new_draft_model(MIXED).drafting_mode == "coupled"


def test_default_layers() -> None:
    assert eagle3_layers(32) == (2, 16, 29) and eagle3_layers(10) == (2, 5, 7)


def test_a_head_is_stored_with_its_vocabulary(target: FakeTarget, tmp_path: Path) -> None:
    head = new_draft_model().head
    save_head(
        tmp_path, head, HeadMetadata(CONFIG, "coupled", 3, draft_ids=DRAFT_IDS, architecture="eagle3"), torch.float32
    )
    loaded, metadata = load_head(tmp_path)
    assert metadata.config == CONFIG and torch.equal(metadata.draft_ids, DRAFT_IDS)  # type: ignore[arg-type]
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in head.state_dict().items())
    drafter = load_trained(tmp_path)
    assert drafter.hidden_state_indices == LAYERS and drafter.max_depth == 6
    values = json.loads((tmp_path / "config.json").read_text())
    for key, value, problem in (
        ("draft_vocab_size", 0, "draft_vocab_size"),
        ("hidden_state_layers", "2,5,7", "hidden_state_layers must be a list of layer indices"),
        ("hidden_state_layers", [0, 1, 99], "0 to 3"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(values | {key: value}))
        with pytest.raises(ValueError, match=problem):
            load_trained(tmp_path)


# --- losses on distributions ------------------------------------------------------------------------------------------


def test_losses_on_distributions() -> None:
    logits, labels = torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([[0.0, 1.0, -1.0]])
    q, p = logits.softmax(-1)[0].tolist(), labels.softmax(-1)[0].tolist()
    alpha = sum(min(a, b) for a, b in zip(p, q, strict=True))
    kl = sum(a * (torch.tensor(a / b).log().item()) for a, b in zip(p, q, strict=True))
    entropy = -sum(a * torch.tensor(a).log().item() for a in p)
    share = torch.tensor(-3 * alpha).exp().item()
    expected = {
        "ce": kl + entropy,
        "kl": kl,
        "tv": 1 - alpha,
        "lk": -torch.tensor(alpha).log().item(),
        "lk-mix": share * kl + (1 - share) * (1 - alpha),
    }
    for name, value in expected.items():
        assert float(DISTRIBUTION_LOSSES[name](logits, labels)[0]) == pytest.approx(value, abs=1e-5)
    assert float(overlap(labels, labels)) == pytest.approx(1) and tuple(DISTRIBUTION_LOSSES) == train.LOSSES
    with pytest.raises(ValueError, match=r"loss must be one of ce, kl.*; got 'mse'"):
        LossWeights(loss="mse")


@pytest.mark.parametrize("loss", DISTRIBUTION_LOSSES)
def test_every_loss_is_minimised(target: FakeTarget, loss: str) -> None:
    """Some gradient steps on one batch raise the probability that drafts are accepted."""
    weights = LossWeights(logits=1.0, loss=loss)
    given = LossInputs(new_draft_model(), new_batch(target), target.shared_embeddings, torch.zeros(32), weights)
    (_, before), *_, (_, after) = descend(given, eagle_loss, 5e-3, 12)
    assert after["logits_loss"] < 0.9 * before["logits_loss"]


# --- the command line -------------------------------------------------------------------------------------------------


def write_images(folder: Path, count: int) -> Path:
    folder.mkdir()
    rows = []
    for number in range(count):
        render_scene(generate_scene(number)).save(folder / f"{number}.png")
        rows.append({"file_name": f"{number}.png", "prompt": f"what is this {number}"})
    (folder / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "list.jsonl"


def test_a_new_head_has_the_rows_of_the_target(tmp_path: Path) -> None:
    """Of its draft vocabulary, or of all ids; another vocabulary is another run."""
    data = write_images(tmp_path / "data", 4)
    args = ["train", "--target", "tiny", "--data", str(data), "--steps", "1", "--batch-size", "2", "--evaluate", "0"]
    args += ["--max-new-tokens", "4", "--lr", "1e-9", "--drafter", "eagle3", "--set", "layers=0,1,2"]
    rows = random_model("tiny")[0].get_output_embeddings().weight.data
    for name, more in (("all", []), ("some", ["draft_vocab=60"])):
        assert main([*args, *more, "--out", str(tmp_path / name)]) == 0
        head, metadata = load_head(tmp_path / name / "eagle3")
        wanted = rows if metadata.draft_ids is None else rows[metadata.draft_ids]
        assert len(wanted) == (60 if more else len(rows))
        torch.testing.assert_close(head.lm_head.weight.data.float(), wanted.float(), rtol=1e-2, atol=1e-3)
    assert main([*args, "draft_vocab=50", "--out", str(tmp_path / "some")]) == 2


def test_train_and_draft(tmp_path: Path, capsys: Any) -> None:
    data = write_images(tmp_path / "data", 10)
    args = ["train", "--target", "tiny", "--data", str(data), "--steps", "4", "--batch-size", "2", "--evaluate", "1"]
    args += ["--max-new-tokens", "8", "--drafter", "eagle3", "--loss", "lk", "--set", "draft_vocab=60", "layers=0,1,2"]
    args += ["--out", str(tmp_path / "run")]
    assert main(args) == 0
    assert "tau by visual mode: coupled 1." in capsys.readouterr().out
    evaluation = json.loads((tmp_path / "run" / "eagle3" / "evaluation.json").read_text())
    assert set(evaluation["tau_by_visual_mode"]) == {"coupled", "placeholder"}
    model, processor = random_model("tiny")
    inputs = Captioner(model, processor).build_inputs([render_scene(generate_scene(1))], ["what is it"])
    plain = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    mmspec.patch(model, str(tmp_path / "run" / "eagle3"), processor=processor, tree_size=8)
    assert torch.equal(model.generate(**inputs, max_new_tokens=12, do_sample=False), plain)
    assert mmspec.stats(model).num_draft_tokens > 0
    options = ("--start-from", str(tmp_path / "run"), "--evaluate", "0")
    assert main([*args[:-1], str(tmp_path / "more"), *options]) == 0
    first, second = (load_head(tmp_path / name / "eagle3")[1] for name in ("run", "more"))
    assert torch.equal(first.draft_ids, second.draft_ids)  # type: ignore[arg-type]
    for extra, problem in (
        (("--set", "layers=0,1"), "--set layers must be 3 of 0 to 2 for this target; got 0,1"),
        (("--set", "layers=0,1,3"), "--set layers must be 3 of 0 to 2 for this target; got 0,1,3"),
        (("--compressor", "latent:4"), "--compressor is for heads that read one hidden state"),
    ):
        assert main([*args[:-1], str(tmp_path / "no"), *extra]) == 2
        assert problem in capsys.readouterr().err
    assert main([*args, "--set", "layers=0,-1,2"]) == 2
    assert "--set layers must be a whole number of 0 or more" in capsys.readouterr().err
    assert main([*args[:-1], str(tmp_path / "no"), "--drafter", "msd", "--set", "layers=0,1,2"]) == 2
    assert "--set layers is for heads that read several hidden states" in capsys.readouterr().err
    flash = [
        *args[: args.index("--drafter")],
        "--drafter",
        "flash",
        "--set",
        "draft_vocab=60",
        "--out",
        str(tmp_path / "flash"),
    ]
    assert main(flash) == 0
    metadata = load_head(tmp_path / "flash" / "flash")[1]
    answers = [json.loads(line)["ids"] for line in (tmp_path / "flash" / "answers.jsonl").read_text().splitlines()]
    assert metadata.draft_ids is not None
    assert set(metadata.draft_ids.tolist()) >= {token for ids in answers for token in ids}, "fewer than 60"
