"""Training of the scenes model in miniature: steps, resuming, export, evaluation, optimizer."""

from __future__ import annotations

import json
import math
import random
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
from mmspec.app.scenes.world import FIRST_HELD_OUT_SEED, generate_scene
from research.scenes import eval_questions, evaluate, stages, train
from research.scenes.build_model import NUM_VISUAL_TOKENS, build_scenes_config, format_prompt, init_scenes_model
from research.scenes.clips import generate_clip
from research.scenes.data import generate_corpus, to_pixel_values
from research.scenes.models import VlmTrainer
from research.scenes.stages import STAGES, MuonAdamW, TrainingStage, learning_rate_at
from research.scenes.train import ScenesTrainer

pytestmark = pytest.mark.research

MINIATURE = (
    TrainingStage("see", 2, 2, 1e-3, first=0, warmup=1, eyes=1.0),
    TrainingStage("talk", 2, 2, 1e-3, first=100, warmup=1, layers=2),
    TrainingStage("settle", 1, 2, 1e-4, first=200, warmup=1, eyes=0.3),
)


def build_small_model(seed: int) -> LlavaForConditionalGeneration:
    """The architecture of the scenes model with small widths."""
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
    """An uninterrupted run of five steps; its tokenizer is trained on a twentieth of the corpus."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "generate_corpus", lambda count: generate_corpus(count // 20))
        trainer = ScenesTrainer(tmp_path_factory.mktemp("run"), MINIATURE, "cpu", 0, build_small_model)
    assert trainer.run(math.inf, show_progress=False)
    torch.save(trainer.model.state_dict(), trainer.run_folder / "final.pt")
    trainer.export(trainer.run_folder / "model")
    return trainer


@pytest.fixture
def run_folder(run: ScenesTrainer, tmp_path: Path) -> Path:
    """A folder for another run, with the tokenizer of the first."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(run.run_folder / name, tmp_path)
    return tmp_path


def test_interrupted_run_resumes(run: ScenesTrainer, run_folder: Path) -> None:
    for _ in range(12):  # time limit 0: one step, then a checkpoint
        trainer = ScenesTrainer(run_folder, MINIATURE, "cpu", 0, build_small_model)
        if trainer.run(0.0, show_progress=False):
            break
    assert trainer.stage_index == len(MINIATURE)
    expected = torch.load(run.run_folder / "final.pt", weights_only=True)
    resumed = trainer.model.state_dict()
    for name, value in expected.items():
        # Not bitwise: where a gradient is nearly 0, the sign of an update depends on the order of summation.
        assert float((value - resumed[name]).abs().mean()) < 2e-5, name


def test_run_interrupted_between_stages_resumes(run_folder: Path) -> None:
    class InterruptedTrainer(ScenesTrainer):
        def build_module(self, stage: TrainingStage) -> nn.Module:
            if stage.name == "talk":
                raise KeyboardInterrupt
            return super().build_module(stage)

    with pytest.raises(KeyboardInterrupt):
        InterruptedTrainer(run_folder, MINIATURE, "cpu", 0, build_small_model).run(math.inf, show_progress=False)
    resumed = ScenesTrainer(run_folder, MINIATURE, "cpu", 0, build_small_model)
    assert (resumed.stage_index, resumed.step) == (1, 0) and resumed.run(math.inf, show_progress=False)


def test_other_settings_are_refused(run: ScenesTrainer) -> None:
    with pytest.raises(SystemExit, match="other settings"):
        ScenesTrainer(run.run_folder, MINIATURE[:2], "cpu", 0, build_small_model)
    with pytest.raises(SystemExit, match="other settings"):
        ScenesTrainer(run.run_folder, MINIATURE, "cpu", 1, build_small_model)


def test_export_is_rounded_and_loads_without_mmspec(run: ScenesTrainer) -> None:
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
    num_weights = sum(value.numel() for value in init_scenes_model().state_dict().values())
    assert 20e6 < num_weights < 22e6, "text 38 MB and vision 6 MB at most"


def test_processor_agrees_with_the_training_data(run: ScenesTrainer) -> None:
    processor = AutoProcessor.from_pretrained(run.run_folder / "model", backend="pil")
    image = render_scene(generate_scene(3))
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What do you see?"}]}]
    text = processor.apply_chat_template(chat, add_generation_prompt=True)
    assert text == "<s>USER: <image>What do you see? ASSISTANT:"
    inputs = processor(images=[image], text=[text], return_tensors="pt")
    assert torch.allclose(inputs["pixel_values"][0], to_pixel_values(image), atol=1e-6)
    assert (inputs["input_ids"] == run.model.config.image_token_index).sum() == NUM_VISUAL_TOKENS
    for size, mode in (((50, 400), "L"), ((640, 480), "RGBA"), ((1, 1), "CMYK")):
        converted = processor(images=[image.convert(mode).resize(size)], text=[text], return_tensors="pt")
        assert converted["pixel_values"].shape == inputs["pixel_values"].shape


def test_evaluation_returns_flat_accuracies(run: ScenesTrainer) -> None:
    model, processor = load_scenes_model(run.run_folder / "model")
    result = evaluate.evaluate_scenes_model(model, processor, 50_000_000, 4, batch_size=16)
    assert {"things_named", "named_are_there", "places", "counts", "yes_no", "backgrounds"} <= {
        name.removesuffix("_n") for name in result
    }
    assert "control_things_named" in result and all(isinstance(value, int | float) for value in result.values())


