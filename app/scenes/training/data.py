"""Training data made as it is needed: pictures with what each patch shows, and chats with what is to be learned.

Sample n of a stage is always the same, so a training that is cut goes on where it was. Works on arrays and tensors;
knows neither the model nor the loop.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from mmspec.app.scenes import grammar
from mmspec.app.scenes.objects import OBJECT_KINDS
from mmspec.app.scenes.render import build_layers, render_background
from mmspec.app.scenes.sign_words import SIGN_WORDS
from mmspec.app.scenes.sprites import GLYPH_SIZE, SIGN_CHARACTERS
from mmspec.app.scenes.training.build_model import (
    BOS_TOKEN_ID,
    EOS_TOKEN_ID,
    GRID_SIZE,
    IMAGE_TOKEN_ID,
    NUM_VISUAL_TOKENS,
    PAD_TOKEN_ID,
    PATCH_SIZE,
    format_prompt,
)
from mmspec.app.scenes.world import (
    BACKGROUND_COLOURS,
    BACKGROUND_TEXTURES,
    FIRST_HELD_OUT_SEED,
    IMAGE_SIZE,
    MOTION_VECTORS,
    REGIONS,
    SIZE_CLASSES,
    Clip,
    Scene,
    generate_clip,
    generate_scene,
)

BACKGROUND_CLASS, SIGN_CLASS = len(OBJECT_KINDS), len(OBJECT_KINDS) + 1
NUM_PATCH_CLASSES = len(OBJECT_KINDS) + 2
"""What a patch may show: a kind, the ground, or a sign."""
IGNORE_INDEX = -100
PATCH_LABEL_NAMES = ("kind", "bulk", "place", "centre", "alike", "rank", "total", "letter", "nth", "spelled", "since")
"""What is known of every patch and asked of every visual token."""
MAX_SIGN_LENGTH = max(map(len, SIGN_WORDS))
"""Letters of the longest sign."""
ABOUT_ABSENT, ABOUT_COUNT, ABOUT_TOTAL, ABOUT_ACTION = 9, 10, 15, 21
"""What words are asked besides the nine places: that there is none; that there are two to six; of the word "things",
that there are one to six in all; in a clip, what the thing does."""
ACTIONS = (*(("moves", way) for way in MOTION_VECTORS), ("appears", ""), ("leaves", ""), ("stays", ""))
NUM_ABOUT_CLASSES = ABOUT_ACTION + len(ACTIONS)
"""How many answers there are to what a word is about."""
REGION_INDEX = {name: number for number, name in enumerate(name for row in REGIONS for name in row)}
MAX_THINGS = 6
"""Things in a picture."""
MIN_PATCH_COVERAGE = 0.3
"""A patch shows a thing if that much of it is covered."""


def to_pixel_values(image: Image.Image) -> Tensor:
    """[3, side, side] float32 in -1 to 1: what the processor makes of a picture of the right size."""
    array = np.asarray(image, dtype=np.float32) / 127.5 - 1
    return torch.from_numpy(array).permute(2, 0, 1).contiguous()


@dataclass
class PatchLabels:
    """What each patch of a picture shows.

    Attributes:
        kind: [TOKENS] int64, a kind, `GROUND` or `SIGN`; `IGNORE` where it is a close call.
        offset: [TOKENS, 2] from the patch's centre to that of its thing, in 64 pixels. bulk: [TOKENS] size range.
        place: [TOKENS] which of the nine places the thing's centre is in, row by row.
        centre: [TOKENS] 1 if a thing's centre is in the patch, else 0.
        alike: [TOKENS] on patches of things, how many more of the kind there are. rank: which thing this is in reading
            order, from 0. total: [TOKENS] how many things there are in all, asked of every patch.
        letter: [TOKENS] the letter whose centre is in the patch, 0 for none.
        nth: [TOKENS] where a letter's centre is, which letter of the sign it is, from 0; `IGNORE` elsewhere.
        spelled: [TOKENS, LONGEST] on patches of a sign what it says, letter by letter, 0 behind its end.
        since: [TOKENS] in a clip, what the thing here has done since the picture before, of `DOINGS`; else `IGNORE`.
        colour, texture: of the ground.
    """

    kind: Tensor
    offset: Tensor
    bulk: Tensor
    place: Tensor
    centre: Tensor
    alike: Tensor
    rank: Tensor
    total: Tensor
    letter: Tensor
    nth: Tensor
    spelled: Tensor
    since: Tensor
    colour: Tensor
    texture: Tensor


def render_with_labels(made: Scene) -> tuple[Image.Image, PatchLabels]:
    """The picture of a scene, and what its patches show."""
    picture = render_background(made)
    owner = np.full((IMAGE_SIZE, IMAGE_SIZE), -1, dtype=np.int64)
    for number, (part, (left, top)) in enumerate(build_layers(made)):
        picture.paste(part, (left, top), part)
        mask = np.asarray(part.getchannel("A")) > 127
        x0, y0, x1, y1 = (
            max(0, left),
            max(0, top),
            min(IMAGE_SIZE, left + part.width),
            min(IMAGE_SIZE, top + part.height),
        )
        cut = mask[y0 - top : y1 - top, x0 - left : x1 - left]
        owner[y0:y1, x0:x1][cut] = number
    return picture, _build_labels(made, owner)


def _build_labels(made: Scene, owner: np.ndarray) -> PatchLabels:
    cells = (
        owner.reshape(GRID_SIZE, PATCH_SIZE, GRID_SIZE, PATCH_SIZE)
        .swapaxes(1, 2)
        .reshape(NUM_VISUAL_TOKENS, PATCH_SIZE * PATCH_SIZE)
    )
    count = len(made.things) + (made.sign is not None)
    if not count:  # a clip before its thing appears
        return _build_empty_labels(made)
    shares = np.stack([(cells == number).mean(1) for number in range(count)], axis=1)
    best, share = shares.argmax(1), shares.max(1)
    kinds = np.array([thing.kind for thing in made.things] + [SIGN_CLASS] * (made.sign is not None))
    centres = [(thing.x, thing.y) for thing in made.things] + ([(made.sign.x, made.sign.y)] if made.sign else [])
    middle = (
        np.stack(np.meshgrid(np.arange(GRID_SIZE), np.arange(GRID_SIZE)), -1).reshape(NUM_VISUAL_TOKENS, 2) * PATCH_SIZE
        + PATCH_SIZE // 2
    )
    no_thing = [IGNORE_INDEX] * (made.sign is not None)
    bulks = [list(SIZE_CLASSES).index(thing.size_class) for thing in made.things] + no_thing
    alike = [made.count(thing.kind) - 1 for thing in made.things] + no_thing
    rank = [made.reading_order().index(thing) for thing in made.things] + no_thing
    kind = np.where(share >= MIN_PATCH_COVERAGE, kinds[best], np.where(share < 0.05, BACKGROUND_CLASS, IGNORE_INDEX))
    owned = share >= MIN_PATCH_COVERAGE
    where = [thing.region for thing in made.things] + ([made.sign.region] if made.sign else [])
    spots = [REGION_INDEX[place] for place in where]
    letter, nth = _label_characters(made)

    def of_owner(values: list[int]) -> Tensor:
        return torch.from_numpy(np.where(owned, np.array(values)[best], IGNORE_INDEX))

    centre = np.zeros(NUM_VISUAL_TOKENS, dtype=np.int64)
    for thing in made.things:
        centre[min(GRID_SIZE - 1, thing.y // PATCH_SIZE) * GRID_SIZE + min(GRID_SIZE - 1, thing.x // PATCH_SIZE)] = 1
    return PatchLabels(
        kind=torch.from_numpy(kind),
        offset=torch.from_numpy((np.array(centres)[best] - middle).astype(np.float32) / 64),
        bulk=of_owner(bulks),
        place=of_owner(spots),
        centre=torch.from_numpy(centre),
        alike=of_owner(alike),
        rank=of_owner(rank),
        total=torch.full((NUM_VISUAL_TOKENS,), len(made.things)),
        letter=torch.from_numpy(letter),
        nth=torch.from_numpy(nth),
        spelled=_label_spelling(made, torch.from_numpy(kind) == SIGN_CLASS),
        since=torch.full((NUM_VISUAL_TOKENS,), IGNORE_INDEX),
        colour=torch.tensor(list(BACKGROUND_COLOURS).index(made.colour)),
        texture=torch.tensor(BACKGROUND_TEXTURES.index(made.texture)),
    )


def _build_empty_labels(made: Scene) -> PatchLabels:
    blank = torch.zeros(NUM_VISUAL_TOKENS, dtype=torch.long)
    colour, texture = (
        torch.tensor(list(BACKGROUND_COLOURS).index(made.colour)),
        torch.tensor(BACKGROUND_TEXTURES.index(made.texture)),
    )
    offset, unknown = torch.zeros(NUM_VISUAL_TOKENS, 2), blank + IGNORE_INDEX
    spelled = _label_spelling(made, blank > 0)
    return PatchLabels(
        kind=blank + BACKGROUND_CLASS,
        offset=offset,
        bulk=unknown,
        place=unknown,
        centre=blank,
        alike=unknown,
        rank=unknown,
        total=blank,
        letter=blank,
        nth=unknown,
        spelled=spelled,
        since=unknown,
        colour=colour,
        texture=texture,
    )


def label_actions(made: Clip, previous: PatchLabels, current: PatchLabels) -> Tensor:
    """[TOKENS] what each thing has done since the picture before: of `DOINGS`, on the patches where it is or was."""
    here, there = current.kind == made.hero.kind, previous.kind == made.hero.kind
    things = (current.kind < BACKGROUND_CLASS) & (current.kind >= 0)
    stays, leaves = ACTIONS.index(("stays", "")), ACTIONS.index(("leaves", ""))
    found = torch.full((NUM_VISUAL_TOKENS,), IGNORE_INDEX).masked_fill(things, stays)
    if not here.any():
        return found.masked_fill(there & (current.kind == BACKGROUND_CLASS), leaves)
    if not there.any():
        return found.masked_fill(here, ACTIONS.index(("appears", "")))
    return found.masked_fill(here, ACTIONS.index(("moves", made.event.way)) if made.event.what == "moves" else stays)


def _label_characters(made: Scene) -> tuple[np.ndarray, np.ndarray]:
    """[TOKENS] each: the letter that is centred in a patch, counted from 1, and which of the sign's it is."""
    found, nth = np.zeros(NUM_VISUAL_TOKENS, dtype=np.int64), np.full(NUM_VISUAL_TOKENS, IGNORE_INDEX)
    if made.sign is None:
        return found, nth
    width, text = GLYPH_SIZE[0] * 3 // 4, made.sign.text
    start = made.sign.x - (width * len(text) + 8) // 2 + 4 + width // 2
    for number, character in enumerate(text):
        column, row = (
            min(GRID_SIZE - 1, max(0, (start + number * width) // PATCH_SIZE)),
            min(GRID_SIZE - 1, made.sign.y // PATCH_SIZE),
        )
        found[row * GRID_SIZE + column] = SIGN_CHARACTERS.index(character) + 1
        nth[row * GRID_SIZE + column] = number
    return found, nth


def _label_spelling(made: Scene, sign: Tensor) -> Tensor:
    """[TOKENS, LONGEST] what the sign says on its patches; `IGNORE` elsewhere."""
    found = torch.full((NUM_VISUAL_TOKENS, MAX_SIGN_LENGTH), IGNORE_INDEX)
    if made.sign is not None:
        letters = [SIGN_CHARACTERS.index(character) + 1 for character in made.sign.text]
        found[sign] = torch.tensor(letters + [0] * (MAX_SIGN_LENGTH - len(letters)))
    return found


class PatchDataset(Dataset[dict[str, Tensor]]):
    """Pictures and what their patches show, from a seed on."""

    def __init__(self, first_seed: int, count: int) -> None:
        _check_seeds(first_seed, count)
        self.first_seed, self.count = first_seed, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        seed = self.first_seed + number
        most = choose_num_things(seed)
        made = generate_scene(seed, most)
        if made.sign is None and seed % 2:  # reading is learned slowly
            made = _first_matching(lambda n: generate_scene(n, most), seed, lambda other: other.sign is not None)
        image, patches = render_with_labels(made)
        return {"pixel_values": to_pixel_values(image), **vars(patches)}


@dataclass
class ChatSample:
    """One conversation: ids with placeholders, what of them is to be learned, the pictures, what their patches show.

    Attributes:
        turns: for each token the turn it belongs to, from 1, where turns are asked apart: each sees the pictures and
            itself alone. 0 before them, and all through a conversation of which each turn sees what was said before.
        about: for each token that names a kind of thing, or says "things", what it is about: one of the nine places,
            or from `ABSENT`, `SEVERAL`, `ALL`, `DOES` on.
    """

    input_ids: list[int]
    labels: list[int]
    turn_ids: list[int]
    pixel_values: Tensor
    patches: list[PatchLabels]
    about: list[int]


class ChatDataset(Dataset[ChatSample]):
    """Chats about scenes, and some about clips, from a seed on.

    Clips are several times as long as chats, so they come in groups: a batch is all clips, of one length, or none.
    """

    def __init__(
        self,
        tokenizer: Any,
        first_seed: int,
        count: int,
        group_size: int = 16,
        clip_share: float = 0.1,
        prefer_full: bool = True,
    ) -> None:
        """
        Args:
            group: samples that are of one sort. clips: share of the groups that are clips.
            full: half of the pictures have four to six things; else pictures are as the world has them, and drills are
                even (`grammar.drill`).
        """
        _check_seeds(first_seed, count)
        self.tokenizer, self.first_seed, self.count = tokenizer, first_seed, count
        self.group_size, self.clip_share, self.prefer_full = group_size, clip_share, prefer_full
        self.kind_by_token = map_tokens_to_kinds(tokenizer)
        things = tokenizer(" things", add_special_tokens=False).input_ids
        self.things_token_id = things[0] if len(things) == 1 else None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> ChatSample:
        seed = self.first_seed + number
        rng, together = random.Random(f"talk {seed}"), random.Random(f"group {seed // self.group_size}")
        if together.random() < self.clip_share:
            return self._build_clip_sample(seed, rng, together.choice((4, 4, 4, 4, 4, 5, 6, 8)))  # long ones are dear
        most = choose_num_things(seed) if self.prefer_full else None
        made = generate_scene(seed, most)
        if made.sign is None and rng.random() < 0.6:  # reading is learned slowly
            made = _first_matching(lambda n: generate_scene(n, most), seed, lambda other: other.sign is not None)
        if made.sign is not None and rng.random() < 0.5:  # who knows the words need not read
            made = replace(made, sign=replace(made.sign, text=_random_sign_text(rng)))
        image, patches = render_with_labels(made)
        apart = rng.random() < INDEPENDENT_SHARE
        coded = encode_turns(self.tokenizer, sample_turns(made, rng, not self.prefer_full, apart), independent=apart)
        return ChatSample(
            *coded, to_pixel_values(image)[None], [patches], [self._label_entity(made, token) for token in coded[0]]
        )

    def _label_entity(self, made: Scene, token: int) -> int:
        """Where the thing is that a token names, or how many there are."""
        if token == self.things_token_id:
            return ABOUT_TOTAL + len(made.things) - 1
        kind = self.kind_by_token.get(token)
        if kind is None:
            return IGNORE_INDEX
        here = [thing for thing in made.things if thing.kind == kind]
        if len(here) < 2:
            return REGION_INDEX[here[0].region] if here else ABOUT_ABSENT
        return ABOUT_COUNT + len(here) - 2

    def _label_action(self, made: Clip, token: int) -> int:
        """What the thing does that a token names."""
        kind = self.kind_by_token.get(token)
        if kind is None:
            return IGNORE_INDEX
        others = {thing.kind for frame in made.frames for thing in frame.things if thing.kind != made.hero.kind}
        if kind == made.hero.kind:
            alone = all(frame.count(kind) < 2 for frame in made.frames)
            return ABOUT_ACTION + ACTIONS.index((made.event.what, made.event.way)) if alone else IGNORE_INDEX
        return ABOUT_ACTION + ACTIONS.index(("stays", "")) if kind in others else ABOUT_ABSENT

    def _build_clip_sample(self, seed: int, rng: random.Random, frames: int) -> ChatSample:
        # In the world three moving things of four are alone, and whoever has learned that takes the others for still.
        things = rng.choice((None, 2, 3))
        made = _first_matching(
            lambda n: generate_clip(n, frames, things),
            seed,
            lambda other: other.event.what == "moves" or rng.random() < 0.4,
        )
        looks = [render_with_labels(frame) for frame in made.frames]
        for (_, before), (_, now) in pairwise(looks):
            now.since = label_actions(made, before, now)
        turns = [grammar.ask_clip(made, rng), *grammar.generate_clip_qa_turns(made, rng)[:6]]
        rng.shuffle(turns)
        coded = encode_turns(self.tokenizer, turns, len(looks), independent=rng.random() < INDEPENDENT_SHARE)
        images, patches = torch.stack([to_pixel_values(image) for image, _ in looks]), [seen_ for _, seen_ in looks]
        return ChatSample(*coded, images, patches, [self._label_action(made, token) for token in coded[0]])


def map_tokens_to_kinds(tokenizer: Any) -> dict[int, int]:
    """{token: kind} of names that are one token, in the singular and the plural."""
    found = {}
    for number, kind in enumerate(OBJECT_KINDS):
        for word in (kind.name, kind.plural):
            ids = tokenizer(" " + word, add_special_tokens=False).input_ids
            if len(ids) == 1:
                found[ids[0]] = number
    return found


ALTERNATIVE_SEED_OFFSET = 10_000_000
"""From a seed to the next one that may stand in for it."""


def choose_num_things(seed: int) -> int | None:
    """How many things a training picture has: in half of them four to six, else as the world has it.

    Full pictures teach more names for the same price, and what goes wrong goes wrong there.
    """
    return None if seed % 4 > 1 else 4 + seed % 3


def _check_seeds(first: int, count: int) -> None:
    last = first + count + 3 * ALTERNATIVE_SEED_OFFSET
    if last > FIRST_HELD_OUT_SEED:
        raise ValueError(f"training seeds end before {FIRST_HELD_OUT_SEED}; asked for {first} to {last}")


def _first_matching(make: Callable[[int], Any], seed: int, wanted: Callable[[Any], bool]) -> Any:
    """What a seed gives, or one of three others in its place, whichever is wanted first."""
    made = (make(seed + number * ALTERNATIVE_SEED_OFFSET) for number in range(4))
    return next((one for one in made if wanted(one)), None) or make(seed)


def _random_sign_text(rng: random.Random) -> str:
    """Two or three digits, or some letters, at random."""
    if rng.random() < 0.6:
        return str(rng.randint(10, 999))
    letters = [letter for letter in SIGN_CHARACTERS if letter.isalpha()]
    return "".join(rng.choices(letters, k=rng.randint(2, MAX_SIGN_LENGTH)))


def sample_turns(
    made: Scene, rng: random.Random, balanced: bool = False, independent: bool = False
) -> list[grammar.Turn]:
    """Many short questions, or fewer and a long description somewhere among them. `even`, `apart`: as for `drill`."""
    if rng.random() < 0.5:
        return grammar.generate_qa_turns(made, rng, 10, balanced, independent)
    turns = grammar.generate_qa_turns(made, rng, 4, balanced, independent)
    turns.insert(rng.randint(0, len(turns)), grammar.ask_description(made, rng))
    return turns


INDEPENDENT_SHARE = 0.75
"""Share of the samples of which every question is asked apart from the others."""


def encode_turns(
    tokenizer: Any, turns: Sequence[grammar.Turn], num_images: int = 1, independent: bool = False
) -> tuple[list[int], list[int], list[int]]:
    """Ids of a conversation, each picture as its placeholders; labels: the answers and their ends; `Sample.turns`.

    Args:
        apart: each question follows the pictures at once, as if it were the first. So many are asked for the price of
            reading the pictures once, and none can be answered from what was said before.
    """
    ids, labels, of = [BOS_TOKEN_ID], [IGNORE_INDEX], [0]
    for number, turn in enumerate(turns, 1):
        asked = tokenizer(
            format_prompt(turn.question, num_images if independent or number == 1 else 0), add_special_tokens=False
        )
        asked = [
            token
            for given in asked.input_ids
            for token in ([IMAGE_TOKEN_ID] * NUM_VISUAL_TOKENS if given == IMAGE_TOKEN_ID else [given])
        ]
        answer = [*tokenizer(" " + turn.answer, add_special_tokens=False).input_ids, EOS_TOKEN_ID]
        end = len(asked) - asked[::-1].index(IMAGE_TOKEN_ID) if independent else 0
        shown, own = asked[:end] if number == 1 else [], asked[end:]  # the pictures stand once, before all turns
        ids += [*shown, *own, *answer]
        labels += [IGNORE_INDEX] * (len(shown) + len(own)) + answer
        of += [0] * len(shown) + [number if independent else 0] * (len(own) + len(answer))
    return ids, labels, of


def collate_chats(samples: Sequence[ChatSample]) -> dict[str, Tensor]:
    """A right-padded batch."""
    longest = max(len(sample.input_ids) for sample in samples)
    ids = torch.full((len(samples), longest), PAD_TOKEN_ID)
    labels, about = (torch.full((len(samples), longest), IGNORE_INDEX) for _ in range(2))
    turns = torch.zeros((len(samples), longest), dtype=torch.long)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.input_ids)] = torch.tensor(sample.input_ids)
        labels[row, : len(sample.labels)] = torch.tensor(sample.labels)
        about[row, : len(sample.about)] = torch.tensor(sample.about)
        turns[row, : len(sample.turn_ids)] = torch.tensor(sample.turn_ids)
    lengths = torch.tensor([len(sample.input_ids) for sample in samples])
    patches = [part for sample in samples for part in sample.patches]
    return {
        "input_ids": ids,
        "labels": labels,
        "about": about,
        "turns": turns,
        "attention_mask": (torch.arange(longest) < lengths[:, None]).long(),
        "pixel_values": torch.cat([sample.pixel_values for sample in samples]),
        **{name: torch.stack([getattr(part, name) for part in patches]) for name in PATCH_LABEL_NAMES},
    }


def generate_corpus(count: int, first_seed: int = 0) -> Iterator[str]:
    """Texts of the grammar, for the tokenizer."""
    for seed in range(first_seed, first_seed + count):
        rng = random.Random(f"corpus {seed}")
        made = generate_scene(seed)
        for turn in grammar.generate_chat(made, rng, len(grammar.QA_TASKS)):
            yield f"{format_prompt(turn.question, 0)} {turn.answer}"
        if seed % 10 == 0:
            turn = grammar.ask_clip(generate_clip(seed), rng)
            yield f"{format_prompt(turn.question, 0)} {turn.answer}"
