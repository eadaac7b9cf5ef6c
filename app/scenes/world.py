"""The scenes world: ground truth of scenes, sampled from a seed. Rendering is in `render`.

A scene has one to six things on a background and sometimes a sign with a word. Every attribute that a question may ask
for is separated by a margin: sizes come in three ranges with gaps, centres keep a distance from the borders of the nine
regions, and no thing is hidden by more than half. Equal seeds give equal scenes in every version; field names and
values are part of the frozen world (`tests/scenes/test_scenes_world.py`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from mmspec.app.scenes.objects import OBJECT_KINDS

SCENE_IMAGE_SIZE = 192
"""Edge of an image in pixels."""
FIRST_HELD_OUT_SEED = 50_000_000
"""Seeds from here on are held out: never used for training."""
REGIONS = (
    ("upper left", "top", "upper right"),
    ("left", "center", "right"),
    ("lower left", "bottom", "lower right"),
)
"""Names of the nine regions, row by row."""
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
"""Name -> RGB."""
BACKGROUND_TEXTURES = ("plain", "striped", "dotted", "checkered")
SIZE_CLASSES = {"small": (38, 44), "medium": (52, 59), "large": (69, 78)}
"""Name -> minimum and maximum of the longer edge in pixels, inclusive."""
REGION_MARGIN = 7
"""Minimum distance in pixels between a centre and the borders of the regions."""
SIGN_WORDS = tuple((Path(__file__).parent / "data" / "sign_words.txt").read_text(encoding="utf-8").split())
"""Words on signs: common, at most five letters, in capitals."""


@dataclass(frozen=True)
class Thing:
    """One thing.

    Attributes:
        kind: Index into `OBJECT_KINDS`.
        x: Horizontal pixel of the centre.
        y: Vertical pixel of the centre, from the top.
        size: Longer edge in pixels.
        angle: Rotation in degrees, counter-clockwise.
        flipped: Whether the sprite is mirrored.
    """

    kind: int
    x: int
    y: int
    size: int
    angle: int = 0
    flipped: bool = False

    @property
    def name(self) -> str:
        """Name of the kind, in the singular."""
        return OBJECT_KINDS[self.kind].name

    @property
    def size_class(self) -> str:
        """Key of `SIZE_CLASSES`."""
        return next(name for name, (low, high) in SIZE_CLASSES.items() if low <= self.size <= high)

    @property
    def region(self) -> str:
        """Name of the region that holds the centre."""
        return find_region(self.x, self.y)


@dataclass(frozen=True)
class Sign:
    """A word or number on a white board.

    Attributes:
        text: Capitals or digits.
        x: Horizontal pixel of the centre.
        y: Vertical pixel of the centre, from the top.
    """

    text: str
    x: int
    y: int

    @property
    def region(self) -> str:
        """Name of the region that holds the centre."""
        return find_region(self.x, self.y)


@dataclass(frozen=True)
class Scene:
    """Ground truth of one image.

    Attributes:
        seed: Seed that the scene was sampled from.
        colour: Key of `BACKGROUND_COLOURS`.
        texture: One of `BACKGROUND_TEXTURES`.
        things: The things from back to front.
        sign: The sign, in front of all things, or None.
    """

    seed: int
    colour: str
    texture: str
    things: tuple[Thing, ...]
    sign: Sign | None = None

    def reading_order(self) -> list[Thing]:
        """Return the things row by row from the upper left."""
        return sorted(self.things, key=lambda thing: (3 * thing.y // SCENE_IMAGE_SIZE, thing.x, thing.y))

    def count(self, kind: int) -> int:
        """Return the number of things of a kind."""
        return sum(thing.kind == kind for thing in self.things)


def find_region(x: int, y: int) -> str:
    """Return the name of the region that holds a pixel."""
    return REGIONS[min(2, 3 * y // SCENE_IMAGE_SIZE)][min(2, 3 * x // SCENE_IMAGE_SIZE)]


def is_held_out_pair(a: int, b: int) -> bool:
    """Return whether two kinds never occur together in scenes of training seeds: about one pair in twenty."""
    a, b = sorted((a, b))
    return a != b and (a * 7919 + b * 104_729) % 20 == 7


def generate_scene(seed: int, num_things: int | None = None) -> Scene:
    """Return the scene of a seed.

    Args:
        seed: The seed; from `FIRST_HELD_OUT_SEED` on, held-out pairs of kinds may occur.
        num_things: Number of things; None samples one to six.
    """
    rng = random.Random(f"scene {seed} {num_things}")
    while True:
        scene = sample_scene(rng, seed, num_things)
        if scene is not None and (seed >= FIRST_HELD_OUT_SEED or not has_held_out_pair(scene)):
            return scene


def has_held_out_pair(scene: Scene) -> bool:
    """Whether two kinds of a scene never occur together in those of training seeds."""
    return any(is_held_out_pair(a.kind, b.kind) for a, b in combinations(scene.things, 2))


def sample_scene(rng: random.Random, seed: int, num_things: int | None) -> Scene | None:
    """Sample one scene; None if a thing of it would be hidden too much."""
    count = num_things or rng.choice((1, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 6))
    cells = rng.sample([(row, column) for row in range(3) for column in range(3)], count + 1)
    kinds = _sample_kinds(rng, count)
    things: list[Thing] = []
    for kind, (row, column) in zip(kinds, cells, strict=False):
        size = rng.randint(*SIZE_CLASSES[rng.choice(tuple(SIZE_CLASSES))])
        x, y = (_sample_coordinate(rng, cell, size) for cell in (column, row))
        things.append(Thing(kind, x, y, size, rng.randint(-18, 18), rng.random() < 0.5))
    sign = None
    if rng.random() < 0.3:
        row, column = cells[-1]
        text = rng.choice(SIGN_WORDS) if rng.random() < 0.7 else str(rng.randint(2, 999))
        sign = Sign(text, _sample_coordinate(rng, column, 80), _sample_coordinate(rng, row, 34))
    if not all_visible(things, sign):
        return None
    colour = rng.choice(tuple(BACKGROUND_COLOURS))
    texture = rng.choice(BACKGROUND_TEXTURES)
    return Scene(seed, colour, texture, tuple(things), sign)


def _sample_kinds(rng: random.Random, count: int) -> list[int]:
    """Sample different kinds, or (45%) two or more things of one kind, so that scenes have something to count."""
    kinds = rng.sample(range(len(OBJECT_KINDS)), count)
    if count > 1 and rng.random() < 0.45:
        num_equal = rng.randint(2, count)
        kinds[:num_equal] = [kinds[0]] * num_equal
        rng.shuffle(kinds)
    return kinds


def _sample_coordinate(rng: random.Random, cell: int, size: int) -> int:
    """Sample a coordinate in one third of the edge, off the region's borders, with the thing inside the image."""
    third = SCENE_IMAGE_SIZE // 3
    low = max(third * cell + (REGION_MARGIN if cell else 0), size // 2 + 1)
    high = min(third * (cell + 1) - 1 - (REGION_MARGIN if cell < 2 else 0), SCENE_IMAGE_SIZE - size // 2 - 1)
    return rng.randint(low, high)


def all_visible(things: list[Thing], sign: Sign | None) -> bool:
    """Whether the boxes in front of each box cover at most 30% of it."""
    boxes = [(t.x - t.size // 2, t.y - t.size // 2, t.x + t.size // 2, t.y + t.size // 2) for t in things]
    if sign is not None:
        boxes.append((sign.x - 40, sign.y - 17, sign.x + 40, sign.y + 17))
    for index, box in enumerate(boxes):
        hidden = sum(_overlap(box, other) for other in boxes[index + 1 :])
        if hidden > 0.3 * (box[2] - box[0]) * (box[3] - box[1]):
            return False
    return True


Box = tuple[int, int, int, int]
"""Left, top, right, bottom in pixels."""


def _overlap(a: Box, b: Box) -> int:
    """Area of the intersection in pixels."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    return max(0, width) * max(0, height)
