"""Training data of the scenes model: patch labels, token labels, turn masks, mixture."""

from __future__ import annotations

import random
import re
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch

from mmspec.app.scenes.render import render_scene
from mmspec.app.scenes.world import FIRST_HELD_OUT_SEED, REGIONS, generate_scene
from research.scenes import grammar
from research.scenes.build_model import (
    GRID_SIZE,
    IMAGE_TOKEN_ID,
    NUM_VISUAL_TOKENS,
    PATCH_SIZE,
    train_tokenizer,
)
from research.scenes.clips import generate_clip
from research.scenes.data import (
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
from research.scenes.models import build_turn_mask, build_turn_position_ids
from research.scenes.names import KIND_BY_NAME
from research.scenes.patch_labels import (
    ACTIONS,
    BACKGROUND_CLASS,
    IGNORE_INDEX,
    SIGN_CLASS,
    label_actions,
    render_with_labels,
)

pytestmark = pytest.mark.research


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(generate_corpus(400))


def test_patch_labels_agree_with_the_scene() -> None:
    for seed in range(40):
        scene = generate_scene(seed)
        drawn, patches = render_with_labels(scene)
        assert drawn.tobytes() == render_scene(scene).tobytes()
        middle = PATCH_SIZE // 2
        for number, kind in enumerate(patches.kind.tolist()):
            x, y = number % GRID_SIZE * PATCH_SIZE + middle, number // GRID_SIZE * PATCH_SIZE + middle
            if 0 <= kind < BACKGROUND_CLASS:
                offset = patches.offset[number] * 64
                near = min((t for t in scene.things if t.kind == kind), key=lambda t: abs(t.x - x) + abs(t.y - y))
                assert min(abs(t.x - x - offset[0]) + abs(t.y - y - offset[1]) for t in scene.things) < 1
                assert abs(near.x - x) <= near.size and abs(near.y - y) <= near.size
                region = [name for line in REGIONS for name in line][int(patches.region[number])]
                assert region in {thing.region for thing in scene.things if thing.kind == kind}
                assert patches.num_others[number] == scene.count(kind) - 1
                assert scene.reading_order()[int(patches.rank[number])].kind == kind
            else:
                assert patches.num_others[number] == patches.rank[number] == IGNORE_INDEX or kind == IGNORE_INDEX
        assert set(patches.total.tolist()) == {len(scene.things)} and (patches.action == IGNORE_INDEX).all()
        centres = {(t.x // PATCH_SIZE, t.y // PATCH_SIZE) for t in scene.things}
        assert centres == {
            (number % GRID_SIZE, number // GRID_SIZE) for number in patches.centre.nonzero().flatten().tolist()
        }
        assert {thing.kind for thing in scene.things} >= {k for k in patches.kind.tolist() if 0 <= k < BACKGROUND_CLASS}
        assert (scene.sign is not None) == bool((patches.letter > 0).any())
        if scene.sign is not None:
            assert (patches.letter > 0).sum() <= len(scene.sign.text) and (patches.kind == SIGN_CLASS).any()
            spellings = {
                "".join(" ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"[c] for c in row if c > 0)
                for row in patches.spelling[patches.kind == SIGN_CLASS].tolist()
            }
            assert spellings == {scene.sign.text}
        assert (patches.spelling[patches.kind != SIGN_CLASS] == IGNORE_INDEX).all()
    assert (render_with_labels(generate_clip(5).frames[0])[1].kind != IGNORE_INDEX).any()


def test_collated_chat_samples(tokenizer: Any) -> None:
    samples = [ChatDataset(tokenizer, 0, 60)[number] for number in range(24)]
    batch = collate_chats(samples)
    assert (
        (batch["input_ids"] == IMAGE_TOKEN_ID).sum()
        == NUM_VISUAL_TOKENS * batch["pixel_values"].shape[0]
        == batch["kind"].numel()
    )
    loss_mask = batch["labels"] != IGNORE_INDEX
    assert torch.equal(batch["labels"][loss_mask], batch["input_ids"][loss_mask])
    assert not (loss_mask & (batch["attention_mask"] == 0)).any() and 0.1 < loss_mask.float().mean() < 0.8
    scene = generate_scene(3)
    turns = sample_turns(scene, random.Random(1))
    for independent in (False, True):
        ids, labels, turn_ids = encode_turns(tokenizer, turns, independent=independent)
        answers = tokenizer.decode([label for label in labels if label != IGNORE_INDEX])
        assert answers == "".join(f" {turn.answer}</s>" for turn in turns)
        assert len(ids) == len(labels) == len(turn_ids)
        assert ids.count(IMAGE_TOKEN_ID) == NUM_VISUAL_TOKENS
    modes = {max(sample.turn_ids) > 0 for sample in samples}
    assert modes == {False, True} and batch["turns"].shape == batch["input_ids"].shape


@torch.no_grad()
def test_independent_turns_equal_separate_conversations(tokenizer: Any) -> None:
    """Hidden states of a stock text model: masked turns after shared images, against one row per turn."""
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = LlamaModel(LlamaConfig(vocab_size=len(tokenizer), **sizes)).eval()
    for num_images in (1, 4):
        turns = grammar.generate_qa_turns(generate_scene(3), random.Random(1), 4, independent=True)
        ids, labels, owners = encode_turns(tokenizer, turns, num_images, independent=True)
        turn_ids = torch.tensor([owners])
        masked = text(
            torch.tensor([ids]),
            attention_mask=build_turn_mask(turn_ids),
            position_ids=build_turn_position_ids(turn_ids),
        ).last_hidden_state[0]
        shared = owners.count(0)
        for number, turn in enumerate(turns, 1):
            alone, answers, _ = encode_turns(tokenizer, [turn], num_images)
            indices = [index for index, owner in enumerate(owners) if owner == number]
            assert alone == ids[:shared] + [ids[index] for index in indices]
            assert answers[shared:] == [labels[index] for index in indices]
            expected = text(torch.tensor([alone])).last_hidden_state[0]
            torch.testing.assert_close(masked[indices], expected[shared:], atol=1e-5, rtol=1e-4)


def test_the_mask_of_a_conversation_is_causal() -> None:
    turns = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 1, 1, 2]])
    assert torch.equal(build_turn_mask(turns)[0, 0], torch.ones(5, 5).tril().bool())
    assert build_turn_position_ids(turns).tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 2]]


