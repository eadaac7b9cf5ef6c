"""Clips of the scenes world, in which one thing acts; where things are to each other, and what of them is seen."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from PIL import Image, ImageChops

from mmspec.app.scenes.render import build_layers
from mmspec.app.scenes.world import (
    FIRST_HELD_OUT_SEED,
    SCENE_IMAGE_SIZE,
    Scene,
    Thing,
    all_visible,
    has_held_out_pair,
    sample_scene,
)

MOTION_VECTORS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
"""Direction -> x, y."""


@dataclass(frozen=True)
class Event:
    """What the hero of a clip does.

    Attributes:
        what: "moves", "appears", "leaves" or "stays".
        way: Key of `MOTION_VECTORS` if it moves, else empty.
    """

    what: str
    way: str = ""


@dataclass(frozen=True)
class Clip:
    """Ground truth of a short clip.

    Attributes:
        seed: Seed that the clip was sampled from.
        frames: One scene per frame.
        hero: The thing that acts; its kind is unique in the clip.
        event: What the hero does.
    """

    seed: int
    frames: tuple[Scene, ...]
    hero: Thing
    event: Event


def generate_clip(seed: int, num_frames: int | None = None, num_things: int | None = None) -> Clip:
    """Return the clip of a seed, in which one thing acts and all others stay.

    Args:
        seed: The seed; from `FIRST_HELD_OUT_SEED` on, held-out pairs of kinds may occur.
        num_frames: Number of frames; None samples four to eight.
        num_things: Number of things; None samples one to three.
    """
    rng = random.Random(f"clip {seed} {num_frames}")
    count = num_frames or rng.choice((4, 4, 4, 5, 6, 8))
    while True:
        base = sample_scene(rng, seed, num_things or rng.choice((1, 1, 2, 3)))
        if base is None or base.sign is not None or (seed < FIRST_HELD_OUT_SEED and has_held_out_pair(base)):
            continue
        others = base.things[:-1]
        hero = base.things[-1]
        if any(thing.kind == hero.kind for thing in others):
            continue
        event = _sample_event(rng)
        path = _sample_path(rng, hero, event, count)
        if path is None or not all(all_visible([*others, here], None) for here in path if here is not None):
            continue
        scenes = tuple(replace(base, things=(*others, here) if here is not None else others) for here in path)
        return Clip(seed, scenes, hero, event)


def _sample_event(rng: random.Random) -> Event:
    what = rng.choice(("moves", "moves", "moves", "moves", "appears", "leaves", "stays"))
    return Event(what, rng.choice(tuple(MOTION_VECTORS)) if what == "moves" else "")


def _sample_path(rng: random.Random, hero: Thing, event: Event, count: int) -> list[Thing | None] | None:
    """Return the hero per frame, None in frames without it; None instead of a list if it would leave the image."""
    if event.what == "moves":
        dx, dy = MOTION_VECTORS[event.way]
        step = rng.randint(60, 110) / (count - 1)
        start = [hero.x - dx * step * (count - 1) / 2, hero.y - dy * step * (count - 1) / 2]
        path = [
            replace(hero, x=round(start[0] + dx * step * t), y=round(start[1] + dy * step * t)) for t in range(count)
        ]
        margin = hero.size // 2 + 1
        is_inside = all(margin <= value <= SCENE_IMAGE_SIZE - margin for moved in path for value in (moved.x, moved.y))
        return list(path) if is_inside else None
    if event.what == "stays":
        return [hero] * count
    change = rng.randint(1, count - 1)  # first frame after the event
    if event.what == "appears":
        return [None] * change + [hero] * (count - change)
    return [hero] * change + [None] * (count - change)


def spatial_relation(a: Thing, b: Thing) -> str | None:
    """Return the direction from `b` to `a`: "left of", "right of", "above" or "below"; None if it is not clear."""
    dx, dy = a.x - b.x, a.y - b.y
    if abs(dx) >= 1.5 * abs(dy) and abs(dx) > 24:
        return "left of" if dx < 0 else "right of"
    if abs(dy) >= 1.5 * abs(dx) and abs(dy) > 24:
        return "above" if dy < 0 else "below"
    return None


def visible_shares(scene: Scene) -> list[float]:
    """Return for each thing the share of its pixels, 0 to 1, that no layer in front of it hides."""
    shares: list[float] = []
    front = Image.new("L", (SCENE_IMAGE_SIZE, SCENE_IMAGE_SIZE), 0)
    for sprite, corner in reversed(build_layers(scene)):
        mask = Image.new("L", (SCENE_IMAGE_SIZE, SCENE_IMAGE_SIZE), 0)
        mask.paste(sprite.getchannel("A").point(lambda alpha: 255 if alpha > 127 else 0), corner)
        area = mask.histogram()[255]
        hidden = ImageChops.multiply(mask, front).histogram()[255]
        shares.append(1 - hidden / max(1, area))
        front = ImageChops.lighter(front, mask)
    shares.reverse()
    return shares[: len(scene.things)]
