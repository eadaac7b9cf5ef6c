"""`mmspec train`: from requests to a drafter that `patch` takes; interrupted, resumed, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from forced_drafts import only_fixed, planned

import mmspec
from mmspec.app.cli.main import main
from mmspec.app.modeling.random_models import random_model
from mmspec.app.scenes.render import render_scene
from mmspec.app.scenes.world import generate_scene
from mmspec.app.train import command as train
from mmspec.app.train import config as train_config
from mmspec.app.train import heads, report
from mmspec.app.train.data import Teacher
from mmspec.app.train.datasets import FileData, Request, image_fraction
from mmspec.app.train.sampler import LengthGroupedSampler
from mmspec.drafters.heads.eagle.head import EagleConfig
from mmspec.drafters.heads.registry import find_method
from mmspec.economy.chooser import Chooser


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Five images with prompts, one with an answer."""
    return write_manifest(tmp_path / "data", 5)


def write_manifest(folder: Path, count: int) -> Path:
    """A manifest of `count` images."""
    folder.mkdir()
    rows = []
    for number in range(count):
        render_scene(generate_scene(number)).save(folder / f"{number}.png")
        rows.append({"file_name": f"{number}.png", "prompt": f"what is this {number}"})
    rows[2]["answer"] = "a red house"
    (folder / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "list.jsonl"


ARGS = ("--target", "tiny", "--steps", "4", "--batch-size", "2", "--max-new-tokens", "10", "--evaluate", "2")


def test_a_run_from_the_command_line(tmp_path: Path, capsys: Any) -> None:
    out, data = tmp_path / "run", write_manifest(tmp_path / "data", 20)
    words = ["--drafter", "msd,eagle-text-only", "--set", "draft_vocab=30"]
    args = ["train", *ARGS, "--data", str(data), "--out", str(out), *words]
    assert main(args) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    summaries = [line for line in lines if not line.startswith("  ")]
    assert [line.split(":")[0] for line in summaries] == [str(out / "msd"), str(out / "eagle-text-only")]
    assert all("on 2 held-out requests, trees of 16 nodes" in line for line in summaries)
    commands = [line for line in lines if line.startswith("  next: ")]
    assert commands[0] == f"  next: mmspec compare --drafters auto,{out / 'msd'} --model tiny --image {data}"
    assert sum(line.startswith("  acceptance at depth 1, 2, ...: ") for line in lines) == 2
    assert "mmspec: answers: 18 of 18 texts" in captured.err and "mmspec: train: 4 of 4 steps" in captured.err
    config = json.loads((out / "msd" / "config.json").read_text())
    assert config["visual_mode"] == "decoupled"
    assert (config["target"]["model_type"], config["target"]["num_layers"]) == ("llava", 2)
    assert (
        config["facts"] == {"target": "tiny", "visual_mode": "decoupled"}
        and report.target_name(str(tmp_path / "data")) == "data"
    )
    provenance = json.loads((out / "msd" / "provenance.json").read_text())
    assert provenance["command"].startswith("mmspec train --target tiny") and provenance["seed"] == 0
    assert {"commit", "torch", "transformers", "mmspec"} <= set(provenance)
    evaluation = json.loads((out / "msd" / "evaluation.json").read_text())
    assert evaluation["tau"] >= 1 and evaluation["held_out"] is True and evaluation["requests"] == 2
    assert evaluation["acceptance_by_depth"] and evaluation["speed"]["identical"] is True
    assert 0 <= evaluation["speed"]["drafted_share"] <= 1 and evaluation["speed"]["requests"] == 2
    answers = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    assert sorted(row["number"] for row in answers) == list(range(18)), "the last two are held out"
    model, processor = random_model("tiny")
    mmspec.patch(model, str(out / "msd"), processor=processor)
    drafter = model.__dict__["_mmspec"].config.drafter
    assert drafter.name == "msd" and len(drafter.draft_ids) <= 30 and 2 in drafter.draft_ids.tolist()


def test_block_heads_over_several_layers_are_trained_and_draft(data: Path, tmp_path: Path) -> None:
    out, options = (
        tmp_path / "run",
        ["--set", "block=4", "head_layers=2", "layers=0,1,2", "--evaluate", "0"],
    )
    names = ("dspark", "dspark-mixture", "dflash2", "lilicorr")
    args = ["train", *ARGS, "--data", str(data), "--drafter", ",".join(names), "--out", str(out)]
    assert main([*args, *options]) == 0
    model, processor = random_model("tiny")
    ids = torch.arange(5, 13)[None]
    settings: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 16, "do_sample": False}
    plain = model.generate(input_ids=ids, **settings)
    for name in names:
        config = json.loads((out / name / "config.json").read_text())
        assert (config["block_size"], config["num_hidden_layers"]) == (4, 2)
        assert config["layer_mixture"] == (name == "dspark-mixture") and config["hidden_state_layers"] == [0, 1, 2]
        mmspec.patch(model, str(out / name), processor=processor, tree_size=8)
        assert torch.equal(model.generate(input_ids=ids, **settings), plain)
        assert mmspec.stats(model).num_draft_tokens > 0
        mmspec.unpatch(model)


