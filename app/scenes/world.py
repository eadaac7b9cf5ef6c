"""The world of the scenes: what stands in a picture, drawn from a seed. The truth, not the picture (`paint`).

A scene has one to six things on a background, perhaps a sign with a word. Everything that a question may ask about is
told apart by a margin: sizes come in three ranges with gaps, centres keep off the borders of the nine places, and no
thing is hidden by more than half. The same seed gives the same scene for ever. Knows nothing of pixels or of words.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import combinations

from mmspec.app.scenes.objects import OBJECT_KINDS
from mmspec.app.scenes.sign_words import SIGN_WORDS

IMAGE_SIZE = 192
"""Pixels of a picture's edge."""
FIRST_HELD_OUT_SEED = 50_000_000
"""Seeds from here on are never trained on."""
REGIONS = (
    ("upper left", "top", "upper right"),
    ("left", "center", "right"),
    ("lower left", "bottom", "lower right"),
)
BACKGROUND_COLOURS = {
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
BACKGROUND_TEXTURES = ("plain", "striped", "dotted", "checkered")
SIZE_CLASSES = {"small": (38, 44), "medium": (52, 59), "large": (69, 78)}
"""Name -> pixels of the longer edge, from and to."""
REGION_MARGIN = 7
"""Centres keep this many pixels off the borders between places."""
MOTION_VECTORS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}


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
        return OBJECT_KINDS[self.kind].name

    @property
    def size_class(self) -> str:
        """Small, medium or large."""
        return next(name for name, (least, most) in SIZE_CLASSES.items() if least <= self.size <= most)

    @property
    def region(self) -> str:
        """Which of the nine places its centre is in."""
        return find_region(self.x, self.y)


