"""The world of the scenes: what a seed gives, that questions have answers in it, and that readers read them."""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter, defaultdict
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch

from mmspec.app.scenes import WEIGHTS_FOLDER, grammar, phrases
from mmspec.app.scenes.objects import KIND_BY_NAME, OBJECT_KINDS
from mmspec.app.scenes.render import build_layers, render_scene
from mmspec.app.scenes.sign_words import SIGN_WORDS
from mmspec.app.scenes.sprites import SIGN_CHARACTERS, get_glyph, get_sprite
from mmspec.app.scenes.training import eval_questions
from mmspec.app.scenes.training.build_model import (
    GRID_SIZE,
    IMAGE_TOKEN_ID,
    NUM_VISUAL_TOKENS,
    PATCH_SIZE,
    train_tokenizer,
)
from mmspec.app.scenes.training.data import (
    ABOUT_ABSENT,
    ABOUT_ACTION,
    ABOUT_TOTAL,
    ChatDataset,
    PatchDataset,
    choose_num_things,
    collate_chats,
    encode_turns,
    generate_corpus,
    sample_turns,
)
from mmspec.app.scenes.training.models import build_turn_mask, build_turn_position_ids
from mmspec.app.scenes.training.patch_labels import (
    ACTIONS,
    BACKGROUND_CLASS,
    IGNORE_INDEX,
    SIGN_CLASS,
    label_actions,
    render_with_labels,
)
from mmspec.app.scenes.world import (
    FIRST_HELD_OUT_SEED,
    IMAGE_SIZE,
    REGION_MARGIN,
    REGIONS,
    SIZE_CLASSES,
    Scene,
    generate_clip,
    generate_scene,
    is_held_out_pair,
    spatial_relation,
)

SEEDS = range(300)


def test_at_least_200_kinds_each_with_a_name_and_a_sprite_of_its_own() -> None:
    assert len(OBJECT_KINDS) >= 200 and len({kind.name for kind in OBJECT_KINDS}) == len(OBJECT_KINDS)
    assert len(KIND_BY_NAME) >= len({kind.name for kind in OBJECT_KINDS} | {kind.plural for kind in OBJECT_KINDS})
    drawn = {get_sprite(number).tobytes() for number in range(len(OBJECT_KINDS))}
    assert len(drawn) == len(OBJECT_KINDS)
    for number in range(len(OBJECT_KINDS)):
        alpha = np.asarray(get_sprite(number).getchannel("A")) > 127
        assert alpha.mean() > 0.1 and max(alpha.any(0).sum(), alpha.any(1).sum()) >= 74, OBJECT_KINDS[number]
    assert len({get_glyph(character).tobytes() for character in SIGN_CHARACTERS}) == len(SIGN_CHARACTERS)
    assert all(set(word) <= set(SIGN_CHARACTERS) and len(word) <= 5 for word in SIGN_WORDS) and len(
        set(SIGN_WORDS)
    ) == len(SIGN_WORDS)


