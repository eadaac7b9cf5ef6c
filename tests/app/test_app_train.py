"""`mmspec train`: from requests to a drafter that `patch` takes; cut, gone on with, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import mmspec
from mmspec.app.cli.main import main, parser
from mmspec.app.modeling.random_models import random_model
from mmspec.app.scenes.render import render_scene
from mmspec.app.scenes.world import generate_scene
from mmspec.app.train import command as train
from mmspec.app.train import heads as pupils
from mmspec.app.train.data import FileData, Order, Request, Teacher, WithText, share_of_pictures


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Five pictures with prompts, one with an answer."""
    return listed(tmp_path / "data", 5)


def listed(folder: Path, count: int) -> Path:
    """A manifest of so many."""
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
    out, data = tmp_path / "run", listed(tmp_path / "data", 20)
    args = [
        "train",
        *ARGS,
        "--data",
        str(data),
        "--drafter",
        "msd,eagle-textual",
        "--out",
        str(out),
        "--draft-vocab",
        "30",
    ]
    assert main(args) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in told] == [str(out / "msd"), str(out / "eagle-textual")] and "tau" in told[0]
    config = json.loads((out / "msd" / "config.json").read_text())
    assert (config["visual_mode"], config["target"]["model_type"], config["target"]["num_layers"]) == (
        "decoupled",
        "llava",
        2,
    )
    assert config["facts"] == {"target": "tiny"} and train.named(str(tmp_path / "data")) == "data"
    provenance = json.loads((out / "msd" / "provenance.json").read_text())
    assert provenance["command"].startswith("mmspec train --target tiny") and provenance["seed"] == 0
    assert {"commit", "torch", "transformers", "mmspec"} <= set(provenance)
    evaluation = json.loads((out / "msd" / "evaluation.json").read_text())
    assert evaluation["tau"] >= 1 and evaluation["held_out"] is True and evaluation["requests"] == 2
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    answers = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    assert sorted(row["number"] for row in answers) == list(range(18)), "the last two are kept back"
    model, processor = random_model("tiny")
    mmspec.patch(model, str(out / "msd"), processor=processor)
    drafter = model.__dict__["_mmspec"].config.drafter
    assert drafter.name == "msd" and len(drafter.draft_ids) <= 30 and 2 in drafter.draft_ids.tolist()


def test_a_run_that_is_cut_goes_on(data: Path, tmp_path: Path, capsys: Any) -> None:
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


