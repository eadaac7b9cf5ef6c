"""The world of the scenes: what stands in a picture, drawn from a seed. The truth, not the picture (`paint`).

A scene has one to six things on a background, perhaps a sign with a word. Everything that a question may ask about is
told apart by a margin: sizes come in three ranges with gaps, centres keep off the borders of the nine places, and no
thing is hidden by more than half. The same seed gives the same scene for ever. Knows nothing of pixels or of words.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import combinations

from mmspec.app.scenes.objects import KINDS
from mmspec.app.scenes.sign_words import WORDS

SIDE = 192
"""Pixels of a picture's edge."""
HELD_OUT = 50_000_000
"""Seeds from here on are never trained on."""
PLACES = (
    ("upper left", "top", "upper right"),
    ("left", "center", "right"),
    ("lower left", "bottom", "lower right"),
)
COLOURS = {
    "white": (245, 245, 245),
    "gray": (150, 150, 150),
    "black": (40, 40, 40),
    "pink": (255, 175, 200),
    "red": (190, 50, 50),
    "orange": (240, 150, 60),
    "yellow": (250, 225, 100),
    "green": (90, 170, 90),
    "blue": (80, 130, 210),
    "purple": (140, 90, 180),
    "brown": (130, 90, 60),
    "turquoise": (90, 205, 200),
}
TEXTURES = ("plain", "striped", "dotted", "checkered")
SIZES = {"small": (38, 44), "medium": (52, 59), "large": (69, 78)}
"""Name -> pixels of the longer edge, from and to."""
MARGIN = 7
"""Centres keep this many pixels off the borders between places."""
MOVES = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}


@dataclass(frozen=True)
class Thing:
    """One thing. `x`, `y`: its centre; `size`: its longer edge in pixels; `angle`: degrees, against the clock."""

    kind: int
    x: int
    y: int
    size: int
    angle: int = 0
    flipped: bool = False

    @property
    def name(self) -> str:
        """What it is."""
        return KINDS[self.kind].name

    @property
    def bulk(self) -> str:
        """Small, medium or large."""
        return next(name for name, (least, most) in SIZES.items() if least <= self.size <= most)

    @property
    def place(self) -> str:
        """Which of the nine places its centre is in."""
        return place(self.x, self.y)


@dataclass(frozen=True)
class Sign:
    """A word or number on a white board."""

    text: str
    x: int
    y: int

    @property
    def place(self) -> str:
        """Which of the nine places its centre is in."""
        return place(self.x, self.y)


