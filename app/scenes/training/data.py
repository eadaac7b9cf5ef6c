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
from mmspec.app.scenes.objects import KINDS
from mmspec.app.scenes.render import background, layers
from mmspec.app.scenes.sign_words import WORDS
from mmspec.app.scenes.sprites import LETTER, LETTERS
from mmspec.app.scenes.training.build_model import BOS, EOS, GRID, IMAGE, PAD, PATCH, TOKENS, question
from mmspec.app.scenes.world import COLOURS, HELD_OUT, MOVES, PLACES, SIDE, SIZES, TEXTURES, Clip, Scene, clip, scene

GROUND, SIGN = len(KINDS), len(KINDS) + 1
CLASSES = len(KINDS) + 2
"""What a patch may show: a kind, the ground, or a sign."""
IGNORE = -100
PER_PATCH = ("kind", "bulk", "place", "centre", "alike", "rank", "total", "letter", "nth", "spelled", "since")
"""What is known of every patch and asked of every visual token."""
LONGEST = max(map(len, WORDS))
"""Letters of the longest sign."""
ABSENT, SEVERAL, ALL, DOES = 9, 10, 15, 21
"""What words are asked besides the nine places: that there is none; that there are two to six; of the word "things",
that there are one to six in all; in a clip, what the thing does."""
DOINGS = (*(("moves", way) for way in MOVES), ("appears", ""), ("leaves", ""), ("stays", ""))
MEANINGS = DOES + len(DOINGS)
"""How many answers there are to what a word is about."""
PLACES_BY_NAME = {name: number for number, name in enumerate(name for row in PLACES for name in row)}
MOST = 6
"""Things in a picture."""
SHARE = 0.3
"""A patch shows a thing if that much of it is covered."""


def pixels(image: Image.Image) -> Tensor:
    """[3, side, side] float32 in -1 to 1: what the processor makes of a picture of the right size."""
    array = np.asarray(image, dtype=np.float32) / 127.5 - 1
    return torch.from_numpy(array).permute(2, 0, 1).contiguous()


@dataclass
class Patches:
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


def seen(made: Scene) -> tuple[Image.Image, Patches]:
    """The picture of a scene, and what its patches show."""
    picture = background(made)
    owner = np.full((SIDE, SIDE), -1, dtype=np.int64)
    for number, (part, (left, top)) in enumerate(layers(made)):
        picture.paste(part, (left, top), part)
        mask = np.asarray(part.getchannel("A")) > 127
        x0, y0, x1, y1 = max(0, left), max(0, top), min(SIDE, left + part.width), min(SIDE, top + part.height)
        cut = mask[y0 - top : y1 - top, x0 - left : x1 - left]
        owner[y0:y1, x0:x1][cut] = number
    return picture, _labels(made, owner)


