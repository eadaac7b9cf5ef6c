"""The scenes world and its grammar: sampling, rendering, true answers, scoring of answers, frozen texts."""

from __future__ import annotations

import hashlib
import random
from collections import Counter, defaultdict
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmspec.app.io.videos import load_video
from mmspec.app.scenes import examples
from mmspec.app.scenes.render import render_scene
from mmspec.app.scenes.sprites import ATLAS_FILE
from mmspec.app.scenes.world import (
    FIRST_HELD_OUT_SEED,
    Scene,
    generate_scene,
)
from mmspec.app.train.datasets import FileData
from research.scenes import eval_questions, grammar, phrases, tasks, write_examples, write_requests
from research.scenes.clips import Clip, generate_clip

pytestmark = pytest.mark.research

SEEDS = range(300)


def test_scoring_accepts_true_answers_and_rejects_others() -> None:
    """The scoring of the evaluation on the grammar's answers about the scene, and about another scene."""
    true_outcomes: eval_questions.MetricOutcomes = defaultdict(list)
    false_outcomes: eval_questions.MetricOutcomes = defaultdict(list)
    for seed in range(FIRST_HELD_OUT_SEED, FIRST_HELD_OUT_SEED + 120):
        scene, other = generate_scene(seed), generate_scene(seed + 5000)
        for item in eval_questions.build_scene_questions(scene, random.Random(seed)):
            for truth, outcomes in ((scene, true_outcomes), (other, false_outcomes)):
                for name, values in item.score(_answer(truth, item.question)).items():
                    outcomes[name] += values
        clip = generate_clip(seed)
        item = eval_questions.build_clip_question(clip, random.Random(seed))
        for truth_, outcomes in ((clip, true_outcomes), (generate_clip(seed + 5000), false_outcomes)):
            for name, values in item.score(grammar.ask_clip(truth_, random.Random(0)).answer).items():
                outcomes[name] += values
    names = "things_named named_are_there described_places places counts totals yes_no backgrounds words bigger"
    assert set(true_outcomes) >= {*names.split(), "motion", "events", "clip_things"}
    for name, values in true_outcomes.items():
        assert all(values) and values, name
    for name in ("things_named", "described_places", "places", "backgrounds", "words", "motion"):
        assert sum(false_outcomes[name]) / len(false_outcomes[name]) < 0.45, name


def test_scoring_of_clips_is_strict() -> None:
    """Others may stay; a second event, or another acting thing, is wrong."""
    clip = next(
        one for one in map(generate_clip, range(1000)) if one.event.way == "left" and len(one.frames[0].things) == 2
    )
    mark = eval_questions.build_clip_question(clip, random.Random(0)).score
    (other,) = [thing.name for thing in clip.frames[0].things if thing.kind != clip.hero.kind]
    name = clip.hero.name
    for answer, event, motion in (
        (f"A {name} moves to the left and a {other} stays.", True, True),
        (f"A {other} stays and a {name} moves to the left.", True, True),
        (f"A {name} moves to the right and a {other} stays.", True, False),
        (f"A {other} moves to the left and a {name} stays.", True, False),
        (f"A {name} moves to the left and a {other} moves up.", True, False),
        (f"A {name} moves to the left and a {other} appears at the top.", False, True),
        (f"A {name} stays and a {other} stays.", False, False),
    ):
        assert mark(answer) == {"events": [event], "clip_things": [True], "motion": [motion]}, answer
    for what, word in (("stays", "stays"), ("appears", "appears"), ("leaves", "disappears")):
        one = next(one for one in map(generate_clip, range(1000)) if one.event.what == what)
        mark = eval_questions.build_clip_question(one, random.Random(0)).score
        for verb in ("stays", "appears", "disappears", "moves up"):
            assert mark(f"A {one.hero.name} {verb}.")["events"] == [verb == word]


