"""Requests from the world, for benchmarks and for training drafters: pictures, a question, the grammar's answer.

Seeds from `world.HELD_OUT` on are never trained on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from PIL import Image

from mmspec.app.scenes import grammar
from mmspec.app.scenes.render import paint
from mmspec.app.scenes.world import Clip, Scene, clip, scene

TASKS = ("describe", "short", "answer", "clip")


@dataclass(frozen=True)
class Request:
    """Pictures and what is asked about them; `answer` is what the grammar says."""

    seed: int
    pictures: tuple[Image.Image, ...]
    question: str
    answer: str
    truth: Scene | Clip


def requests(task: str, first: int) -> Iterator[Request]:
    """Requests without end, from a seed on. Long descriptions are asked of scenes with three things or more.

    Raises:
        ValueError: an unknown task.
    """
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}; got {task!r}")
    for seed in count(first):
        dice = random.Random(f"{task} {seed}")
        if task == "clip":
            moving = clip(seed)
            turn = grammar.clip_turn(moving, dice)
            yield Request(seed, tuple(map(paint, moving.frames)), turn.question, turn.answer, moving)
            continue
        made = scene(seed)
        if task == "describe" and len(made.things) < 3:
            continue
        turn = grammar.describe(made, dice) if task == "describe" else _short(task, made, dice)
        yield Request(seed, (paint(made),), turn.question, turn.answer, made)


def _short(task: str, made: Scene, dice: random.Random) -> grammar.Turn:
    if task == "short":
        return grammar.short(made, dice)
    return grammar.chat(made, dice, 1, [name for name in grammar.TASKS if name not in ("describe", "short")])[0]


__all__ = ["TASKS", "Request", "requests"]