def _labels(made: Scene, owner: np.ndarray) -> Patches:
    cells = owner.reshape(GRID, PATCH, GRID, PATCH).swapaxes(1, 2).reshape(TOKENS, PATCH * PATCH)
    count = len(made.things) + (made.sign is not None)
    if not count:  # a clip before its thing appears
        return _nothing(made)
    shares = np.stack([(cells == number).mean(1) for number in range(count)], axis=1)
    best, share = shares.argmax(1), shares.max(1)
    kinds = np.array([thing.kind for thing in made.things] + [SIGN] * (made.sign is not None))
    centres = [(thing.x, thing.y) for thing in made.things] + ([(made.sign.x, made.sign.y)] if made.sign else [])
    middle = np.stack(np.meshgrid(np.arange(GRID), np.arange(GRID)), -1).reshape(TOKENS, 2) * PATCH + PATCH // 2
    no_thing = [IGNORE] * (made.sign is not None)
    bulks = [list(SIZES).index(thing.bulk) for thing in made.things] + no_thing
    alike = [made.count(thing.kind) - 1 for thing in made.things] + no_thing
    rank = [made.reading_order().index(thing) for thing in made.things] + no_thing
    kind = np.where(share >= SHARE, kinds[best], np.where(share < 0.05, GROUND, IGNORE))
    owned = share >= SHARE
    where = [thing.place for thing in made.things] + ([made.sign.place] if made.sign else [])
    spots = [PLACES_BY_NAME[place] for place in where]
    letter, nth = _letters(made)

    def of_owner(values: list[int]) -> Tensor:
        return torch.from_numpy(np.where(owned, np.array(values)[best], IGNORE))

    centre = np.zeros(TOKENS, dtype=np.int64)
    for thing in made.things:
        centre[min(GRID - 1, thing.y // PATCH) * GRID + min(GRID - 1, thing.x // PATCH)] = 1
    return Patches(
        kind=torch.from_numpy(kind),
        offset=torch.from_numpy((np.array(centres)[best] - middle).astype(np.float32) / 64),
        bulk=of_owner(bulks),
        place=of_owner(spots),
        centre=torch.from_numpy(centre),
        alike=of_owner(alike),
        rank=of_owner(rank),
        total=torch.full((TOKENS,), len(made.things)),
        letter=torch.from_numpy(letter),
        nth=torch.from_numpy(nth),
        spelled=_spelled(made, torch.from_numpy(kind) == SIGN),
        since=torch.full((TOKENS,), IGNORE),
        colour=torch.tensor(list(COLOURS).index(made.colour)),
        texture=torch.tensor(TEXTURES.index(made.texture)),
    )


def _nothing(made: Scene) -> Patches:
    blank = torch.zeros(TOKENS, dtype=torch.long)
    colour, texture = torch.tensor(list(COLOURS).index(made.colour)), torch.tensor(TEXTURES.index(made.texture))
    offset, unknown = torch.zeros(TOKENS, 2), blank + IGNORE
    spelled = _spelled(made, blank > 0)
    return Patches(
        kind=blank + GROUND,
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


def since(made: Clip, before: Patches, now: Patches) -> Tensor:
    """[TOKENS] what each thing has done since the picture before: of `DOINGS`, on the patches where it is or was."""
    here, there = now.kind == made.hero.kind, before.kind == made.hero.kind
    things = (now.kind < GROUND) & (now.kind >= 0)
    stays, leaves = DOINGS.index(("stays", "")), DOINGS.index(("leaves", ""))
    found = torch.full((TOKENS,), IGNORE).masked_fill(things, stays)
    if not here.any():
        return found.masked_fill(there & (now.kind == GROUND), leaves)
    if not there.any():
        return found.masked_fill(here, DOINGS.index(("appears", "")))
    return found.masked_fill(here, DOINGS.index(("moves", made.event.way)) if made.event.what == "moves" else stays)


def _letters(made: Scene) -> tuple[np.ndarray, np.ndarray]:
    """[TOKENS] each: the letter that is centred in a patch, counted from 1, and which of the sign's it is."""
    found, nth = np.zeros(TOKENS, dtype=np.int64), np.full(TOKENS, IGNORE)
    if made.sign is None:
        return found, nth
    width, text = LETTER[0] * 3 // 4, made.sign.text
    start = made.sign.x - (width * len(text) + 8) // 2 + 4 + width // 2
    for number, character in enumerate(text):
        column, row = min(GRID - 1, max(0, (start + number * width) // PATCH)), min(GRID - 1, made.sign.y // PATCH)
        found[row * GRID + column] = LETTERS.index(character) + 1
        nth[row * GRID + column] = number
    return found, nth


def _spelled(made: Scene, sign: Tensor) -> Tensor:
    """[TOKENS, LONGEST] what the sign says on its patches; `IGNORE` elsewhere."""
    found = torch.full((TOKENS, LONGEST), IGNORE)
    if made.sign is not None:
        letters = [LETTERS.index(character) + 1 for character in made.sign.text]
        found[sign] = torch.tensor(letters + [0] * (LONGEST - len(letters)))
    return found


class Looking(Dataset[dict[str, Tensor]]):
    """Pictures and what their patches show, from a seed on."""

    def __init__(self, first: int, count: int) -> None:
        _check(first, count)
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        seed = self.first + number
        most = fullness(seed)
        made = scene(seed, most)
        if made.sign is None and seed % 2:  # reading is learned slowly
            made = _first(lambda n: scene(n, most), seed, lambda other: other.sign is not None)
        image, patches = seen(made)
        return {"pixel_values": pixels(image), **vars(patches)}


@dataclass
class Sample:
    """One conversation: ids with placeholders, what of them is to be learned, the pictures, what their patches show.

    Attributes:
        turns: for each token the turn it belongs to, from 1, where turns are asked apart: each sees the pictures and
            itself alone. 0 before them, and all through a conversation of which each turn sees what was said before.
        about: for each token that names a kind of thing, or says "things", what it is about: one of the nine places,
            or from `ABSENT`, `SEVERAL`, `ALL`, `DOES` on.
    """

    ids: list[int]
    labels: list[int]
    turns: list[int]
    pixel_values: Tensor
    patches: list[Patches]
    about: list[int]


class Talking(Dataset[Sample]):
    """Chats about scenes, and some about clips, from a seed on.

    Clips are several times as long as chats, so they come in groups: a batch is all clips, of one length, or none.
    """

    def __init__(
        self, tokenizer: Any, first: int, count: int, group: int = 16, clips: float = 0.1, full: bool = True
    ) -> None:
        """
        Args:
            group: samples that are of one sort. clips: share of the groups that are clips.
            full: half of the pictures have four to six things; else pictures are as the world has them, and drills are
                even (`grammar.drill`).
        """
        _check(first, count)
        self.tokenizer, self.first, self.count = tokenizer, first, count
        self.group, self.clips, self.full = group, clips, full
        self.kinds = kinds_by_token(tokenizer)
        things = tokenizer(" things", add_special_tokens=False).input_ids
        self.things = things[0] if len(things) == 1 else None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Sample:
        seed = self.first + number
        dice, together = random.Random(f"talk {seed}"), random.Random(f"group {seed // self.group}")
        if together.random() < self.clips:
            return self._clip(seed, dice, together.choice((4, 4, 4, 4, 4, 5, 6, 8)))  # long ones are dear
        most = fullness(seed) if self.full else None
        made = scene(seed, most)
        if made.sign is None and dice.random() < 0.6:  # reading is learned slowly
            made = _first(lambda n: scene(n, most), seed, lambda other: other.sign is not None)
        if made.sign is not None and dice.random() < 0.5:  # who knows the words need not read
            made = replace(made, sign=replace(made.sign, text=_no_word(dice)))
        image, patches = seen(made)
        apart = dice.random() < APART
        coded = encode(self.tokenizer, turns_of(made, dice, not self.full, apart), apart=apart)
        return Sample(*coded, pixels(image)[None], [patches], [self._about(made, token) for token in coded[0]])

    def _about(self, made: Scene, token: int) -> int:
        """Where the thing is that a token names, or how many there are."""
        if token == self.things:
            return ALL + len(made.things) - 1
        kind = self.kinds.get(token)
        if kind is None:
            return IGNORE
        here = [thing for thing in made.things if thing.kind == kind]
        if len(here) < 2:
            return PLACES_BY_NAME[here[0].place] if here else ABSENT
        return SEVERAL + len(here) - 2

    def _does(self, made: Clip, token: int) -> int:
        """What the thing does that a token names."""
        kind = self.kinds.get(token)
        if kind is None:
            return IGNORE
        others = {thing.kind for frame in made.frames for thing in frame.things if thing.kind != made.hero.kind}
        if kind == made.hero.kind:
            alone = all(frame.count(kind) < 2 for frame in made.frames)
            return DOES + DOINGS.index((made.event.what, made.event.way)) if alone else IGNORE
        return DOES + DOINGS.index(("stays", "")) if kind in others else ABSENT

    def _clip(self, seed: int, dice: random.Random, frames: int) -> Sample:
        # In the world three moving things of four are alone, and whoever has learned that takes the others for still.
        things = dice.choice((None, 2, 3))
        made = _first(
            lambda n: clip(n, frames, things), seed, lambda other: other.event.what == "moves" or dice.random() < 0.4
        )
        looks = [seen(frame) for frame in made.frames]
        for (_, before), (_, now) in pairwise(looks):
            now.since = since(made, before, now)
        turns = [grammar.clip_turn(made, dice), *grammar.clip_drills(made, dice)[:6]]
        dice.shuffle(turns)
        coded = encode(self.tokenizer, turns, len(looks), apart=dice.random() < APART)
        images, patches = torch.stack([pixels(image) for image, _ in looks]), [seen_ for _, seen_ in looks]
        return Sample(*coded, images, patches, [self._does(made, token) for token in coded[0]])


def kinds_by_token(tokenizer: Any) -> dict[int, int]:
    """{token: kind} of names that are one token, in the singular and the plural."""
    found = {}
    for number, kind in enumerate(KINDS):
        for word in (kind.name, kind.plural):
            ids = tokenizer(" " + word, add_special_tokens=False).input_ids
            if len(ids) == 1:
                found[ids[0]] = number
    return found


FURTHER = 10_000_000
"""From a seed to the next one that may stand in for it."""


def fullness(seed: int) -> int | None:
    """How many things a training picture has: in half of them four to six, else as the world has it.

    Full pictures teach more names for the same price, and what goes wrong goes wrong there.
    """
    return None if seed % 4 > 1 else 4 + seed % 3


def _check(first: int, count: int) -> None:
    last = first + count + 3 * FURTHER
    if last > HELD_OUT:
        raise ValueError(f"training seeds end before {HELD_OUT}; asked for {first} to {last}")


def _first(make: Callable[[int], Any], seed: int, wanted: Callable[[Any], bool]) -> Any:
    """What a seed gives, or one of three others in its place, whichever is wanted first."""
    made = (make(seed + number * FURTHER) for number in range(4))
    return next((one for one in made if wanted(one)), None) or make(seed)


def _no_word(dice: random.Random) -> str:
    """Two or three digits, or some letters, at random."""
    if dice.random() < 0.6:
        return str(dice.randint(10, 999))
    letters = [letter for letter in LETTERS if letter.isalpha()]
    return "".join(dice.choices(letters, k=dice.randint(2, LONGEST)))


def turns_of(made: Scene, dice: random.Random, even: bool = False, apart: bool = False) -> list[grammar.Turn]:
    """Many short questions, or fewer and a long description somewhere among them. `even`, `apart`: as for `drill`."""
    if dice.random() < 0.5:
        return grammar.drill(made, dice, 10, even, apart)
    turns = grammar.drill(made, dice, 4, even, apart)
    turns.insert(dice.randint(0, len(turns)), grammar.describe(made, dice))
    return turns


APART = 0.75
"""Share of the samples of which every question is asked apart from the others."""


def encode(
    tokenizer: Any, turns: Sequence[grammar.Turn], pictures: int = 1, apart: bool = False
) -> tuple[list[int], list[int], list[int]]:
    """Ids of a conversation, each picture as its placeholders; labels: the answers and their ends; `Sample.turns`.

    Args:
        apart: each question follows the pictures at once, as if it were the first. So many are asked for the price of
            reading the pictures once, and none can be answered from what was said before.
    """
    ids, labels, of = [BOS], [IGNORE], [0]
    for number, turn in enumerate(turns, 1):
        asked = tokenizer(question(turn.question, pictures if apart or number == 1 else 0), add_special_tokens=False)
        asked = [token for given in asked.input_ids for token in ([IMAGE] * TOKENS if given == IMAGE else [given])]
        answer = [*tokenizer(" " + turn.answer, add_special_tokens=False).input_ids, EOS]
        end = len(asked) - asked[::-1].index(IMAGE) if apart else 0
        shown, own = asked[:end] if number == 1 else [], asked[end:]  # the pictures stand once, before all turns
        ids += [*shown, *own, *answer]
        labels += [IGNORE] * (len(shown) + len(own)) + answer
        of += [0] * len(shown) + [number if apart else 0] * (len(own) + len(answer))
    return ids, labels, of


def collate(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """A right-padded batch."""
    longest = max(len(sample.ids) for sample in samples)
    ids = torch.full((len(samples), longest), PAD)
    labels, about = (torch.full((len(samples), longest), IGNORE) for _ in range(2))
    turns = torch.zeros((len(samples), longest), dtype=torch.long)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.ids)] = torch.tensor(sample.ids)
        labels[row, : len(sample.labels)] = torch.tensor(sample.labels)
        about[row, : len(sample.about)] = torch.tensor(sample.about)
        turns[row, : len(sample.turns)] = torch.tensor(sample.turns)
    lengths = torch.tensor([len(sample.ids) for sample in samples])
    patches = [part for sample in samples for part in sample.patches]
    return {
        "input_ids": ids,
        "labels": labels,
        "about": about,
        "turns": turns,
        "attention_mask": (torch.arange(longest) < lengths[:, None]).long(),
        "pixel_values": torch.cat([sample.pixel_values for sample in samples]),
        **{name: torch.stack([getattr(part, name) for part in patches]) for name in PER_PATCH},
    }


def corpus(count: int, first: int = 0) -> Iterator[str]:
    """Texts of the grammar, for the tokenizer."""
    for seed in range(first, first + count):
        dice = random.Random(f"corpus {seed}")
        made = scene(seed)
        for turn in grammar.chat(made, dice, len(grammar.TASKS)):
            yield f"{question(turn.question, 0)} {turn.answer}"
        if seed % 10 == 0:
            turn = grammar.clip_turn(clip(seed), dice)
            yield f"{question(turn.question, 0)} {turn.answer}"