def _answer(truth: Scene, question: str) -> str:
    """The grammar's answer about `truth`, also where the question assumes another scene."""
    rng = random.Random(0)
    lowered = question.lower()
    named = sorted(eval_questions.find_kinds(question))
    things = {thing.kind: thing for thing in truth.things}
    if "detail" in lowered or "describe the image" in lowered:
        return grammar.ask_description(truth, rng).answer
    if lowered.startswith("where is"):
        return f"It is {phrases.format_region(things[named[0]].region)}." if named[0] in things else "It is not there."
    if "how many things" in lowered:
        return grammar.answer_total_count(truth)
    if lowered.startswith("how many"):
        return grammar.answer_kind_count(truth, named[0])
    if lowered.startswith("is there"):
        return "Yes." if named[0] in things else "No."
    if "background" in lowered:
        return grammar.ask_background(truth, rng).answer
    if "sign" in lowered:
        return grammar.ask_sign_text(truth, rng).answer
    if "bigger" in lowered or "larger" in lowered:
        there = [things[kind] for kind in named if kind in things]
        return f"The {max(there, key=lambda thing: thing.size).name} is bigger." if there else "Neither."
    return grammar.ask_contents(truth, rng).answer


def test_world_and_grammar_are_frozen() -> None:
    """Ground truth and texts must not change: the bundled weights were trained on them.

    So what holds of sizes, regions, hidden parts, held-out pairs, events and counts in answers holds for ever.
    """
    digest = hashlib.sha256()
    for seed in (*range(40), *range(FIRST_HELD_OUT_SEED, FIRST_HELD_OUT_SEED + 40)):
        scene, clip = generate_scene(seed), generate_clip(seed)
        digest.update(repr((scene, clip)).encode())
        for turn in (
            *grammar.generate_chat(scene, random.Random(seed), 20),
            grammar.ask_clip(clip, random.Random(seed)),
        ):
            digest.update(repr(turn).removeprefix("QA").encode())  # the digest is older than the name `QATurn`
    assert digest.hexdigest() == WORLD


WORLD = "c49e2ee70e01b6de6366dc296bd93df03bd2a243242cc81b99647264a1d76034"
"""SHA-256 of the frozen world; a change requires newly trained weights."""


def test_qa_turns_have_no_answer_that_could_be_copied() -> None:
    num_turns: Counter[str] = Counter()
    num_lists = 0
    for seed in SEEDS:
        scene = generate_scene(seed)
        turns = grammar.generate_qa_turns(scene, random.Random(seed), 10)
        assert 2 <= len(turns) <= 10 and len({turn.answer for turn in turns}) == len(turns)
        assert sum(turn.task in grammar.LISTING_TASKS for turn in turns) < 2
        num_turns.update(turn.task for turn in turns)
        turns = grammar.generate_qa_turns(scene, random.Random(seed), 10, independent=True)
        assert len({turn.question for turn in turns}) == len(turns)
        num_lists += sum(turn.task in grammar.LISTING_TASKS for turn in turns)
    assert set(num_turns) | {"total", "count of any"} == set(grammar.QA_TASK_WEIGHTS)
    assert num_turns["where"] > num_turns["background"]
    assert num_lists > 2 * len(SEEDS)


def test_answers_of_clip_qa_turns_are_true() -> None:
    num_tasks: Counter[str] = Counter()
    for seed in SEEDS:
        clip = generate_clip(seed)
        for turn in grammar.generate_clip_qa_turns(clip, random.Random(seed)):
            num_tasks[turn.task] += 1
            words, number = turn.question.rstrip("?").split(), turn.question.rstrip("?").split()[-1]
            if turn.task == "pictures":
                assert f" {phrases.NUMBER_WORDS[len(clip.frames)]} " in turn.answer
            elif turn.task == "way":
                assert turn.answer == "It does not move." or f" {clip.event.way}." in turn.answer
                moves = clip.event.what == "moves" and eval_questions.find_kinds(turn.question) == {clip.hero.kind}
                assert moves == (turn.answer != "It does not move.")
            else:
                present = [t for t in clip.frames[int(number) - 1].things if t.kind == clip.hero.kind]
                if words[0] == "Is":
                    assert turn.answer.startswith("Yes" if present else "No")
                else:
                    assert eval_questions.find_region_name(turn.answer) == present[0].region
    assert set(num_tasks) == {"pictures", "way", "when"} and num_tasks["when"] > 600


