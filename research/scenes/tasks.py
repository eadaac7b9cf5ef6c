"""Requests about scenes, for benchmarks and for training drafters: images, question and reference answer.

Use seeds from `world.FIRST_HELD_OUT_SEED` on for benchmarks; the scenes model and its drafters never train on them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from PIL import Image

from mmspec.app.cli.arguments import Options, parse_seed
from mmspec.app.scenes.render import render_scene
from mmspec.app.scenes.world import Scene, generate_scene
from research.scenes import grammar
from research.scenes.clips import Clip, generate_clip

REQUEST_TASKS = ("describe", "short", "answer", "clip")
"""Long description, caption, short answer, what happens in a clip."""


@dataclass(frozen=True)
class SceneRequest:
    """One request and its reference answer.

    Attributes:
        seed: Seed of the scene or clip.
        images: The scene's image, or the clip's frames.
        question: The user's text.
        answer: The grammar's answer.
        ground_truth: The scene or clip.
    """

    seed: int
    images: tuple[Image.Image, ...]
    question: str
    answer: str
    ground_truth: Scene | Clip


def add_scene_seed(parser: Options, default: int | None, default_text: str) -> None:
    """Add `--scene-seed`."""
    help_ = f"seed of the first scene (default {default_text})"
    parser.add_argument("--scene-seed", type=parse_seed, default=default, metavar="S", help=help_)


def generate_requests(task: str, first_seed: int) -> Iterator[SceneRequest]:
    """Yield requests without end, one per seed; `describe` skips scenes with fewer than three things.

    Args:
        task: One of `REQUEST_TASKS`.
        first_seed: Seed of the first request.

    Raises:
        ValueError: The task is unknown.
    """
    if task not in REQUEST_TASKS:
        raise ValueError(f"task must be one of {', '.join(REQUEST_TASKS)}; got {task!r}")
    for seed in count(first_seed):
        rng = random.Random(f"{task} {seed}")
        if task == "clip":
            clip = generate_clip(seed)
            turn = grammar.ask_clip(clip, rng)
            yield SceneRequest(seed, tuple(map(render_scene, clip.frames)), turn.question, turn.answer, clip)
            continue
        scene = generate_scene(seed)
        if task == "describe" and len(scene.things) < 3:
            continue
        turn = _ask(task, scene, rng)
        yield SceneRequest(seed, (render_scene(scene),), turn.question, turn.answer, scene)


def _ask(task: str, scene: Scene, rng: random.Random) -> grammar.QATurn:
    if task == "describe":
        return grammar.ask_description(scene, rng)
    if task == "short":
        return grammar.ask_caption(scene, rng)
    names = [name for name in grammar.QA_TASKS if name not in ("describe", "short")]
    return grammar.generate_chat(scene, rng, 1, names)[0]