@dataclass(frozen=True)
class Sign:
    """A word or number on a white board."""

    text: str
    x: int
    y: int

    @property
    def region(self) -> str:
        """Which of the nine places its centre is in."""
        return find_region(self.x, self.y)


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
        return sorted(self.things, key=lambda thing: (3 * thing.y // IMAGE_SIZE, thing.x, thing.y))

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


def find_region(x: int, y: int) -> str:
    """Name of the place of a point."""
    return REGIONS[min(2, 3 * y // IMAGE_SIZE)][min(2, 3 * x // IMAGE_SIZE)]


def is_held_out_pair(a: int, b: int) -> bool:
    """Whether two kinds never stand in one picture of the training seeds: one pair in twenty."""
    a, b = sorted((a, b))
    return a != b and (a * 7919 + b * 104_729) % 20 == 7


def generate_scene(seed: int, num_things: int | None = None) -> Scene:
    """The scene of a seed. `things` fixes how many there are, else one to six."""
    rng = random.Random(f"scene {seed} {num_things}")
    while True:
        made = _sample_scene(rng, seed, num_things)
        if made is not None and (seed >= FIRST_HELD_OUT_SEED or not _has_held_out_pair(made)):
            return made


def _has_held_out_pair(made: Scene) -> bool:
    return any(is_held_out_pair(a.kind, b.kind) for a, b in combinations(made.things, 2))


def _sample_scene(rng: random.Random, seed: int, things: int | None) -> Scene | None:
    count = things or rng.choice((1, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 6))
    cells = rng.sample([(row, column) for row in range(3) for column in range(3)], count + 1)
    kinds = _sample_kinds(rng, count)
    placed: list[Thing] = []
    for kind, (row, column) in zip(kinds, cells, strict=False):
        least, most = SIZE_CLASSES[rng.choice(tuple(SIZE_CLASSES))]
        size = rng.randint(least, most)
        x, y = (_sample_coordinate(rng, cell, size) for cell in (column, row))
        placed.append(Thing(kind, x, y, size, rng.randint(-18, 18), rng.random() < 0.5))
    sign = None
    if rng.random() < 0.3:
        row, column = cells[-1]
        text = rng.choice(SIGN_WORDS) if rng.random() < 0.7 else str(rng.randint(2, 999))
        sign = Sign(text, _sample_coordinate(rng, column, 80), _sample_coordinate(rng, row, 34))
    if not _all_visible(placed, sign):
        return None
    colour, texture = rng.choice(tuple(BACKGROUND_COLOURS)), rng.choice(BACKGROUND_TEXTURES)
    return Scene(seed, colour, texture, tuple(placed), sign)


def _sample_kinds(rng: random.Random, count: int) -> list[int]:
    """Mostly different kinds; now and then several of one, so that there is something to count."""
    kinds = rng.sample(range(len(OBJECT_KINDS)), count)
    if count > 1 and rng.random() < 0.45:
        same = rng.randint(2, count)
        kinds[:same] = [kinds[0]] * same
        rng.shuffle(kinds)
    return kinds


def _sample_coordinate(rng: random.Random, cell: int, size: int) -> int:
    """A coordinate within one third of the edge, off its borders, with the thing inside the picture."""
    third = IMAGE_SIZE // 3
    least = max(third * cell + (REGION_MARGIN if cell else 0), size // 2 + 1)
    most = min(third * (cell + 1) - 1 - (REGION_MARGIN if cell < 2 else 0), IMAGE_SIZE - size // 2 - 1)
    return rng.randint(least, most)


def _all_visible(things: list[Thing], sign: Sign | None) -> bool:
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


def generate_clip(seed: int, num_frames: int | None = None, num_things: int | None = None) -> Clip:
    """The clip of a seed: four to eight frames, in which one thing does something and others stay.

    `frames` and `things` fix how many there are; else there are one to three things, mostly one.
    """
    rng = random.Random(f"clip {seed} {num_frames}")
    count = num_frames or rng.choice((4, 4, 4, 5, 6, 8))
    while True:
        base = _sample_scene(rng, seed, num_things or rng.choice((1, 1, 2, 3)))
        if base is None or base.sign is not None or (seed < FIRST_HELD_OUT_SEED and _has_held_out_pair(base)):
            continue
        others = base.things[:-1]
        hero = base.things[-1]
        if any(thing.kind == hero.kind for thing in others):
            continue
        event = _sample_event(rng)
        path = _sample_path(rng, hero, event, count)
        if path is None or not all(_all_visible([*others, at], None) for at in path if at is not None):
            continue
        scenes = tuple(replace(base, things=(*others, at) if at is not None else others) for at in path)
        return Clip(seed, scenes, hero, event)


def _sample_event(rng: random.Random) -> Event:
    what = rng.choice(("moves", "moves", "moves", "moves", "appears", "leaves", "stays"))
    return Event(what, rng.choice(tuple(MOTION_VECTORS)) if what == "moves" else "")


def _sample_path(rng: random.Random, hero: Thing, event: Event, count: int) -> list[Thing | None] | None:
    """The main thing in each frame; None where it is not there. None at all if it would leave the picture."""
    if event.what == "moves":
        dx, dy = MOTION_VECTORS[event.way]
        step = rng.randint(60, 110) / (count - 1)
        start = [hero.x - dx * step * (count - 1) / 2, hero.y - dy * step * (count - 1) / 2]
        path = [
            replace(hero, x=round(start[0] + dx * step * t), y=round(start[1] + dy * step * t)) for t in range(count)
        ]
        reach = hero.size // 2 + 1
        inside = all(reach <= c <= IMAGE_SIZE - reach for at in path for c in (at.x, at.y))
        return list(path) if inside else None
    if event.what == "stays":
        return [hero] * count
    when = rng.randint(1, count - 1)
    if event.what == "appears":
        return [None] * when + [hero] * (count - when)
    return [hero] * when + [None] * (count - when)


def spatial_relation(a: Thing, b: Thing) -> str | None:
    """Where `a` is seen from `b`, if that is clear: left of, right of, above or below it."""
    dx, dy = a.x - b.x, a.y - b.y
    if abs(dx) >= 1.5 * abs(dy) and abs(dx) > 24:
        return "left of" if dx < 0 else "right of"
    if abs(dy) >= 1.5 * abs(dx) and abs(dy) > 24:
        return "above" if dy < 0 else "below"
    return None