def test_capitals_are_single_character_tokens(tokenizer: Any) -> None:
    for word in ("HOTEL", "ZOO", "407", "XQZ"):
        assert len(tokenizer(f" {word}.", add_special_tokens=False).input_ids) >= len(word)


def test_half_of_the_training_scenes_are_full() -> None:
    full = [
        len(generate_scene(seed, count).things) for seed in range(60) if (count := choose_num_things(seed)) is not None
    ]
    assert len(full) == 30 and set(full) == {4, 5, 6}
    others = [
        len(generate_scene(seed, choose_num_things(seed)).things)
        for seed in range(60)
        if choose_num_things(seed) is None
    ]
    assert min(others) == 1


def test_scenes_of_a_balanced_stage_follow_the_world(tokenizer: Any) -> None:
    for number in range(12):
        scene = generate_scene(number)
        sample = ChatDataset(tokenizer, 0, 12, clip_share=0.0, prefer_full=False)[number]
        totals = {int(total) for total in sample.patches[0].total}
        if scene.sign is not None:  # otherwise an alternative seed may replace it
            assert totals == {len(scene.things)}
    num_things = [
        int(ChatDataset(tokenizer, 0, 60, clip_share=0.0, prefer_full=False)[n].patches[0].total[0]) for n in range(30)
    ]
    assert sum(count < 4 for count in num_things) >= 12


def test_most_training_clips_hold_several_things(tokenizer: Any) -> None:
    data = ChatDataset(tokenizer, 0, 60, clip_share=1.0)
    has_others = [max(int(part.total[0]) for part in data[number].patches) > 1 for number in range(40)]
    assert sum(has_others) >= 24
    assert all(len(generate_clip(seed, 4, 3).frames[0].things) >= 2 for seed in range(5))
    assert generate_clip(7, 4) == generate_clip(7, 4, None)