def test_answers_of_another_run_are_not_taken(
    data: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was killed while it answered has no checkpoint to compare settings with."""
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
    kept = (out / "answers.jsonl").read_bytes()
    assert kept.count(b"\n") == 2 and not (out / "state.pt").exists()
    assert main([*args, "--first-seed", "7"]) == 2
    assert "other settings (first_seed)" in capsys.readouterr().err
    first = data.read_text()
    data.write_text(first.replace("what is this 4", "who is this 4"))
    assert main(args) == 2
    assert "other settings (items)" in capsys.readouterr().err
    assert (out / "answers.jsonl").read_bytes() == kept
    (out / "run.json").unlink()
    assert main(args) == 0, "answers that were brought by hand are used as they are"
    assert (out / "answers.jsonl").read_bytes().startswith(kept)


def test_text_only_shows_no_picture(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, lesson, visual = tmp_path / "run", Teacher.lesson, list[bool]()

    def seen(self: Teacher, numbers: list[int]) -> Any:
        made = lesson(self, numbers)
        visual.append(bool(made.visual_mask.any()))
        return made

    monkeypatch.setattr(Teacher, "lesson", seen)
    args = ["train", *ARGS, "--data", str(data), "--drafter", "msd", "--evaluate", "0", "--out", str(out)]
    assert main([*args, "--text-only"]) == 0
    assert visual == [False] * 4
    answers = [json.loads(line)["number"] for line in (out / "answers.jsonl").read_text().splitlines()]
    assert sorted(answers) == list(range(5, 10)), "with pictures nothing is asked"
    settings = torch.load(out / "state.pt", weights_only=True)["settings"]
    assert settings["text_only"] is True
    plain = train.facts_of(parser().parse_args(args))
    assert plain == {"text_first": False}, "nothing new is told of runs as they were, so they go on"
    with pytest.raises(SystemExit):
        main([*args, "--text-only", "--text-first"])


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
    for asked, name in (([], "none"), (["--compressor", "latent:4"], "latent:4")):
        assert main([*args, "--start-from", str(first), *asked, "--out", str(tmp_path / "no")]) == 2
        assert f"was trained with --compressor latent:3 (wanted: {name})" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_one_line(data: Path, tmp_path: Path, capsys: Any) -> None:
    args = ["train", *ARGS, "--data", str(data), "--drafter", "msd", "--evaluate", "0", "--out", str(tmp_path)]
    assert main([*args, "--minutes", "0"]) == 0
    file = tmp_path / "state.pt"
    file.write_bytes(file.read_bytes()[:-1000])
    capsys.readouterr()
    assert main(args) == 2
    assert f"{file} is damaged" in (told := capsys.readouterr().err) and "delete it" in told and told.count("\n") == 1


def test_a_run_begins_with_trained_weights(data: Path, tmp_path: Path, capsys: Any) -> None:
    from safetensors.torch import load_file

    args = ["train", *ARGS, "--data", str(data), "--evaluate", "0"]
    first, still = tmp_path / "first", ["--lr", "1e-9"]
    assert main([*args, "--drafter", "msd,flash", "--ffn", "48", "--out", str(first)]) == 0
    for start, name in ((first, "msd"), (first / "flash", "flash")):
        out = tmp_path / f"on-{name}"
        assert main([*args, *still, "--drafter", name, "--start-from", str(start), "--out", str(out)]) == 0
        old, new = (load_file(folder / name / "model.safetensors") for folder in (first, out))
        assert all(torch.equal(old[key], new[key]) for key in old)
        assert json.loads((out / name / "provenance.json").read_text())["start_from"] == str(start)
    capsys.readouterr()
    for more, words in (
        (["--drafter", "eagle", "--start-from", str(first / "msd")], "rule decoupled (wanted: coupled)"),
        (["--drafter", "parallel", "--start-from", str(first / "flash")], "kind flash (wanted: parallel)"),
        (["--drafter", "msd", "--start-from", str(first), "--ffn", "49"], "ffn 48 (wanted: 49)"),
        (["--drafter", "msd,eagle", "--start-from", str(first)], "there is no eagle/config.json"),
        (["--drafter", "msd", "--start-from", str(tmp_path / "nowhere")], "config.json is missing"),
        (["--drafter", "msd", "--start-from", "msd"], "another target: hidden_size 384 (the target: 64)"),
    ):
        assert main([*args, *more, "--out", str(tmp_path / "other")]) == 2
        assert words in capsys.readouterr().err


def test_answers_that_were_cut_are_made_again(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = random_model("tiny")
    teacher = Teacher(model, processor, FileData([str(data)]))
    teacher.answer_all(tmp_path, 2, 8)
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
            again.answer_all(tmp_path, 2, 8)
    assert file.read_text() == half and len(list(tmp_path.iterdir())) == 2, "data and answers"
    done: list[int] = []
    again.answer_all(tmp_path, 2, 8, done.append)
    assert again.answers == teacher.answers and sum(done) == 5 and done[0] > 0
    tokens = processor.tokenizer(" a red house", add_special_tokens=False).input_ids
    assert teacher.answers[2] == [*tokens, 2], "an answer that was given is taken"


def test_a_lesson_is_what_the_target_saw(data: Path, tmp_path: Path) -> None:
    """States by one forward over the whole text are those of decoding, picture and all."""
    model, processor = random_model("tiny")
    teacher = Teacher(model, processor, FileData([str(data)]))
    teacher.answer_all(tmp_path, 4, 8)
    lesson = teacher.lesson([0, 2, 4])
    for row, number in enumerate([0, 2, 4]):
        inputs = teacher.maker.inputs([teacher.data[number].shown], [teacher.data[number].question])
        answer = torch.tensor(teacher.answers[number])
        ids = torch.cat([inputs["input_ids"][0], answer])
        assert torch.equal(lesson.input_ids[row, : len(ids)], ids) and lesson.attention_mask[row].sum() == len(ids)
        assert lesson.response_mask[row].nonzero().flatten().tolist() == list(range(len(ids) - len(answer), len(ids)))
        whole = {**inputs, "input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}
        with torch.no_grad():
            seen = model(**whole, output_hidden_states=True)
        assert torch.allclose(lesson.inputs_embeds[row, : len(ids)], seen.hidden_states[0][0], atol=3e-2)
        far = (lesson.hidden_states[row, : len(ids)] - seen.hidden_states[-1][0]).abs().max()
        assert far < 0.15, "bfloat16 on a CPU"
        said = model.get_output_embeddings()(lesson.hidden_states[row]).argmax(-1)
        agree = (said[len(ids) - len(answer) - 1 : len(ids) - 1] == answer).float().mean()
        assert number == 2 or agree > 0.6
    assert lesson.visual_mask.sum() == 3 * 16


def test_states_are_made_once_as_far_as_there_is_room(data: Path, tmp_path: Path) -> None:
    model, processor = random_model("tiny")
    teachers = [Teacher(model, processor, FileData([str(data)]), room) for room in (0, 1 << 30, 60_000)]
    seen: list[list[int]] = []
    for teacher in teachers:
        teacher.answer_all(tmp_path, 5, 8)
        own = teacher._seen
        teacher._seen = lambda numbers, own=own: seen.append(list(numbers)) or own(numbers)  # type: ignore[func-returns-value,method-assign]
    plain, kept, some = ([teacher.lesson(numbers) for numbers in ([0, 2], [2, 3, 2], [3, 0])] for teacher in teachers)
    assert seen[:3] == [[0, 2], [2, 3], [3, 0]]
    assert seen[3:5] == [[0, 2], [3]]
    assert 0 < len(teachers[2]._kept) < 3 and 0 <= teachers[2].room < 60_000
    for other in (kept, some):
        for one, two in zip(plain, other, strict=True):
            for a, b in zip(one.tensors(), two.tensors(), strict=True):
                assert a.dtype == b.dtype and torch.allclose(a.float(), b.float(), atol=0.1), "bfloat16 on a CPU"
            assert torch.equal(one.input_ids, two.input_ids) and torch.equal(one.response_mask, two.response_mask)


def test_the_same_questions_without_pictures(data: Path, tmp_path: Path) -> None:
    model, processor = random_model("tiny")
    both = WithText(FileData([str(data)]))
    assert len(both) == 10 and both[7] == Request((), "what is this 2")
    teacher = Teacher(model, processor, both)
    teacher.answer_all(tmp_path, 10, 6)
    lesson = teacher.lesson([0, 7])
    assert lesson.visual_mask[0].any() and not lesson.visual_mask[1].any()


def test_schedules() -> None:
    assert [share_of_pictures(done) for done in (0, 0.5, 0.75, 1)] == [0, 0, 0.5, 1]
    one = [Order(7, 3, 0).numbers(step) for step in range(7)]
    assert sorted(number for row in one for number in row) == sorted(3 * list(range(7)))
    again = Order(7, 3, 0)
    assert one == [again.numbers(step) for step in range(7)] and one[1] == again.numbers(1), "back and forth"
    assert all(number >= 7 for number in Order(7, 5, 0).numbers(2, shown=0.0))
    mixed = [number >= 7 for step in range(40) for number in Order(7, 5, 0).numbers(step, shown=0.5)]
    assert 0.35 < sum(mixed) / len(mixed) < 0.65


def test_texts_of_a_length_come_together() -> None:
    sizes = {number: 1000 if number % 20 == 7 else number % 5 for number in range(320)}
    for order in (Order(320, 16, 0, sizes), Order(333, 16, 1, sizes)):
        steps = [order.numbers(step) for step in range(40)]
        assert sum(any(sizes.get(n, 0) == 1000 for n in one) for one in steps) <= 8, "else nearly every batch"
        first = [number for one in steps for number in one][: order.count]
        assert sorted(first) == list(range(order.count))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--target", "tiny"], "--target tiny needs --data"),
        (["--target", "tiny", "--data", "nowhere"], "no such file or folder: nowhere"),
        (["--first-seed", "50000000"], "held out"),
    ],
)
def test_bad_requests_are_refused(args: list[str], words: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["train", *args, "--out", str(tmp_path / "x")]) == 2
    assert words in capsys.readouterr().err


def test_unknown_drafters_are_refused(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--drafter", "magic", "--out", str(tmp_path)])
    assert "unknown drafter 'magic'; known are msd" in capsys.readouterr().err


def test_a_picture_without_its_file_is_one_line(tmp_path: Path, capsys: Any) -> None:
    rows = [{"file_name": "gone.png", "prompt": "what"}, {"file_name": "here.png"}]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    render_scene(generate_scene(1)).save(tmp_path / "here.png")
    args = ["train", *ARGS, "--data", str(tmp_path / "list.jsonl"), "--out", str(tmp_path / "run")]
    assert main(args) == 2
    err = capsys.readouterr().err
    assert "gone.png: no such file" in err and err.count("\n") == 1


def test_heads_of_one_run_begin_alike() -> None:
    model, _ = random_model("tiny")
    config = pupils.config_of(model, 48)
    a, b = pupils.new_head(config, 3), pupils.new_head(config, 3)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert (config.hidden_size, config.intermediate_size, config.num_key_value_heads) == (64, 48, 2)


@pytest.mark.slow
def test_several_processes_train_as_one(data: Path, tmp_path: Path) -> None:
    """Two processes with half a batch each come to what one comes to with the whole, but for rounding."""
    import os
    import subprocess
    import sys

    args = ["train", *ARGS, "--data", str(data), "--device", "cpu", "--evaluate", "0", "--ffn", "32"]
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


def test_rules_are_named_as_drafters_name_them() -> None:
    from mmspec.drafters.eagle import visual_inputs as rules

    assert tuple(rules.VISUAL_MODES) == train.RULES
