"""`mmspec train --drafter draft-lm`: a draft model for a vision-language and for a language target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
from draft_models import train_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import mmspec
from mmspec.app.cli.main import main
from mmspec.app.errors import UsageError
from mmspec.app.modeling.random_models import random_model
from mmspec.app.train.draft_lm import (
    DraftLMTrainer,
    TextSample,
    answer_loss,
    default_num_layers,
    draft_layer_indices,
    init_draft_model,
)
from mmspec.app.train.text_teacher import read_questions, write_questions

ARGS = ("--drafter", "draft-lm", "--steps", "4", "--batch-size", "2", "--max-new-tokens", "8")
CHAT = "{% for m in messages %}<bos>{{ m['content'] }}<eos>{% endfor %}"


def _text_target(folder: Path) -> Path:
    """The folder of a tiny language model with a tokenizer and a chat template."""
    model = tiny.build_model(tiny.ModelSpec(family="llama", vocab=270, layers=4, calm=True))
    model.save_pretrained(folder)
    tokenizer = train_tokenizer(11)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


def test_a_draft_model_of_a_vision_language_target(tmp_path: Path, capsys: Any) -> None:
    from test_app_train import write_manifest

    out, data = tmp_path / "run", write_manifest(tmp_path / "data", 20)
    args = ["train", "--target", "tiny", *ARGS, "--data", str(data), "--evaluate", "0", "--out", str(out)]
    assert main([*args, "--minutes", "0"]) == 0
    assert "stopped after 0 of 4 steps" in capsys.readouterr().out
    assert main(args) == 0
    folder = out / "draft-lm"
    assert f"{folder}: trained" in capsys.readouterr().out
    assert json.loads((folder / "provenance.json").read_text())["draft_lm_for"] == "tiny"
    model, processor = random_model("tiny")
    mmspec.patch(model, drafter=str(folder), processor=processor)
    draft = AutoModelForCausalLM.from_pretrained(folder)
    assert draft.config.num_hidden_layers == 1
    assert torch.equal(draft.get_input_embeddings().weight, model.get_input_embeddings().weight), "these stay fixed"
    with pytest.raises(UsageError, match="other settings"):
        main_raising([*args[:-2], "--lr", "0.5", "--out", str(out)])
    with pytest.raises(UsageError, match="draft-lm has no compressor"):
        main_raising([*args, "--compressor", "pool:4"])


def main_raising(args: list[str]) -> None:
    """The command without the conversion of its errors into exit codes."""
    from mmspec.app.cli.main import build_parser

    parsed = build_parser().parse_args(args)
    parsed.command = ""
    parsed.run(parsed)


def test_a_draft_model_of_a_language_target(tmp_path: Path, capsys: Any) -> None:
    target, out = _text_target(tmp_path / "target"), tmp_path / "run"
    questions = tmp_path / "questions.txt"
    questions.write_text("\n".join(f"How many foxes, {number}?" for number in range(12)) + "\n\n")
    args = ["train", "--target", str(target), *ARGS, "--data", str(questions), "--set", "draft_layers=2"]
    args += ["--evaluate", "2", "--out", str(out)]
    assert main(args) == 0
    assert "held-out requests" in capsys.readouterr().out
    assert len((out / "answers.jsonl").read_text().splitlines()) == 11
    model = AutoModelForCausalLM.from_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    inputs = tokenizer(["How many?", "A small test: "], return_tensors="pt", padding=True, padding_side="left")
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    plain = model.generate(**inputs, max_new_tokens=16)
    mmspec.patch(model, drafter=str(out / "draft-lm"), processor=tokenizer, tree_size=4)
    assert torch.equal(plain, model.generate(**inputs, max_new_tokens=16))
    assert mmspec.stats(model).num_draft_tokens > 0


def test_heads_of_a_language_target(tmp_path: Path, capsys: Any) -> None:
    """Trained, found to draft, and the same text; options about images are refused."""
    target, data = _text_target(tmp_path / "target"), tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"How many foxes,\n{number}?"}) + "\n" for number in range(12)))
    args = ["train", "--target", str(target), "--drafter", "eagle,flash,eagle3", "--steps", "3", "--batch-size", "2"]
    args += ["--max-new-tokens", "8", "--set", "draft_vocab=64", "--evaluate", "2", "--data", str(data)]
    assert main([*args, "--out", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.count("held-out requests") == 3
    model, tokenizer = AutoModelForCausalLM.from_pretrained(target), AutoTokenizer.from_pretrained(target)
    inputs = tokenizer(["How many?"], return_tensors="pt").to(model.device)
    given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    plain = model.generate(**given, max_new_tokens=16)
    for name in ("eagle", "flash", "eagle3"):
        mmspec.patch(model, str(tmp_path / "run" / name), processor=tokenizer, tree_size=4)
        assert torch.equal(plain, model.generate(**given, max_new_tokens=16))
        assert mmspec.stats(model).num_draft_tokens > 0
        mmspec.unpatch(model)
    given_args = ["compare", "--model", str(target), "--prompt", "How many?", "--new-tokens", "4"]
    assert main([*given_args, "--drafters", f"none,{tmp_path / 'run' / 'flash'}"]) == 0
    assert capsys.readouterr().out.count(" yes ") == 2
    assert main([*given_args, "--image", "photo.png"]) == 2 and "reads no pictures" in capsys.readouterr().err
    with pytest.raises(UsageError, match="text_first is about images"):
        main_raising([*args, "--set", "text_first", "--out", str(tmp_path / "other")])
    for wrong in ("[1]", '{"prompt": 3}', "{", '{"text": "a"}'):
        data.write_text(wrong + "\n")
        with pytest.raises(UsageError, match="row 1: no object with a"):
            read_questions([str(data)])


def test_a_target_writes_its_requests(tmp_path: Path) -> None:
    target = _text_target(tmp_path / "target")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(target), AutoTokenizer.from_pretrained(target)
    questions = write_questions(model, tokenizer, tmp_path / "run", 5, 4, 0)
    assert len(questions) == len(set(questions)) == 5
    assert write_questions(model, tokenizer, tmp_path / "run", 3, 4, 1) == questions[:3], "read, not written again"
    tokenizer.chat_template = None
    with pytest.raises(UsageError, match="no chat template"):
        write_questions(model, tokenizer, tmp_path / "other", 3, 4, 0)
    with pytest.raises(UsageError, match=r"--data .*nothing\.txt"):
        read_questions([str(tmp_path / "nothing.txt")])
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(UsageError, match="empty"):
        read_questions([str(tmp_path / "empty.txt")])


def test_the_layers_of_a_draft_model() -> None:
    assert draft_layer_indices(30, 4) == [0, 10, 19, 29] and draft_layer_indices(30, 1) == [0]
    assert [default_num_layers(count) for count in (2, 10, 30)] == [1, 1, 3]
    with pytest.raises(ValueError, match="--set draft_layers must be 1 to the target's 4; got 5"):
        draft_layer_indices(4, 5)
    with pytest.raises(UsageError, match="draft-lm begins with layers of the target"):
        init_draft_model(tiny.build_model(tiny.ModelSpec()), 3)


def test_all_layers_are_the_target_itself() -> None:
    target = tiny.build_model(tiny.ModelSpec(family="llama", layers=3))
    draft = init_draft_model(target, 3)
    ids = torch.arange(7, 19)[None]
    torch.testing.assert_close(draft(input_ids=ids).logits, target(input_ids=ids).logits)


def test_the_loss_is_that_of_the_answers_and_falls(tmp_path: Path) -> None:
    target = tiny.build_model(tiny.ModelSpec(family="llama", layers=3))
    draft = init_draft_model(target, 1)
    samples = [TextSample([5, 9, 7], [11, 12, 13, 2]), TextSample([8], [14, 2])]
    loss, accuracy = answer_loss(draft, samples)
    expected = []
    for sample in samples:
        row = torch.tensor([sample.prompt_ids + sample.answer_ids])
        log_probs = draft(input_ids=row).logits[0].log_softmax(-1)
        start = len(sample.prompt_ids)
        expected += [log_probs[start - 1 + i, token] for i, token in enumerate(sample.answer_ids)]
    torch.testing.assert_close(loss, -torch.stack(expected).mean())
    assert 0 <= float(accuracy) <= 1
    options: dict[str, Any] = {"max_steps": 30, "batch_size": 2, "lr": 3e-3, "seed": 0}
    trainer = DraftLMTrainer(tmp_path, draft, samples, **options)
    losses: list[float] = []
    assert trainer.run(1e9, lambda metrics: losses.append(metrics["loss"]))
    assert losses[-1] < 0.5 * losses[0]
    resumed = DraftLMTrainer(tmp_path, init_draft_model(target, 1), samples, **options)
    assert resumed.step == 30
    for one, other in zip(resumed.draft.parameters(), draft.parameters(), strict=True):
        assert torch.equal(one, other)