def test_about_labels_of_scenes(tokenizer: Any) -> None:
    data, checked = ChatDataset(tokenizer, 0, 60, clip_share=0.0), Counter[str]()
    for number in range(24):
        seed, sample = number, data[number]
        scene = generate_scene(seed, choose_num_things(seed))
        if scene.sign is None and bool((sample.patches[0].kind == SIGN_CLASS).any()):
            continue  # an alternative seed replaces it
        for token, where in zip(sample.input_ids, sample.about, strict=True):
            word = tokenizer.decode([token]).strip()
            if where == IGNORE_INDEX:
                continue
            if word == "things":
                assert where == ABOUT_TOTAL + len(scene.things) - 1
                checked["all"] += 1
                continue
            here = [thing for thing in scene.things if thing.kind == KIND_BY_NAME[word]]
            names = [name for row in REGIONS for name in row]
            many = ("two", "three", "four", "five", "six")
            expected = "absent" if not here else here[0].region if len(here) == 1 else many[len(here) - 2]
            assert [*names, "absent", *many][where] == expected
            checked[expected if expected in ("absent", *many) else "place"] += 1
    assert {"place", "absent", "two", "three", "all"} <= set(checked)


def test_about_labels_of_clips(tokenizer: Any) -> None:
    data, checked = ChatDataset(tokenizer, 0, 60, clip_share=1.0), Counter[str]()
    for number in range(16):
        sample = data[number]
        text = tokenizer.decode(sample.input_ids)
        actions = {ACTIONS[where - ABOUT_ACTION] for where in sample.about if where not in (IGNORE_INDEX, ABOUT_ABSENT)}
        assert len(actions - {("stays", "")}) < 2, "only the hero acts"
        for what, way in actions - {("stays", "")}:
            word = {"moves": f"moves (to the )?{way}", "appears": "appears", "leaves": "disappears|leaves"}[what]
            assert re.search(word, text), (word, text)
            checked[what] += 1
    assert set(checked) == {"moves", "appears", "leaves"}


def test_action_labels_of_clips(tokenizer: Any) -> None:
    hero_labels: dict[str, set[str]] = {}
    for number in range(60):
        clip = generate_clip(number, 4)
        frames = [render_with_labels(frame)[1] for frame in clip.frames]
        marks = [label_actions(clip, before, now) for before, now in pairwise(frames)]
        hero, rest = set[str](), set[str]()
        for now, before, mark in zip(frames[1:], frames[:-1], marks, strict=True):
            mine = (now.kind == clip.hero.kind) | (before.kind == clip.hero.kind) & (now.kind == BACKGROUND_CLASS)
            hero |= {" ".join(ACTIONS[one]) for one in mark[mine].tolist() if one != IGNORE_INDEX}
            rest |= {" ".join(ACTIONS[one]) for one in mark[~mine].tolist() if one != IGNORE_INDEX}
        assert rest <= {"stays "}
        name = f"{clip.event.what} {clip.event.way}"
        hero_labels.setdefault(name, set()).update(hero)
        assert name in hero, f"clip {number}: {name}, labels {hero}"
    assert all(hero <= {name, "stays "} for name, hero in hero_labels.items()), hero_labels
    assert {"appears ", "leaves ", "stays "} <= set(hero_labels) and len(hero_labels) >= 6
    sample = next(
        s for s in map(ChatDataset(tokenizer, 0, 60, clip_share=1.0).__getitem__, range(9)) if len(s.patches) > 1
    )
    assert (sample.patches[0].action == IGNORE_INDEX).all(), "the first frame has no previous one"
    assert any((part.action != IGNORE_INDEX).any() for part in sample.patches[1:])


def test_signs_are_more_frequent_in_training_than_in_the_world(tokenizer: Any) -> None:
    data = ChatDataset(tokenizer, 0, 400, clip_share=0.0)
    signs = sum(bool((data[n].patches[0].kind == SIGN_CLASS).any()) for n in range(0, 160, 4))
    assert signs > 40 * 0.4
    with pytest.raises(ValueError, match="training seeds end before"):
        ChatDataset(tokenizer, FIRST_HELD_OUT_SEED - 30_000_000, 10)
    with pytest.raises(ValueError, match=str(FIRST_HELD_OUT_SEED)):
        PatchDataset(FIRST_HELD_OUT_SEED - 1, 2)