def test_interrupted_evaluation_resumes(
    run: ScenesTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generated: list[str] = []
    original = evaluate.AnswerLog.add

    def spy(self: evaluate.AnswerLog, split: str, answers: dict[int, str]) -> None:
        generated.extend(answers.values())
        original(self, split, answers)

    monkeypatch.setattr(evaluate.AnswerLog, "add", spy)
    file = tmp_path / "answers.jsonl"
    args = ["--model", str(run.run_folder / "model"), "--count", "2", "--answers", str(file)]
    evaluate.main(args)
    output = capsys.readouterr().out
    num_first = len(generated)
    rows = file.read_bytes()
    assert num_first == len(rows.splitlines()) - 1 > 20
    file.write_bytes(rows[: len(rows) // 2])
    evaluate.main(args)
    assert capsys.readouterr().out == output and 0 < len(generated) - num_first < num_first
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


def test_upper_layers_start_as_identity() -> None:
    model = init_scenes_model().eval()
    ids = torch.arange(20)[None] + 100
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        text = model.model.language_model
        text.layers = text.layers[:5]
        assert torch.allclose(model(input_ids=ids).logits, expected, atol=1e-5)


def test_a_frozen_tower_is_not_trained() -> None:
    model = init_scenes_model()
    stage = TrainingStage("talk", 1, 1, 1e-3, first=0, layers=1)
    module = VlmTrainer(model, torch.arange(3), stage)
    trained = {
        id(w) for optimizer in MuonAdamW(stage, module).optimizers for g in optimizer.param_groups for w in g["params"]
    }
    for name, weight in model.named_parameters():
        assert (id(weight) in trained) == ("vision_tower" not in name), name


def test_learning_rate_shares() -> None:
    model = init_scenes_model()
    stage = TrainingStage("x", 1, 1, 1e-3, first=0, eyes=0.1, upper=0.3)
    module = VlmTrainer(model, torch.arange(3), stage)
    shares = {
        id(w): g["share"] for o in MuonAdamW(stage, module).optimizers for g in o.param_groups for w in g["params"]
    }
    for name, weight in module.named_parameters():
        upper = any(f"language_model.layers.{number}." in name for number in range(5, 10))
        assert shares[id(weight)] == (0.1 if "vision_tower" in name else 0.3 if upper else 1.0), name


@pytest.mark.parametrize("shape", [(6, 6), (4, 12), (12, 4)])
def test_float32_muon_agrees_with_torch(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]) -> None:
    rng = torch.Generator().manual_seed(3)
    initial = torch.randn(shape, generator=rng)
    grads = [torch.randn(shape, generator=rng) for _ in range(3)]
    results = []
    for native in (True, False):
        monkeypatch.setattr(stages, "bf16_is_faster", lambda device, native=native: native)
        weight = nn.Parameter(initial.clone())
        optimizer = stages.Muon([weight], lr=0.1, weight_decay=0.02, adjust_lr_fn="match_rms_adamw")
        for grad in grads:
            weight.grad = grad.clone()
            optimizer.step()
        results.append((weight.detach(), optimizer.state[weight]["momentum_buffer"]))
    (expected, expected_momentum), (actual, momentum) = results
    assert (expected - initial).abs().max() > 0.05
    assert torch.allclose(expected, actual, atol=0.01) and torch.equal(expected_momentum, momentum)


def test_learning_rate_schedule() -> None:
    stage = TrainingStage("x", 100, 1, 1.0, first=0, warmup=10)
    rates = [learning_rate_at(stage, step) for step in range(100)]
    assert rates[0] == 0.1 and max(rates) == 1.0 and rates[-1] < 0.03
    assert all(a >= b for a, b in pairwise(rates[10:]))
    half = TrainingStage("x", 100, 1, 1.0, first=0, warmup=10, last=0.5)
    assert 0.5 <= learning_rate_at(half, 99) < 0.51
    assert [stage.name for stage in STAGES] == ["see", "talk", "settle", "polish", "even"]


def test_run_starts_from_an_exported_model(run: ScenesTrainer, run_folder: Path) -> None:
    trainer = ScenesTrainer(run_folder, MINIATURE, "cpu", 7, build_small_model)
    trainer.start_from_model(run.run_folder / "model", "settle")
    assert (trainer.stage_index, trainer.step) == (2, 0)
    for name, value in run.model.state_dict().items():
        assert torch.equal(trainer.model.state_dict()[name], value), name
    assert trainer.run(math.inf, show_progress=False)


def test_shared_images_are_encoded_once_and_answers_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reference: `generate` of each question alone, without a prefilled cache."""
    model, processor = load_scenes_model()
    questions = list(eval_questions.build_scene_questions(generate_scene(FIRST_HELD_OUT_SEED), random.Random(0)))
    questions.append(eval_questions.build_clip_question(generate_clip(FIRST_HELD_OUT_SEED), random.Random(0)))
    num_encoded: list[int] = []
    original = type(model.model).get_image_features

    def spy(self: Any, pixel_values: torch.Tensor, **kwargs: Any) -> Any:
        num_encoded.append(len(pixel_values))
        return original(self, pixel_values, **kwargs)

    monkeypatch.setattr(type(model.model), "get_image_features", spy)
    answers = evaluate.generate_answers(model, processor, questions, 8, lambda count: None)
    num_frames = len(questions[-1].images)
    assert sum(num_encoded) < len(questions) / 2 + num_frames, "images that questions of one batch share"
    for question, answer in zip(questions, answers, strict=True):
        text = "<s>" + format_prompt(question.question, len(question.images))
        inputs = processor(images=[list(question.images)], text=[text], return_tensors="pt")
        output_ids = model.generate(**inputs, max_new_tokens=question.max_new_tokens, do_sample=False)
        new_ids = output_ids[0, inputs["input_ids"].shape[1] :]
        assert answer == processor.tokenizer.decode(new_ids, skip_special_tokens=True).strip(), question.question
