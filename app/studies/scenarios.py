"""What the study of compressors shows: one picture, four, or a clip; and how long a clip the model has places for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from mmspec.app.modeling.captioner import Captioner
from mmspec.app.scenes.render import render_scene
from mmspec.app.scenes.tasks import SceneRequest, generate_requests
from mmspec.app.scenes.world import generate_clip
from mmspec.targets.registry import find_adapter

SHAPES = {"short": 1, "one": 1, "four": 4, "clip8": 8, "clip32": 32}
"""How many pictures that is; clips of other lengths may be asked for. `short` and `one` differ in the question."""
CLIP = re.compile(r"clip([2-9]|[1-9]\d+)")
SPARE = 16
"""Positions left free: questions differ by some words, and drafts look ahead."""


def pictures_of(shape: str) -> int:
    """How many pictures a shape has.

    Raises:
        ValueError: no such shape.
    """
    found = CLIP.fullmatch(shape)
    if found is None and shape not in SHAPES:
        raise ValueError(f"unknown shape {shape!r}; known are {', '.join(SHAPES)}, and clips of other lengths (clip12)")
    return int(found[1]) if found else SHAPES[shape]


def asked(shape: str, first: int) -> Iterator[SceneRequest]:
    """Requests of a shape without end, from a seed on."""
    pictures = pictures_of(shape)
    if shape == "short":
        yield from generate_requests("answer", first)
    if shape == "one":
        yield from generate_requests("describe", first)
    if shape == "four":
        singles = generate_requests("describe", first)
        while True:
            four = list(islice(singles, pictures))
            yield replace(four[0], images=tuple(one.images[0] for one in four))
    for one in generate_requests("clip", first):
        moving = generate_clip(one.seed, pictures)
        yield replace(one, images=tuple(map(render_scene, moving.frames)), ground_truth=moving)


def visual_of(model: Any, processor: Any, request: SceneRequest) -> tuple[int, int]:
    """Visual tokens of a request's prompt, and all its tokens."""
    ids = Captioner(model, processor).build_inputs([request.images], [request.question])["input_ids"]
    placeholders = torch.tensor(find_adapter(model).media_token_ids, device=ids.device)
    return int(torch.isin(ids, placeholders).sum()), ids.shape[1]


def fitting(shape: str, model: Any, processor: Any, new_tokens: int) -> str:
    """The shape, or the longest clip whose prompt and answer have places in the model if a longer one was asked for.

    Raises:
        ValueError: not even a clip of two frames has.
    """
    places = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if CLIP.fullmatch(shape) is None or places is None:
        return shape

    def fits(frames: int) -> bool:
        return visual_of(model, processor, next(asked(f"clip{frames}", 0)))[1] + new_tokens + SPARE <= places

    visual, tokens = visual_of(model, processor, next(asked("clip2", 0)))
    room = places - (tokens - visual) - new_tokens - SPARE
    frames = min(pictures_of(shape), 2 * room // max(1, visual))
    while frames > 1 and not fits(frames):
        frames -= 1
    if frames < 2:
        raise ValueError(
            f"a clip and {new_tokens} new tokens must fit into the {places} positions of this model, and two frames "
            f"alone are a prompt of {tokens}: ask for fewer new tokens."
        )
    return f"clip{frames}"


__all__ = ["SHAPES", "asked", "fitting", "pictures_of", "visual_of"]
