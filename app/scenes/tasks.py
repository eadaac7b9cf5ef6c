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
from mmspec.app.scenes.render import render_scene
from mmspec.app.scenes.world import Clip, Scene, generate_clip, generate_scene

REQUEST_TASKS = ("describe", "short", "answer", "clip")


@dataclass(frozen=True)
class SceneRequest:
    """Pictures and what is asked about them; `answer` is what the grammar says."""

    seed: int
    images: tuple[Image.Image, ...]
    question: str
    answer: str
    ground_truth: Scene | Clip


def generate_requests(task: str, first_seed: int) -> Iterator[SceneRequest]:
    """Requests without end, from a seed on. Long descriptions are asked of scenes with three things or more.

    Raises:
        ValueError: an unknown task.
    """
    if task not in REQUEST_TASKS:
        raise ValueError(f"task must be one of {', '.join(REQUEST_TASKS)}; got {task!r}")
    for seed in count(first_seed):
        rng = random.Random(f"{task} {seed}")
        if task == "clip":
            moving = generate_clip(seed)
            turn = grammar.ask_clip(moving, rng)
            yield SceneRequest(seed, tuple(map(render_scene, moving.frames)), turn.question, turn.answer, moving)
            continue
        made = generate_scene(seed)
        if task == "describe" and len(made.things) < 3:
            continue
        turn = grammar.ask_description(made, rng) if task == "describe" else _short(task, made, rng)
        yield SceneRequest(seed, (render_scene(made),), turn.question, turn.answer, made)


def _short(task: str, made: Scene, rng: random.Random) -> grammar.Turn:
    if task == "short":
        return grammar.ask_caption(made, rng)
    return grammar.generate_chat(
        made, rng, 1, [name for name in grammar.QA_TASKS if name not in ("describe", "short")]
    )[0]


__all__ = ["REQUEST_TASKS", "SceneRequest", "generate_requests"]
