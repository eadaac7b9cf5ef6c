"""The recipe of the scenes model in miniature: it learns, it goes on where it was cut, and what it exports loads."""

from __future__ import annotations

import json
import math
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForImageTextToText, AutoProcessor, LlavaForConditionalGeneration

from mmspec.app.scenes import DamagedModelError, load_scenes_model
from mmspec.app.scenes.render import render_scene
from mmspec.app.scenes.training import evaluate, stages, train
from mmspec.app.scenes.training.build_model import NUM_VISUAL_TOKENS, build_scenes_config, init_scenes_model
from mmspec.app.scenes.training.data import generate_corpus, to_pixel_values
from mmspec.app.scenes.training.models import VlmTrainer
from mmspec.app.scenes.training.stages import STAGES, MuonAdamW, TrainingStage, learning_rate_at
from mmspec.app.scenes.training.train import ScenesTrainer
from mmspec.app.scenes.world import generate_scene

MINIATURE = (
    TrainingStage("see", 2, 2, 1e-3, first=0, warmup=1, eyes=1.0),
    TrainingStage("talk", 2, 2, 1e-3, first=100, warmup=1, layers=2),
    TrainingStage("settle", 1, 2, 1e-4, first=200, warmup=1, eyes=0.3),
)


def little(seed: int) -> LlavaForConditionalGeneration:
    """A model of the same shape, but small."""
    config = build_scenes_config()
    config.text_config.update({"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3})
    config.text_config.update({"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16})
    config.vision_config.update({"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2})
    config.vision_config.update({"num_attention_heads": 2})
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = LlavaForConditionalGeneration(config)
    model.generation_config.update(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ScenesTrainer:
    """A whole run of five steps, in one go. Its tokenizer has read less than a real one's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "generate_corpus", lambda count: generate_corpus(count // 20))
        training = ScenesTrainer(tmp_path_factory.mktemp("run"), MINIATURE, "cpu", 0, little)
    assert training.run(math.inf, show_progress=False)
    torch.save(training.model.state_dict(), training.run_folder / "whole.pt")
    training.export(training.run_folder / "model")
    return training


@pytest.fixture
def place(run: ScenesTrainer, tmp_path: Path) -> Path:
    """A folder for another run, with the tokenizer of the first."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(run.run_folder / name, tmp_path)
    return tmp_path


def test_a_run_that_is_cut_goes_on_where_it_was(run: ScenesTrainer, place: Path) -> None:
    for _ in range(12):  # no time at all: one step, then a checkpoint
        training = ScenesTrainer(place, MINIATURE, "cpu", 0, little)
        if training.run(0.0, show_progress=False):
            break
    assert training.stage_index == len(MINIATURE)
    whole, mine = torch.load(run.run_folder / "whole.pt", weights_only=True), training.model.state_dict()
    for name, value in whole.items():
        # Not to the last bit: where a gradient is nearly 0, the sign of an update hangs on the order of summing.
        assert float((value - mine[name]).abs().mean()) < 2e-5, name


def test_a_run_that_is_cut_between_two_stages_goes_on(place: Path) -> None:
    class Cut(ScenesTrainer):
        def build_module(self, stage: TrainingStage) -> Any:
            if stage.name == "talk":
                raise KeyboardInterrupt
            return super().build_module(stage)

    with pytest.raises(KeyboardInterrupt):
        Cut(place, MINIATURE, "cpu", 0, little).run(math.inf, show_progress=False)
    again = ScenesTrainer(place, MINIATURE, "cpu", 0, little)
    assert (again.stage_index, again.step) == (1, 0) and again.run(math.inf, show_progress=False)


def test_other_settings_are_refused(run: ScenesTrainer) -> None:
    with pytest.raises(SystemExit, match="other settings"):
        ScenesTrainer(run.run_folder, MINIATURE[:2], "cpu", 0, little)
    with pytest.raises(SystemExit, match="other settings"):
        ScenesTrainer(run.run_folder, MINIATURE, "cpu", 1, little)


def test_what_is_exported_is_rounded_and_loads_without_mmspec(run: ScenesTrainer) -> None:
    folder = run.run_folder / "model"
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["dtype"] == config["text_config"]["dtype"] == "float32"
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert type(model) is LlavaForConditionalGeneration and model.dtype == torch.float32
    for name, value in model.state_dict().items():
        assert torch.equal(value, value.bfloat16().float()), name
        assert torch.equal(value, run.model.state_dict()[name]), name
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert size < 4e6
    weights = sum(value.numel() for value in init_scenes_model().state_dict().values())
    assert 20e6 < weights < 22e6, "text 38 MB and vision 6 MB at most"


def test_the_processor_makes_what_the_training_made(run: ScenesTrainer) -> None:
    processor = AutoProcessor.from_pretrained(run.run_folder / "model", backend="pil")
    picture = render_scene(generate_scene(3))
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What do you see?"}]}]
    text = processor.apply_chat_template(chat, add_generation_prompt=True)
    assert text == "<s>USER: <image>What do you see? ASSISTANT:"
    made = processor(images=[picture], text=[text], return_tensors="pt")
    assert torch.allclose(made["pixel_values"][0], to_pixel_values(picture), atol=1e-6)
    assert (made["input_ids"] == run.model.config.image_token_index).sum() == NUM_VISUAL_TOKENS
    for size, mode in (((50, 400), "L"), ((640, 480), "RGBA"), ((1, 1), "CMYK")):
        odd = processor(images=[picture.convert(mode).resize(size)], text=[text], return_tensors="pt")
        assert odd["pixel_values"].shape == made["pixel_values"].shape


def test_evaluation_gives_a_flat_object_of_shares(run: ScenesTrainer) -> None:
    model, processor = load_scenes_model(run.run_folder / "model")
    result = evaluate.evaluate_scenes_model(model, processor, 50_000_000, 4, batch_size=16)
    assert {"things_named", "named_are_there", "places", "counts", "yes_no", "backgrounds"} <= {
        name.removesuffix("_n") for name in result
    }
    assert "control_things_named" in result and all(isinstance(value, int | float) for value in result.values())


def test_an_evaluation_that_was_cut_goes_on(
    run: ScenesTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, original = list[str](), evaluate.AnswerLog.add

    def spy(self: evaluate.AnswerLog, of: str, answers: dict[int, str]) -> None:
        asked.extend(answers.values())
        original(self, of, answers)

    monkeypatch.setattr(evaluate.AnswerLog, "add", spy)
    file = tmp_path / "answers.jsonl"
    args = ["--model", str(run.run_folder / "model"), "--count", "2", "--answers", str(file)]
    evaluate.main(args)
    whole, first, rows = capsys.readouterr().out, len(asked), file.read_bytes()
    assert first == len(rows.splitlines()) - 1 > 20
    file.write_bytes(rows[: len(rows) // 2])
    evaluate.main(args)
    assert capsys.readouterr().out == whole and 0 < len(asked) - first < first
    assert sorted(file.read_bytes().splitlines()) == sorted(rows.splitlines())
    with pytest.raises(SystemExit):
        evaluate.main([*args, "--first-seed", "50000001"])
    assert "holds answers to" in capsys.readouterr().err and file.read_bytes().startswith(rows[:40])


def test_damaged_and_missing_files_are_named(run: ScenesTrainer, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(run.run_folder / "model", folder)
    load_scenes_model(folder)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    for damaged in (content[:-1] + bytes([content[-1] ^ 1]), content[:1000], b""):
        weights.write_bytes(damaged)
        with pytest.raises(DamagedModelError, match=r"model\.safetensors is damaged: get it back") as failed:
            load_scenes_model(folder)
        assert str(weights) in str(failed.value) and "\n" not in str(failed.value)
    weights.unlink()
    with pytest.raises(DamagedModelError, match=r"model\.safetensors is missing"):
        load_scenes_model(folder)
    with pytest.raises(DamagedModelError, match=r"checksums\.json is missing"):
        load_scenes_model(tmp_path)


def test_upper_layers_begin_as_doing_nothing() -> None:
    model = init_scenes_model().eval()
    ids = torch.arange(20)[None] + 100
    with torch.no_grad():
        whole = model(input_ids=ids).logits
        text = model.model.language_model
        text.layers = text.layers[:5]
        assert torch.allclose(model(input_ids=ids).logits, whole, atol=1e-5)


def test_a_frozen_tower_is_not_trained() -> None:
    model = init_scenes_model()
    stage = TrainingStage("talk", 1, 1, 1e-3, first=0, layers=1)
    part = VlmTrainer(model, torch.arange(3), stage)
    trained = {
        id(w) for optimiser in MuonAdamW(stage, part).optimizers for g in optimiser.param_groups for w in g["params"]
    }
    for name, weight in model.named_parameters():
        assert (id(weight) in trained) == ("vision_tower" not in name), name


def test_shares_of_the_rate() -> None:
    model = init_scenes_model()
    stage = TrainingStage("x", 1, 1, 1e-3, first=0, eyes=0.1, upper=0.3)
    part = VlmTrainer(model, torch.arange(3), stage)
    shares = {id(w): g["share"] for o in MuonAdamW(stage, part).optimizers for g in o.param_groups for w in g["params"]}
    for name, weight in part.named_parameters():
        upper = any(f"language_model.layers.{number}." in name for number in range(5, 10))
        assert shares[id(weight)] == (0.1 if "vision_tower" in name else 0.3 if upper else 1.0), name


@pytest.mark.parametrize("shape", [(6, 6), (4, 12), (12, 4)])
def test_muon_where_bfloat16_is_slow_does_what_that_of_torch_does(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    draw = torch.Generator().manual_seed(3)
    begin, grads = torch.randn(shape, generator=draw), [torch.randn(shape, generator=draw) for _ in range(3)]
    ends = []
    for native in (True, False):
        monkeypatch.setattr(stages, "bf16_is_faster", lambda device, native=native: native)
        weight = nn.Parameter(begin.clone())
        optimiser = stages.Muon([weight], lr=0.1, weight_decay=0.02, adjust_lr_fn="match_rms_adamw")
        for grad in grads:
            weight.grad = grad.clone()
            optimiser.step()
        ends.append((weight.detach(), optimiser.state[weight]["momentum_buffer"]))
    assert (ends[0][0] - begin).abs().max() > 0.05
    assert torch.allclose(ends[0][0], ends[1][0], atol=0.01) and torch.equal(ends[0][1], ends[1][1])


def test_rates() -> None:
    stage = TrainingStage("x", 100, 1, 1.0, first=0, warmup=10)
    rates: list[Any] = [learning_rate_at(stage, step) for step in range(100)]
    assert rates[0] == 0.1 and max(rates) == 1.0 and rates[-1] < 0.03
    assert all(a >= b for a, b in pairwise(rates[10:]))
    half = TrainingStage("x", 100, 1, 1.0, first=0, warmup=10, last=0.5)
    assert 0.5 <= learning_rate_at(half, 99) < 0.51
    assert [stage.name for stage in STAGES] == ["see", "talk", "settle", "polish", "even"]


def test_a_run_may_begin_with_an_exported_model(run: ScenesTrainer, place: Path) -> None:
    again = ScenesTrainer(place, MINIATURE, "cpu", 7, little)
    again.start_from_model(run.run_folder / "model", "settle")
    assert (again.stage_index, again.step) == (2, 0)
    for name, value in run.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name
    assert again.run(math.inf, show_progress=False)