def test_scenes_keep_the_margins_that_questions_rely_on() -> None:
    counts: Counter[int] = Counter()
    for seed in SEEDS:
        made = generate_scene(seed)
        assert made == generate_scene(seed)
        counts[len(made.things)] += 1
        for thing in made.things:
            assert thing.size_class in SIZE_CLASSES
            for value in (thing.x, thing.y):
                assert all(
                    abs(value - border) >= REGION_MARGIN - 1 for border in (IMAGE_SIZE // 3, 2 * IMAGE_SIZE // 3)
                )
                assert thing.size // 2 <= value <= IMAGE_SIZE - thing.size // 2
        if made.sign is not None:
            left, right = made.sign.x - 42, made.sign.x + 42
            assert left >= -2 and right <= IMAGE_SIZE + 2
    assert set(counts) == {1, 2, 3, 4, 5, 6}


def test_nothing_is_hidden_by_half() -> None:
    """Counted in pixels, not boxes; a few per mille may lose a bit more behind a round neighbour."""
    hidden = total = 0
    for seed in SEEDS:
        shown = _visible_shares(seed)
        total += len(shown)
        hidden += sum(share < 0.5 for share in shown)
    assert hidden / total < 0.01


def _visible_shares(seed: int) -> list[float]:
    made = generate_scene(seed)
    owner, areas = np.full((IMAGE_SIZE, IMAGE_SIZE), -1), []
    for number, (part, (left, top)) in enumerate(build_layers(made)):
        mask = np.zeros((IMAGE_SIZE, IMAGE_SIZE), dtype=bool)
        alpha = np.asarray(part.getchannel("A")) > 127
        rows, columns = np.nonzero(alpha)
        inside = (rows + top >= 0) & (rows + top < IMAGE_SIZE) & (columns + left >= 0) & (columns + left < IMAGE_SIZE)
        mask[rows[inside] + top, columns[inside] + left] = True
        owner[mask] = number
        areas.append(alpha.sum())
    return [(owner == number).sum() / areas[number] for number in range(len(made.things))]


def test_held_out_pairs_and_seeds_are_never_trained_on() -> None:
    together = [pair for pair in combinations(range(len(OBJECT_KINDS)), 2) if is_held_out_pair(*pair)]
    assert 0.03 < len(together) / (len(OBJECT_KINDS) * (len(OBJECT_KINDS) - 1) / 2) < 0.08
    for seed in SEEDS:
        kinds = {thing.kind for thing in generate_scene(seed).things}
        assert not any(is_held_out_pair(a, b) for a, b in combinations(kinds, 2))
    made = [generate_scene(FIRST_HELD_OUT_SEED + seed).things for seed in SEEDS]
    met = sum(any(is_held_out_pair(a.kind, b.kind) for a, b in combinations(things, 2)) for things in made)
    assert met > 20, "held-out seeds must show what was held out"
    with pytest.raises(ValueError, match=str(FIRST_HELD_OUT_SEED)):
        PatchDataset(FIRST_HELD_OUT_SEED - 1, 2)


def test_the_same_picture_every_time() -> None:
    made = generate_scene(7)
    assert render_scene(made).tobytes() == render_scene(generate_scene(7)).tobytes() and render_scene(made).size == (
        IMAGE_SIZE,
        IMAGE_SIZE,
    )
    assert render_scene(made).tobytes() == render_with_labels(made)[0].tobytes()
    assert len({render_scene(generate_scene(seed)).tobytes() for seed in range(50)}) == 50


def test_clips_show_what_they_say() -> None:
    kinds: Counter[str] = Counter()
    for seed in range(120):
        made = generate_clip(seed)
        assert 4 <= len(made.frames) <= 8
        kinds[made.event.what + made.event.way] += 1
        heroes = [[t for t in frame.things if t.kind == made.hero.kind] for frame in made.frames]
        there = [bool(found) for found in heroes]
        if made.event.what == "moves":
            assert all(there)
            x, y = (heroes[-1][0].x - heroes[0][0].x, heroes[-1][0].y - heroes[0][0].y)
            assert {"left": x < -50, "right": x > 50, "up": y < -50, "down": y > 50}[made.event.way]
        elif made.event.what == "stays":
            assert all(there) and len({found[0] for found in heroes}) == 1
        else:
            assert sorted(there) == (there if made.event.what == "appears" else there[::-1]) and len(set(there)) == 2
    assert len(kinds) == 7


def test_true_answers_are_read_as_true_and_others_as_false() -> None:
    """The readers that mark the model, on the grammar's own answers: right ones to this picture, and to another."""
    right: eval_questions.MetricOutcomes = defaultdict(list)
    wrong: eval_questions.MetricOutcomes = defaultdict(list)
    for seed in range(FIRST_HELD_OUT_SEED, FIRST_HELD_OUT_SEED + 120):
        made, other = generate_scene(seed), generate_scene(seed + 5000)
        for item in eval_questions.build_scene_questions(made, random.Random(seed)):
            for truth, marks in ((made, right), (other, wrong)):
                for name, values in item.score(_answer(truth, item.question)).items():
                    marks[name] += values
        moving = generate_clip(seed)
        item = eval_questions.build_clip_question(moving, random.Random(seed))
        for truth_, marks in ((moving, right), (generate_clip(seed + 5000), wrong)):
            for name, values in item.score(grammar.ask_clip(truth_, random.Random(0)).answer).items():
                marks[name] += values
    assert set(right) >= {"things_named", "named_are_there", "described_places", "places", "counts", "totals", "yes_no",
                          "backgrounds", "words", "bigger", "motion", "events", "clip_things"}  # fmt: skip
    for name, values in right.items():
        assert all(values) and values, name
    for name in ("things_named", "described_places", "places", "backgrounds", "words", "motion"):
        assert sum(wrong[name]) / len(wrong[name]) < 0.45, name


def test_what_happens_in_a_clip_is_read_strictly() -> None:
    """Others may stay; whoever says that two things happen, or that another one does it, is wrong."""
    made = next(
        one for one in map(generate_clip, range(1000)) if one.event.way == "left" and len(one.frames[0].things) == 2
    )
    mark = eval_questions.build_clip_question(made, random.Random(0)).score
    (other,) = [thing.name for thing in made.frames[0].things if thing.kind != made.hero.kind]
    name = made.hero.name
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
        for said in ("stays", "appears", "disappears", "moves up"):
            assert mark(f"A {one.hero.name} {said}.")["events"] == [said == word]


def _answer(truth: Scene, question: str) -> str:
    """What the grammar would say about `truth`, whatever the question assumes."""
    rng = random.Random(0)
    words = question.lower()
    named = sorted(eval_questions.find_kinds(question))
    things = {thing.kind: thing for thing in truth.things}
    if "detail" in words or "describe the image" in words:
        return grammar.ask_description(truth, rng).answer
    if words.startswith("where is"):
        return f"It is {phrases.format_region(things[named[0]].region)}." if named[0] in things else "It is not there."
    if "how many things" in words:
        return grammar.answer_total_count(truth)
    if words.startswith("how many"):
        return grammar.answer_kind_count(truth, named[0])
    if words.startswith("is there"):
        return "Yes." if named[0] in things else "No."
    if "background" in words:
        return grammar.ask_background(truth, rng).answer
    if "sign" in words:
        return grammar.ask_sign_text(truth, rng).answer
    if "bigger" in words or "larger" in words:
        there = [things[kind] for kind in named if kind in things]
        return f"The {max(there, key=lambda thing: thing.size).name} is bigger." if there else "Neither."
    return grammar.ask_contents(truth, rng).answer


def test_descriptions_are_long_and_content_carries_them() -> None:
    tokenizer = train_tokenizer(generate_corpus(800))
    texts = []
    for seed in range(400):
        if len(generate_scene(seed).things) > 2:
            answer = grammar.ask_description(generate_scene(seed), random.Random(seed)).answer
            texts.append(tokenizer(answer, add_special_tokens=False).input_ids)
    lengths = sorted(map(len, texts))
    assert lengths[len(lengths) // 20] >= 75 and lengths[len(lengths) // 2] > 90 and lengths[-len(lengths) // 20] <= 150
    assert _predicted(texts[:-60], texts[-60:]) <= 0.6


@pytest.mark.slow
def test_a_4_gram_that_has_read_much_predicts_little_of_what_it_has_not() -> None:
    """Half a minute. Of 300 held-out descriptions it says 58.8% right (2026-11-24), of 700 read ones' kind 56.0%."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS_FOLDER)

    def described(first: int, count: int) -> list[list[int]]:
        texts = (
            grammar.ask_description(generate_scene(seed), random.Random(seed)).answer
            for seed in range(first, first + count)
        )
        return [tokenizer(text, add_special_tokens=False).input_ids for text in texts]

    assert 0.4 < _predicted(described(0, 7000), described(FIRST_HELD_OUT_SEED, 300)) <= 0.6


def _predicted(known: list[list[int]], new: list[list[int]], order: int = 4) -> float:
    """Share of tokens that a 4-gram model with back-off names first."""
    tables: list[dict[tuple[int, ...], Counter[int]]] = [defaultdict(Counter) for _ in range(order)]
    for text in known:
        for at, token in enumerate(text):
            for size in range(min(order, at + 1)):
                tables[size][tuple(text[at - size : at])][token] += 1
    hits = total = 0
    for text in new:
        for at, token in enumerate(text):
            sizes = (size for size in range(min(order - 1, at), -1, -1) if tuple(text[at - size : at]) in tables[size])
            size = next(sizes)
            hits += tables[size][tuple(text[at - size : at])].most_common(1)[0][0] == token
            total += 1
    return hits / total


def test_what_patches_show() -> None:
    for seed in range(40):
        made = generate_scene(seed)
        _, patches = render_with_labels(made)
        middle = PATCH_SIZE // 2
        for number, kind in enumerate(patches.kind.tolist()):
            x, y = number % GRID_SIZE * PATCH_SIZE + middle, number // GRID_SIZE * PATCH_SIZE + middle
            if 0 <= kind < BACKGROUND_CLASS:
                offset = patches.offset[number] * 64
                near = min((t for t in made.things if t.kind == kind), key=lambda t: abs(t.x - x) + abs(t.y - y))
                assert min(abs(t.x - x - offset[0]) + abs(t.y - y - offset[1]) for t in made.things) < 1
                assert abs(near.x - x) <= near.size and abs(near.y - y) <= near.size
                place = [name for line in REGIONS for name in line][int(patches.region[number])]
                assert place in {thing.region for thing in made.things if thing.kind == kind}
                assert patches.num_others[number] == made.count(kind) - 1
                assert made.reading_order()[int(patches.rank[number])].kind == kind
            else:
                assert patches.num_others[number] == patches.rank[number] == IGNORE_INDEX or kind == IGNORE_INDEX
        assert set(patches.total.tolist()) == {len(made.things)} and (patches.action == IGNORE_INDEX).all()
        centres = {(t.x // PATCH_SIZE, t.y // PATCH_SIZE) for t in made.things}
        assert centres == {
            (number % GRID_SIZE, number // GRID_SIZE) for number in patches.centre.nonzero().flatten().tolist()
        }
        assert {thing.kind for thing in made.things} >= {k for k in patches.kind.tolist() if 0 <= k < BACKGROUND_CLASS}
        assert (made.sign is not None) == bool((patches.letter > 0).any())
        if made.sign is not None:
            assert (patches.letter > 0).sum() <= len(made.sign.text) and (patches.kind == SIGN_CLASS).any()
            told = {
                "".join(" ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"[c] for c in row if c > 0)
                for row in patches.spelling[patches.kind == SIGN_CLASS].tolist()
            }
            assert told == {made.sign.text}
        assert (patches.spelling[patches.kind != SIGN_CLASS] == IGNORE_INDEX).all()
    assert (render_with_labels(generate_clip(5).frames[0])[1].kind != IGNORE_INDEX).any()


def test_samples_for_training() -> None:
    tokenizer = train_tokenizer(generate_corpus(300))
    samples = [ChatDataset(tokenizer, 0, 60)[number] for number in range(24)]
    batch = collate_chats(samples)
    assert (
        (batch["input_ids"] == IMAGE_TOKEN_ID).sum()
        == NUM_VISUAL_TOKENS * batch["pixel_values"].shape[0]
        == batch["kind"].numel()
    )
    learnt = batch["labels"] != IGNORE_INDEX
    assert torch.equal(batch["labels"][learnt], batch["input_ids"][learnt])
    assert not (learnt & (batch["attention_mask"] == 0)).any() and 0.1 < learnt.float().mean() < 0.8
    made = generate_scene(3)
    turns = sample_turns(made, random.Random(1))
    for apart in (False, True):
        ids, labels, of = encode_turns(tokenizer, turns, independent=apart)
        said = tokenizer.decode([label for label in labels if label != IGNORE_INDEX])
        assert said == "".join(f" {turn.answer}</s>" for turn in turns) and len(ids) == len(labels) == len(of)
        assert ids.count(IMAGE_TOKEN_ID) == NUM_VISUAL_TOKENS
    modes = {max(sample.turn_ids) > 0 for sample in samples}
    assert modes == {False, True} and batch["turns"].shape == batch["input_ids"].shape


@torch.no_grad()
def test_turns_asked_apart_are_what_each_would_be_alone() -> None:
    """Hidden states of a stock text model: all questions behind one picture, masked, and each in a row of its own."""
    from transformers import LlamaConfig, LlamaModel

    tokenizer = train_tokenizer(generate_corpus(300))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = LlamaModel(LlamaConfig(vocab_size=len(tokenizer), **sizes)).eval()
    for pictures in (1, 4):
        turns = grammar.generate_qa_turns(generate_scene(3), random.Random(1), 4, independent=True)
        ids, labels, of = encode_turns(tokenizer, turns, pictures, independent=True)
        at = torch.tensor([of])
        rows = text(
            torch.tensor([ids]), attention_mask=build_turn_mask(at), position_ids=build_turn_position_ids(at)
        ).last_hidden_state[0]
        shared = of.count(0)
        for number, turn in enumerate(turns, 1):
            alone, answers, _ = encode_turns(tokenizer, [turn], pictures)
            mine = [place for place, owner in enumerate(of) if owner == number]
            assert alone == ids[:shared] + [ids[place] for place in mine]
            assert answers[shared:] == [labels[place] for place in mine]
            expected = text(torch.tensor([alone])).last_hidden_state[0]
            torch.testing.assert_close(rows[mine], expected[shared:], atol=1e-5, rtol=1e-4)


def test_the_mask_of_a_conversation_is_causal() -> None:
    turns = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 1, 1, 2]])
    assert torch.equal(build_turn_mask(turns)[0, 0], torch.ones(5, 5).tril().bool())
    assert build_turn_position_ids(turns).tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 2]]


def test_words_in_capitals_are_spelled() -> None:
    tokenizer = train_tokenizer(generate_corpus(300))
    for word in ("HOTEL", "ZOO", "407", "XQZ"):
        assert len(tokenizer(f" {word}.", add_special_tokens=False).input_ids) >= len(word)


def test_directions() -> None:
    for seed in range(60):
        for a, b in combinations(generate_scene(seed).things, 2):
            told, back = spatial_relation(a, b), spatial_relation(b, a)
            opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above", None: None}
            assert back == opposite[told]


def test_the_world_is_what_it_was() -> None:
    """Texts and truths are the same for ever, or what the model was trained on is not what is asked."""
    digest = hashlib.sha256()
    for seed in (*range(40), *range(FIRST_HELD_OUT_SEED, FIRST_HELD_OUT_SEED + 40)):
        made, moving = generate_scene(seed), generate_clip(seed)
        digest.update(repr((made, moving)).encode())
        for turn in (
            *grammar.generate_chat(made, random.Random(seed), 20),
            grammar.ask_clip(moving, random.Random(seed)),
        ):
            digest.update(repr(turn).encode())
    assert digest.hexdigest() == WORLD


WORLD = "c49e2ee70e01b6de6366dc296bd93df03bd2a243242cc81b99647264a1d76034"
"""To be frozen with the shipped weights: a new world needs new ones."""


def test_drills_ask_much_and_never_what_could_be_copied() -> None:
    asked, lists = Counter[str](), 0
    for seed in SEEDS:
        made = generate_scene(seed)
        turns = grammar.generate_qa_turns(made, random.Random(seed), 10)
        assert 2 <= len(turns) <= 10 and len({turn.answer for turn in turns}) == len(turns)
        assert sum(turn.task in grammar.LISTING_TASKS for turn in turns) < 2
        asked.update(turn.task for turn in turns)
        turns = grammar.generate_qa_turns(made, random.Random(seed), 10, independent=True)
        assert len({turn.question for turn in turns}) == len(turns)
        lists += sum(turn.task in grammar.LISTING_TASKS for turn in turns)
    assert (
        set(asked) | {"total", "count of any"} == set(grammar.QA_TASK_WEIGHTS) and asked["where"] > asked["background"]
    )
    assert lists > 2 * len(SEEDS)


def test_what_clips_are_asked_is_true() -> None:
    seen_tasks: Counter[str] = Counter()
    for seed in SEEDS:
        made = generate_clip(seed)
        for turn in grammar.generate_clip_qa_turns(made, random.Random(seed)):
            seen_tasks[turn.task] += 1
            words, number = turn.question.rstrip("?").split(), turn.question.rstrip("?").split()[-1]
            if turn.task == "pictures":
                assert f" {phrases.NUMBER_WORDS[len(made.frames)]} " in turn.answer
            elif turn.task == "way":
                assert turn.answer == "It does not move." or f" {made.event.way}." in turn.answer
                moves = made.event.what == "moves" and eval_questions.find_kinds(turn.question) == {made.hero.kind}
                assert moves == (turn.answer != "It does not move.")
            else:
                here = [t for t in made.frames[int(number) - 1].things if t.kind == made.hero.kind]
                if words[0] == "Is":
                    assert turn.answer.startswith("Yes" if here else "No")
                else:
                    assert eval_questions.find_region_name(turn.answer) == here[0].region
    assert set(seen_tasks) == {"pictures", "way", "when"} and seen_tasks["when"] > 600


def test_half_of_the_training_pictures_are_full() -> None:
    full = [
        len(generate_scene(seed, most).things) for seed in range(60) if (most := choose_num_things(seed)) is not None
    ]
    assert len(full) == 30 and set(full) == {4, 5, 6}
    left_alone = [
        len(generate_scene(seed, choose_num_things(seed)).things)
        for seed in range(60)
        if choose_num_things(seed) is None
    ]
    assert min(left_alone) == 1


def test_even_drills_ask_for_numbers_of_all_kinds_alike() -> None:
    asked: dict[bool, list[bool]] = {False: [], True: []}
    for seed in range(200):
        made = generate_scene(seed)
        if len({count for _, count in phrases.count_kinds(made)}) < 2:
            continue  # only where there are several of one kind and one of another
        for even, found in asked.items():
            for turn in grammar.generate_qa_turns(made, random.Random(seed), 10, even, independent=True):
                if turn.task == "count" and " all." not in turn.answer:
                    found.append(" one " in turn.answer)
                    kinds = eval_questions.find_kinds(turn.question)
                    assert [eval_questions.find_number(turn.answer)] == [made.count(kind) for kind in kinds]
    shares = {even: sum(found) / len(found) for even, found in asked.items()}
    assert len(asked[True]) > 1.3 * len(asked[False]) > 50
    assert shares[False] < 0.45 < shares[True], shares


def test_who_counts_says_the_number_on_the_way() -> None:
    """Each thing with its place, in reading order; those that are counted with how many it has been so far."""
    for seed in range(300):
        made = generate_scene(seed)
        groups = phrases.count_kinds(made)
        asked = [({kind}, grammar.answer_kind_count(made, kind), count) for kind, count in groups]
        asked.append(({kind for kind, _ in groups}, grammar.answer_total_count(made), len(made.things)))
        for counted, answer, count in asked:
            said, sum_ = answer.rstrip(".").split(": ")
            numbers = iter(phrases.NUMBER_WORDS[1:])
            for part, thing in zip(said.split(", "), made.reading_order(), strict=True):
                rest = part.lower().removeprefix(thing.region).split()
                assert rest == [thing.name, *([next(numbers)] if thing.kind in counted else [])], answer
            assert sum_.split()[0] == phrases.NUMBER_WORDS[count] and eval_questions.find_number(answer) == count


def test_pictures_of_an_even_stage_are_as_the_world_has_them() -> None:
    tokenizer = train_tokenizer(generate_corpus(200))
    for number in range(12):
        made = generate_scene(number)
        sample = ChatDataset(tokenizer, 0, 12, clip_share=0.0, prefer_full=False)[number]
        totals = {int(total) for total in sample.patches[0].total}
        if made.sign is not None:  # else another scene may stand in
            assert totals == {len(made.things)}
    few = [
        int(ChatDataset(tokenizer, 0, 60, clip_share=0.0, prefer_full=False)[n].patches[0].total[0]) for n in range(30)
    ]
    assert sum(count < 4 for count in few) >= 12


def test_in_half_of_the_training_clips_and_more_something_stands_beside() -> None:
    tokenizer = train_tokenizer(generate_corpus(200))
    data = ChatDataset(tokenizer, 0, 60, clip_share=1.0)
    beside = [max(int(part.total[0]) for part in data[number].patches) > 1 for number in range(40)]
    assert sum(beside) >= 24
    assert all(len(generate_clip(seed, 4, 3).frames[0].things) >= 2 for seed in range(5))
    assert generate_clip(7, 4) == generate_clip(7, 4, None)


def test_words_that_name_things_say_where_they_are() -> None:
    tokenizer = train_tokenizer(generate_corpus(400))
    data, checked = ChatDataset(tokenizer, 0, 60, clip_share=0.0), Counter[str]()
    for number in range(24):
        seed, sample = number, data[number]
        made = generate_scene(seed, choose_num_things(seed))
        if made.sign is None and bool((sample.patches[0].kind == SIGN_CLASS).any()):
            continue  # another scene stands in
        for token, where in zip(sample.input_ids, sample.about, strict=True):
            word = tokenizer.decode([token]).strip()
            if where == IGNORE_INDEX:
                continue
            if word == "things":
                assert where == ABOUT_TOTAL + len(made.things) - 1
                checked["all"] += 1
                continue
            here = [thing for thing in made.things if thing.kind == KIND_BY_NAME[word]]
            names = [name for row in REGIONS for name in row]
            many = ("two", "three", "four", "five", "six")
            expected = "absent" if not here else here[0].region if len(here) == 1 else many[len(here) - 2]
            assert [*names, "absent", *many][where] == expected
            checked[expected if expected in ("absent", *many) else "place"] += 1
    assert {"place", "absent", "two", "three", "all"} <= set(checked)


def test_words_that_name_things_in_clips_say_what_they_do() -> None:
    tokenizer = train_tokenizer(generate_corpus(400))
    data, checked = ChatDataset(tokenizer, 0, 60, clip_share=1.0), Counter[str]()
    for number in range(16):
        sample = data[number]
        text = tokenizer.decode(sample.input_ids)
        told = {ACTIONS[where - ABOUT_ACTION] for where in sample.about if where not in (IGNORE_INDEX, ABOUT_ABSENT)}
        assert len(told - {("stays", "")}) < 2, "one thing does something"
        for what, way in told - {("stays", "")}:
            word = {"moves": f"moves (to the )?{way}", "appears": "appears", "leaves": "disappears|leaves"}[what]
            assert re.search(word, text), (word, text)
            checked[what] += 1
    assert set(checked) == {"moves", "appears", "leaves"}


def test_patches_of_clips_say_what_has_happened_since_the_picture_before() -> None:
    tokenizer = train_tokenizer(generate_corpus(200))
    told: dict[str, set[str]] = {}
    for number in range(60):
        made = generate_clip(number, 4)
        looks = [render_with_labels(frame)[1] for frame in made.frames]
        marks = [label_actions(made, before, now) for before, now in pairwise(looks)]
        hero, rest = set[str](), set[str]()
        for now, before, mark in zip(looks[1:], looks[:-1], marks, strict=True):
            mine = (now.kind == made.hero.kind) | (before.kind == made.hero.kind) & (now.kind == BACKGROUND_CLASS)
            hero |= {" ".join(ACTIONS[one]) for one in mark[mine].tolist() if one != IGNORE_INDEX}
            rest |= {" ".join(ACTIONS[one]) for one in mark[~mine].tolist() if one != IGNORE_INDEX}
        assert rest <= {"stays "}
        name = f"{made.event.what} {made.event.way}"
        told.setdefault(name, set()).update(hero)
        assert name in hero, f"clip {number}: {name}, told {hero}"
    assert all(hero <= {name, "stays "} for name, hero in told.items()), told
    assert {"appears ", "leaves ", "stays "} <= set(told) and len(told) >= 6
    sample = next(
        s for s in map(ChatDataset(tokenizer, 0, 60, clip_share=1.0).__getitem__, range(9)) if len(s.patches) > 1
    )
    assert (sample.patches[0].action == IGNORE_INDEX).all(), "there is none before the first"
    assert any((part.action != IGNORE_INDEX).any() for part in sample.patches[1:])


def test_signs_and_moves_are_practised_more_than_they_come() -> None:
    tokenizer = train_tokenizer(generate_corpus(200))
    data = ChatDataset(tokenizer, 0, 400, clip_share=0.0)
    signs = sum(bool((data[n].patches[0].kind == SIGN_CLASS).any()) for n in range(0, 160, 4))
    assert signs > 40 * 0.4
    with pytest.raises(ValueError, match="training seeds end before"):
        ChatDataset(tokenizer, FIRST_HELD_OUT_SEED - 30_000_000, 10)