@dataclass(frozen=True)
class Scene:
    """What a picture shows. Later things stand in front of earlier ones."""

    seed: int
    colour: str
    texture: str
    things: tuple[Thing, ...]
    sign: Sign | None = None

    def reading_order(self) -> list[Thing]:
        """The things row by row from the upper left."""
        return sorted(self.things, key=lambda thing: (3 * thing.y // SIDE, thing.x, thing.y))

    def count(self, kind: int) -> int:
        """How many things of a kind there are."""
        return sum(thing.kind == kind for thing in self.things)


@dataclass(frozen=True)
class Event:
    """What the main thing of a clip does: `moves` (then `way` says where), `appears`, `leaves` or `stays`."""

    what: str
    way: str = ""


@dataclass(frozen=True)
class Clip:
    """A short clip: its frames are scenes. `hero` is the number of the thing that does something."""

    seed: int
    frames: tuple[Scene, ...]
    hero: Thing
    event: Event


def place(x: int, y: int) -> str:
    """Name of the place of a point."""
    return PLACES[min(2, 3 * y // SIDE)][min(2, 3 * x // SIDE)]


def unseen_together(a: int, b: int) -> bool:
    """Whether two kinds never stand in one picture of the training seeds: one pair in twenty."""
    a, b = sorted((a, b))
    return a != b and (a * 7919 + b * 104_729) % 20 == 7


def scene(seed: int, things: int | None = None) -> Scene:
    """The scene of a seed. `things` fixes how many there are, else one to six."""
    dice = random.Random(f"scene {seed} {things}")
    while True:
        made = _try(dice, seed, things)
        if made is not None and (seed >= HELD_OUT or not _has_unseen_pair(made)):
            return made


def _has_unseen_pair(made: Scene) -> bool:
    return any(unseen_together(a.kind, b.kind) for a, b in combinations(made.things, 2))


def _try(dice: random.Random, seed: int, things: int | None) -> Scene | None:
    count = things or dice.choice((1, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 6))
    cells = dice.sample([(row, column) for row in range(3) for column in range(3)], count + 1)
    kinds = _kinds(dice, count)
    placed: list[Thing] = []
    for kind, (row, column) in zip(kinds, cells, strict=False):
        least, most = SIZES[dice.choice(tuple(SIZES))]
        size = dice.randint(least, most)
        x, y = (_coordinate(dice, cell, size) for cell in (column, row))
        placed.append(Thing(kind, x, y, size, dice.randint(-18, 18), dice.random() < 0.5))
    sign = None
    if dice.random() < 0.3:
        row, column = cells[-1]
        text = dice.choice(WORDS) if dice.random() < 0.7 else str(dice.randint(2, 999))
        sign = Sign(text, _coordinate(dice, column, 80), _coordinate(dice, row, 34))
    if not _visible(placed, sign):
        return None
    colour, texture = dice.choice(tuple(COLOURS)), dice.choice(TEXTURES)
    return Scene(seed, colour, texture, tuple(placed), sign)


def _kinds(dice: random.Random, count: int) -> list[int]:
    """Mostly different kinds; now and then several of one, so that there is something to count."""
    kinds = dice.sample(range(len(KINDS)), count)
    if count > 1 and dice.random() < 0.45:
        same = dice.randint(2, count)
        kinds[:same] = [kinds[0]] * same
        dice.shuffle(kinds)
    return kinds


def _coordinate(dice: random.Random, cell: int, size: int) -> int:
    """A coordinate within one third of the edge, off its borders, with the thing inside the picture."""
    third = SIDE // 3
    least = max(third * cell + (MARGIN if cell else 0), size // 2 + 1)
    most = min(third * (cell + 1) - 1 - (MARGIN if cell < 2 else 0), SIDE - size // 2 - 1)
    return dice.randint(least, most)


def _visible(things: list[Thing], sign: Sign | None) -> bool:
    """Whether no box is covered by more than about a third by what stands before it."""
    boxes = [(t.x - t.size // 2, t.y - t.size // 2, t.x + t.size // 2, t.y + t.size // 2) for t in things]
    if sign is not None:
        boxes.append((sign.x - 40, sign.y - 17, sign.x + 40, sign.y + 17))
    for number, box in enumerate(boxes):
        hidden = sum(_overlap(box, other) for other in boxes[number + 1 :])
        if hidden > 0.3 * (box[2] - box[0]) * (box[3] - box[1]):
            return False
    return True


Box = tuple[int, int, int, int]


def _overlap(a: Box, b: Box) -> int:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    return max(0, width) * max(0, height)


def clip(seed: int, frames: int | None = None, things: int | None = None) -> Clip:
    """The clip of a seed: four to eight frames, in which one thing does something and others stay.

    `frames` and `things` fix how many there are; else there are one to three things, mostly one.
    """
    dice = random.Random(f"clip {seed} {frames}")
    count = frames or dice.choice((4, 4, 4, 5, 6, 8))
    while True:
        base = _try(dice, seed, things or dice.choice((1, 1, 2, 3)))
        if base is None or base.sign is not None or (seed < HELD_OUT and _has_unseen_pair(base)):
            continue
        others = base.things[:-1]
        hero = base.things[-1]
        if any(thing.kind == hero.kind for thing in others):
            continue
        event = _event(dice)
        path = _path(dice, hero, event, count)
        if path is None or not all(_visible([*others, at], None) for at in path if at is not None):
            continue
        scenes = tuple(replace(base, things=(*others, at) if at is not None else others) for at in path)
        return Clip(seed, scenes, hero, event)


def _event(dice: random.Random) -> Event:
    what = dice.choice(("moves", "moves", "moves", "moves", "appears", "leaves", "stays"))
    return Event(what, dice.choice(tuple(MOVES)) if what == "moves" else "")


def _path(dice: random.Random, hero: Thing, event: Event, count: int) -> list[Thing | None] | None:
    """The main thing in each frame; None where it is not there. None at all if it would leave the picture."""
    if event.what == "moves":
        dx, dy = MOVES[event.way]
        step = dice.randint(60, 110) / (count - 1)
        start = [hero.x - dx * step * (count - 1) / 2, hero.y - dy * step * (count - 1) / 2]
        path = [
            replace(hero, x=round(start[0] + dx * step * t), y=round(start[1] + dy * step * t)) for t in range(count)
        ]
        reach = hero.size // 2 + 1
        inside = all(reach <= c <= SIDE - reach for at in path for c in (at.x, at.y))
        return list(path) if inside else None
    if event.what == "stays":
        return [hero] * count
    when = dice.randint(1, count - 1)
    if event.what == "appears":
        return [None] * when + [hero] * (count - when)
    return [hero] * when + [None] * (count - when)


def direction(a: Thing, b: Thing) -> str | None:
    """Where `a` is seen from `b`, if that is clear: left of, right of, above or below it."""
    dx, dy = a.x - b.x, a.y - b.y
    if abs(dx) >= 1.5 * abs(dy) and abs(dx) > 24:
        return "left of" if dx < 0 else "right of"
    if abs(dy) >= 1.5 * abs(dx) and abs(dy) > 24:
        return "above" if dy < 0 else "below"
    return None