def test_balanced_turns_count_all_kinds_alike() -> None:
    counts_one: dict[bool, list[bool]] = {False: [], True: []}
    for seed in range(200):
        scene = generate_scene(seed)
        if len({count for _, count in phrases.count_kinds(scene)}) < 2:
            continue  # only where there are several of one kind and one of another
        for balanced, found in counts_one.items():
            for turn in grammar.generate_qa_turns(scene, random.Random(seed), 10, balanced, independent=True):
                if turn.task == "count" and " all." not in turn.answer:
                    found.append(" one " in turn.answer)
                    kinds = eval_questions.find_kinds(turn.question)
                    assert [eval_questions.find_number(turn.answer)] == [scene.count(kind) for kind in kinds]
    shares = {balanced: sum(found) / len(found) for balanced, found in counts_one.items()}
    assert len(counts_one[True]) > 1.3 * len(counts_one[False]) > 50
    assert shares[False] < 0.45 < shares[True], shares


# --- requests -------------------------------------------------------------------------------------------


def test_tasks_draw_from_the_held_out_world() -> None:
    for task in tasks.REQUEST_TASKS:
        drawn = list(islice(tasks.generate_requests(task, FIRST_HELD_OUT_SEED), 6))
        again = list(islice(tasks.generate_requests(task, FIRST_HELD_OUT_SEED), 6))
        assert [(one.seed, one.question, one.answer) for one in drawn] == [
            (one.seed, one.question, one.answer) for one in again
        ]
        assert all(one.seed >= FIRST_HELD_OUT_SEED and one.question and one.answer for one in drawn)
        assert all((len(one.images) > 3) == (task == "clip") == isinstance(one.ground_truth, Clip) for one in drawn)
    assert all(len(one.ground_truth.things) > 2 for one in islice(tasks.generate_requests("describe", 0), 20))  # type: ignore[union-attr]
    assert len({one.question.split()[0] for one in islice(tasks.generate_requests("answer", 0), 60)}) > 5
    with pytest.raises(ValueError, match="task must be one of describe"):
        next(tasks.generate_requests("dance", 0))


CLIP_SEED = 0
"""Among 24 requests from it on is a clip."""


def test_a_training_set_is_what_tasks_draw(tmp_path: Path) -> None:
    pytest.importorskip("av")
    listed = write_requests.write_requests(tmp_path, 24, CLIP_SEED)
    data = FileData([str(listed)])
    assert len(data) == 24 and {path.suffix for path in tmp_path.iterdir()} == {".png", ".mp4", ".jsonl"}
    again = write_requests.write_requests(tmp_path / "again", 24, CLIP_SEED).read_bytes()
    assert listed.read_bytes() == again
    questions = [data[index].question for index in range(24)]
    assert len(set(questions)) > 8 and all(questions)
    with pytest.raises(ValueError, match="are held out"):
        write_requests.write_requests(tmp_path, 2, FIRST_HELD_OUT_SEED - 3)


# --- examples in the package -------------------------------------------------------------------------------------


def test_the_examples_are_what_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("av")
    results = write_examples.write_examples(tmp_path)
    assert sorted(path.name for path in results) == sorted(path.name for path in examples.list_example_files())
    assert sum(path.stat().st_size for path in examples.list_example_files()) < 300_000
    for path in examples.list_example_files():
        if path.suffix == ".png":
            assert Image.open(path).tobytes() == Image.open(tmp_path / path.name).tobytes()
        else:
            frames, again = load_video(path).frames, load_video(tmp_path / path.name).frames
            assert len(frames) == len(again) and all(near(a, b) for a, b in zip(frames, again, strict=True))


def near(a: Image.Image, b: Image.Image, tolerance: float = 4.0) -> bool:
    return float(np.abs(np.asarray(a).astype(int) - np.asarray(b).astype(int)).mean()) < tolerance


def test_the_clips_hold_all_frames() -> None:
    for seed, path in zip(write_examples.CLIP_SEEDS, ("frog_moves", "cake_appears", "lion_moves"), strict=True):
        frames = load_video(examples.EXAMPLES_FOLDER / f"{path}.mp4").frames
        truth = generate_clip(FIRST_HELD_OUT_SEED + seed).frames
        assert len(frames) == len(truth)
        assert all(near(a, render_scene(b)) for a, b in zip(frames, truth, strict=True))


def test_the_world_is_drawn_as_it_was() -> None:
    """The atlas is the source of all images."""
    assert hashlib.sha256(ATLAS_FILE.read_bytes()).hexdigest() == ATLAS


ATLAS = "8a67a70047a8b73520a434fb850c5b0ce062ab6838fb803b3c94ed0b06c8daff"