def test_an_interrupted_run_is_resumed(data: Path, tmp_path: Path, capsys: Any) -> None:
    args = ["train", *ARGS, "--data", str(data), "--drafter", "msd", "--evaluate", "0"]
    assert main([*args, "--out", str(tmp_path / "whole")]) == 0
    for _ in range(6):
        assert main([*args, "--out", str(tmp_path / "cut"), "--minutes", "0"]) == 0
        if "stopped after" not in capsys.readouterr().out:
            break
    from safetensors.torch import load_file

    whole, cut = (load_file(tmp_path / name / "msd" / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.allclose(whole[name].float(), cut[name].float(), atol=1e-2) for name in whole)
    assert main([*args, "--out", str(tmp_path / "cut"), "--lr", "0.5"]) == 2
    assert "other settings (config)" in capsys.readouterr().err


def test_answers_of_another_run_are_not_used(
    data: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was killed while it generated answers has no checkpoint to compare settings with."""
    out, answer, left = tmp_path / "run", Teacher._answer, [True]

    def killed(*args: Any) -> Any:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return answer(*args)

    args = ["train", *ARGS, "--data", str(data), "--drafter", "msd", "--evaluate", "0", "--out", str(out)]
    with monkeypatch.context() as patch:
        patch.setattr(Teacher, "_answer", killed)
        assert main(args) == 130
    before = (out / "answers.jsonl").read_bytes()
    assert before.count(b"\n") == 2 and not (out / "state.pt").exists()
    assert main([*args, "--max-new-tokens", "7"]) == 2
    assert "other settings (max_new_tokens)" in capsys.readouterr().err
    first = data.read_text()
    data.write_text(first.replace("what is this 4", "who is this 4"))
    assert main(args) == 2
    assert "other settings (items)" in capsys.readouterr().err
    assert (out / "answers.jsonl").read_bytes() == before
    (out / "run.json").unlink()
    assert main(args) == 0, "answers without run.json are used as they are"
    assert (out / "answers.jsonl").read_bytes().startswith(before)


def test_a_trained_compressor_is_not_lost(data: Path, tmp_path: Path, capsys: Any) -> None:
    from safetensors.torch import load_file

    args = ["train", *ARGS, "--data", str(data), "--drafter", "msd", "--evaluate", "0"]
    first, out = tmp_path / "first", tmp_path / "on"
    assert main([*args, "--compressor", "latent:3", "--seed", "1", "--out", str(first)]) == 0
    more = ["--start-from", str(first), "--out", str(out)]
    assert main([*args, *more, "--compressor", "latent:3", "--lr", "1e-9"]) == 0
    old, new = (load_file(folder / "msd" / "model.safetensors") for folder in (first, out))
    assert any(name.startswith("compressor.") for name in old) and all(torch.equal(old[key], new[key]) for key in old)
    capsys.readouterr()
    for flags, name in (([], "none"), (["--compressor", "latent:4"], "latent:4")):
        assert main([*args, "--start-from", str(first), *flags, "--out", str(tmp_path / "no")]) == 2
        assert f"was trained with --compressor latent:3 (wanted: {name})" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_one_line(data: Path, tmp_path: Path, capsys: Any) -> None:
    args = ["train", *ARGS, "--data", str(data), "--drafter", "msd", "--evaluate", "0", "--out", str(tmp_path)]
    assert main([*args, "--minutes", "0"]) == 0
    file = tmp_path / "state.pt"
    file.write_bytes(file.read_bytes()[:-1000])
    capsys.readouterr()
    assert main(args) == 2
    err = capsys.readouterr().err
    assert f"{file} is damaged" in err and "delete it" in err and err.count("\n") == 1


def test_start_from_trained_weights(data: Path, tmp_path: Path, capsys: Any) -> None:
    from safetensors.torch import load_file

    args = ["train", *ARGS, "--data", str(data), "--evaluate", "0"]
    first, still = tmp_path / "first", ["--lr", "1e-9"]
    assert main([*args, "--drafter", "msd,flash", "--set", "ffn=48", "--out", str(first)]) == 0
    for start, name in ((first, "msd"), (first / "flash", "flash")):
        out = tmp_path / f"on-{name}"
        assert main([*args, *still, "--drafter", name, "--start-from", str(start), "--out", str(out)]) == 0
        old, new = (load_file(folder / name / "model.safetensors") for folder in (first, out))
        assert all(torch.equal(old[key], new[key]) for key in old)
        assert json.loads((out / name / "provenance.json").read_text())["start_from"] == str(start)
    capsys.readouterr()
    for more, message in (
        (["--drafter", "eagle", "--start-from", str(first / "msd")], "visual mode decoupled (wanted: coupled)"),
        (["--drafter", "parallel", "--start-from", str(first / "flash")], "architecture flash (wanted: parallel)"),
        (["--drafter", "msd", "--start-from", str(first), "--set", "ffn=49"], "ffn 48 (wanted: 49)"),
        (["--drafter", "msd,eagle", "--start-from", str(first)], "there is no eagle/config.json"),
        (["--drafter", "msd", "--start-from", str(tmp_path / "nowhere")], "config.json is missing"),
        (["--drafter", "msd", "--start-from", "msd"], "another target: hidden_size 384 (the target: 64)"),
    ):
        assert main([*args, *more, "--out", str(tmp_path / "other")]) == 2
        assert message in capsys.readouterr().err


def test_answers_are_generated_under_patch(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = random_model("tiny")
    teacher, patched = Teacher(model, processor, FileData([str(data)])), []
    generate = Teacher._generate

    def watched(self: Teacher, *args: Any) -> Any:
        patched.append(mmspec.is_patched(model))
        return generate(self, *args)

    monkeypatch.setattr(Teacher, "_generate", watched)
    teacher.generate_answers(tmp_path, 2, 8)
    assert patched and all(patched) and not mmspec.is_patched(model)


def test_incomplete_answers_are_generated_again(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = random_model("tiny")
    teacher = Teacher(model, processor, FileData([str(data)]))
    teacher.generate_answers(tmp_path, 2, 8)
    file = tmp_path / "answers.jsonl"
    whole = file.read_text()
    assert [json.loads(line)["number"] for line in whole.splitlines()] == list(range(5))
    half = whole[: len(whole) // 2]
    file.write_text(half)
    again = Teacher(model, processor, FileData([str(data)]))

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space"):
            again.generate_answers(tmp_path, 2, 8)
    assert file.read_text() == half and len(list(tmp_path.iterdir())) == 2, "data and answers"
    done: list[int] = []
    again.generate_answers(tmp_path, 2, 8, done.append)
    assert again.answers == teacher.answers and sum(done) == 5 and done[0] > 0
    tokens = processor.tokenizer(" a red house", add_special_tokens=False).input_ids
    assert teacher.answers[2] == [*tokens, 2], "an answer of the data is used"


@pytest.mark.parametrize("kind", ["placeholder", "in_a_word", "positions", "limit", "letters"])
def test_answers_are_checked_as_prompts_are(
    kind: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The odd record is left out, in every run alike; the others are trained."""
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    odd = {"placeholder": "look at the <image> above", "in_a_word": "x<image>y", "letters": "a" * 66_000}
    rows[1]["answer"] = odd.get(kind, "red house " * 40)
    data.write_text("\n".join(map(json.dumps, rows)))
    messages = {
        "positions": "image, prompt and answer have",
        "limit": "the answer has 81 tokens; the limit is 30",
    }
    messages["letters"] = "the answer has 66000 characters"
    model, processor = random_model("tiny")
    if kind == "limit":
        monkeypatch.setattr("mmspec.app.train.data.MAX_ANSWER_TOKENS", 30)
    if kind == "positions":
        monkeypatch.setattr("mmspec.app.train.data.max_positions", lambda model: 60)
    for folder in (tmp_path, tmp_path / "again"):
        teacher = Teacher(model, processor, FileData([str(data)]))
        teacher.generate_answers(folder, 2, 8)
        err = capsys.readouterr().err
        assert err.count("mmspec: skipped") == 1 and messages.get(kind, "must not contain <image>") in err
        assert len(teacher.answers) == 5 and max(map(len, teacher.answers.values())) <= 8
        assert teacher.make_batch([0, 1, 2]).input_ids.shape[0] == 3


def test_batches_hold_the_states_of_decoding(data: Path, tmp_path: Path) -> None:
    """Hidden states of one forward over prompt and answer are those of decoding, images included."""
    model, processor = random_model("tiny")
    teacher = Teacher(model, processor, FileData([str(data)]))
    teacher.generate_answers(tmp_path, 4, 8)
    batch = teacher.make_batch([0, 2, 4])
    for row, number in enumerate([0, 2, 4]):
        inputs = teacher.captioner.build_inputs([teacher.data[number].media], [teacher.data[number].question])
        answer = torch.tensor(teacher.answers[number])
        ids = torch.cat([inputs["input_ids"][0], answer])
        assert torch.equal(batch.input_ids[row, : len(ids)], ids) and batch.attention_mask[row].sum() == len(ids)
        assert batch.response_mask[row].nonzero().flatten().tolist() == list(range(len(ids) - len(answer), len(ids)))
        whole = {**inputs, "input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}
        with torch.no_grad():
            outputs = model(**whole, output_hidden_states=True)
        assert torch.allclose(batch.inputs_embeds[row, : len(ids)], outputs.hidden_states[0][0], atol=3e-2)
        distance = (batch.hidden_states[row, : len(ids)] - outputs.hidden_states[-1][0]).abs().max()
        assert distance < 0.15, "bfloat16 on a CPU"
        predicted = model.get_output_embeddings()(batch.hidden_states[row]).argmax(-1)
        agree = (predicted[len(ids) - len(answer) - 1 : len(ids) - 1] == answer).float().mean()
        assert number == 2 or agree > 0.6
    assert batch.visual_mask.sum() == 3 * 16


def test_hidden_states_are_cached_within_the_limit(data: Path, tmp_path: Path) -> None:
    model, processor = random_model("tiny")
    teachers = [Teacher(model, processor, FileData([str(data)]), cache_bytes) for cache_bytes in (0, 1 << 30, 60_000)]
    forwards: list[list[int]] = []
    for teacher in teachers:
        teacher.generate_answers(tmp_path, 5, 8)
        own = teacher._forward
        teacher._forward = lambda indices, own=own: forwards.append(list(indices)) or own(indices)  # type: ignore[func-returns-value,method-assign]
    uncached, cached, partly_cached = (
        [teacher.make_batch(numbers) for numbers in ([0, 2], [2, 3, 2], [3, 0])] for teacher in teachers
    )
    assert forwards[:3] == [[0, 2], [2, 3], [3, 0]]
    assert forwards[3:5] == [[0, 2], [3]]
    assert 0 < len(teachers[2]._cache) < 3 and 0 <= teachers[2].cache_bytes < 60_000
    for other in (cached, partly_cached):
        for one, two in zip(uncached, other, strict=True):
            for a, b in zip(one.tensors(), two.tensors(), strict=True):
                assert a.dtype == b.dtype and torch.allclose(a.float(), b.float(), atol=0.1), "bfloat16 on a CPU"
            assert torch.equal(one.input_ids, two.input_ids) and torch.equal(one.response_mask, two.response_mask)


def test_the_same_questions_without_images(data: Path, tmp_path: Path) -> None:
    model, processor = random_model("tiny")
    both = FileData([str(data)]).part(range(5), also_text=True)
    assert len(both) == 10 and both[7] == Request((), "what is this 2")
    teacher = Teacher(model, processor, both)
    teacher.generate_answers(tmp_path, 10, 6)
    batch = teacher.make_batch([0, 7])
    assert batch.visual_mask[0].any() and not batch.visual_mask[1].any()


def test_schedules() -> None:
    assert [image_fraction(done) for done in (0, 0.5, 0.75, 1)] == [0, 0, 0.5, 1]
    one = [LengthGroupedSampler(7, 3, 0).batch_indices(step) for step in range(7)]
    assert sorted(number for row in one for number in row) == sorted(3 * list(range(7)))
    again = LengthGroupedSampler(7, 3, 0)
    assert one == [again.batch_indices(step) for step in range(7)] and one[1] == again.batch_indices(1), (
        "back and forth"
    )
    assert all(number >= 7 for number in LengthGroupedSampler(7, 5, 0).batch_indices(2, with_images=0.0))
    mixed = [
        number >= 7
        for step in range(40)
        for number in LengthGroupedSampler(7, 5, 0).batch_indices(step, with_images=0.5)
    ]
    assert 0.35 < sum(mixed) / len(mixed) < 0.65


def test_texts_of_a_length_come_together() -> None:
    sizes = {number: 1000 if number % 20 == 7 else number % 5 for number in range(320)}
    for order in (LengthGroupedSampler(320, 16, 0, sizes), LengthGroupedSampler(333, 16, 1, sizes)):
        steps = [order.batch_indices(step) for step in range(40)]
        assert sum(any(sizes.get(n, 0) == 1000 for n in one) for one in steps) <= 8, "else nearly every batch"
        first = [number for one in steps for number in one][: order.count]
        assert sorted(first) == list(range(order.count))


def test_the_first_checkpoint_is_early(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer alone would write its first checkpoint after minutes; here the first step is enough."""
    out, make_batch, found = tmp_path / "run", Teacher.make_batch, list[bool]()

    def watched(self: Teacher, indices: list[int]) -> Any:
        found.append((out / "state.pt").exists())
        return make_batch(self, indices)

    monkeypatch.setattr(Teacher, "make_batch", watched)
    monkeypatch.setattr(train, "FIRST_CHECKPOINT_S", 0.0)
    args = ["train", *ARGS, "--data", str(data), "--drafter", "msd", "--evaluate", "0", "--out", str(out)]
    assert train.FIRST_CHECKPOINT_S < 60 and main(args) == 0
    assert found == [False, True, True, True]


@pytest.mark.slow
def test_the_summary_says_when_nothing_was_drafted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(Chooser, "plan", planned(only_fixed))
    out, data = tmp_path / "run", write_manifest(tmp_path / "data", 20)
    assert main(["train", *ARGS, "--data", str(data), "--drafter", "msd", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    speed = json.loads((out / "msd" / "evaluation.json").read_text())["speed"]
    assert (speed["tau"], speed["drafted_share"], speed["identical"]) == (1.0, 0.0, True)
    assert any(line.startswith("  speed on this machine: x") and "0% of rounds drafted" in line for line in lines)
    next_command = lines[-1].removeprefix("  next: mmspec ").split()
    assert main([*next_command, "--new-tokens", "8"]) == 0


def test_a_picture_without_its_file_is_one_line(tmp_path: Path, capsys: Any) -> None:
    rows = [{"file_name": "gone.png", "prompt": "what"}, {"file_name": "here.png"}]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    render_scene(generate_scene(1)).save(tmp_path / "here.png")
    args = ["train", *ARGS, "--data", str(tmp_path / "list.jsonl"), "--out", str(tmp_path / "run")]
    assert main(args) == 0, "one bad picture is a counted skip"
    err = capsys.readouterr().err
    assert err.count("gone.png") == 1 and "no such file" in err


def test_heads_of_one_run_have_equal_initial_weights() -> None:
    model, _ = random_model("tiny")
    config = heads.target_head_config(model, 48)
    method = find_method("eagle")
    a, b = (heads.init_head(EagleConfig.of(config), 3, method) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert (config.hidden_size, config.intermediate_size, config.num_key_value_heads) == (64, 48, 2)


@pytest.mark.slow
def test_several_processes_train_as_one(data: Path, tmp_path: Path) -> None:
    """Two processes with half a batch each equal one process with the whole batch, but for rounding."""
    import os
    import subprocess
    import sys

    args = ["train", *ARGS, "--data", str(data), "--device", "cpu", "--evaluate", "0", "--set", "ffn=32"]
    assert main([*args, "--out", str(tmp_path / "one")]) == 0
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    command = [sys.executable, *launch, "-m", "mmspec", *args, "--out", str(tmp_path / "two")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    one, two = (json.loads((tmp_path / name / "log.jsonl").read_text().splitlines()[-1]) for name in ("one", "two"))
    assert one["step"] == two["step"] == 4 and len(list((tmp_path / "two").glob("answers-*.jsonl"))) == 2
    from safetensors.torch import load_file

    first, second = (load_file(tmp_path / name / "msd" / "model.safetensors") for name in ("one", "two"))
    assert all(float((first[name].float() - second[name].float()).abs().mean()) < 2e-3 for name in first)


def test_names_of_options_are_those_of_the_drafters() -> None:
    """The parser does not import them, since that takes seconds."""
    from mmspec.drafters.heads.base import visual_inputs
    from mmspec.drafters.training.distribution_losses import DISTRIBUTION_LOSSES

    assert tuple(visual_inputs.VISUAL_MODES) == train_config.VISUAL_MODES
    assert tuple(DISTRIBUTION_LOSSES) == train_config.LOSSES
