"""Scenarios of the compressor study: one image, four images or a clip, and the longest clip that fits the context."""

from __future__ import annotations

import argparse
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

SCENARIOS = {"short": 1, "one": 1, "four": 4, "clip8": 8, "clip32": 32}
"""{scenario: images}; clips of other lengths are accepted too. `short` and `one` differ in the question."""
CLIP_PATTERN = re.compile(r"clip([2-9]|[1-9]\d+)")
RESERVED_POSITIONS = 16
"""Positions left free: questions differ in length, and drafts extend past the answer."""


def count_images(shape: str) -> int:
    """Number of images of a scenario.

    Raises:
        ValueError: unknown scenario.
    """
    found = CLIP_PATTERN.fullmatch(shape)
    if found is None and shape not in SCENARIOS:
        raise ValueError(
            f"unknown shape {shape!r}; known are {', '.join(SCENARIOS)}, and clips of other lengths (clip12)"
        )
    return int(found[1]) if found else SCENARIOS[shape]


def generate_scenario(shape: str, first: int) -> Iterator[SceneRequest]:
    """Endless requests of a scenario, from a seed on."""
    pictures = count_images(shape)
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


def count_prompt_tokens(model: Any, processor: Any, request: SceneRequest) -> tuple[int, int]:
    """(visual tokens, all tokens) of the prompt of a request."""
    ids = Captioner(model, processor).build_inputs([request.images], [request.question])["input_ids"]
    placeholders = torch.tensor(find_adapter(model).media_token_ids, device=ids.device)
    return int(torch.isin(ids, placeholders).sum()), ids.shape[1]


def fit_to_context(shape: str, model: Any, processor: Any, new_tokens: int) -> str:
    """The scenario, or the longest clip whose prompt and answer fit the context of the model.

    Raises:
        ValueError: not even a clip of two frames fits.
    """
    places = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if CLIP_PATTERN.fullmatch(shape) is None or places is None:
        return shape

    def fits(frames: int) -> bool:
        return (
            count_prompt_tokens(model, processor, next(generate_scenario(f"clip{frames}", 0)))[1]
            + new_tokens
            + RESERVED_POSITIONS
            <= places
        )

    visual, tokens = count_prompt_tokens(model, processor, next(generate_scenario("clip2", 0)))
    room = places - (tokens - visual) - new_tokens - RESERVED_POSITIONS
    frames = min(count_images(shape), 2 * room // max(1, visual))
    while frames > 1 and not fits(frames):
        frames -= 1
    if frames < 2:
        raise ValueError(
            f"a clip and {new_tokens} new tokens must fit into the {places} positions of this model, and two frames "
            f"alone are a prompt of {tokens}: ask for fewer new tokens."
        )
    return f"clip{frames}"


def split_commas(text: str) -> list[str]:
    """Comma-separated names."""
    return [word.strip() for word in text.split(",") if word.strip()]


def parse_shapes(text: str) -> list[str]:
    """Comma-separated shapes."""
    for name in split_commas(text):
        try:
            count_images(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return split_commas(text)


def parse_shares(text: str) -> list[int]:
    """Comma-separated numbers from 0 on."""
    try:
        values = [int(word) for word in split_commas(text)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"shares are whole numbers; got {text!r}") from error
    if min(values, default=0) < 0:
        raise argparse.ArgumentTypeError(f"shares are 0 (one token) or more; got {text!r}")
    return values


__all__ = [
    "SCENARIOS",
    "count_images",
    "count_prompt_tokens",
    "fit_to_context",
    "generate_scenario",
    "parse_shapes",
    "parse_shares",
    "split_commas",
]
