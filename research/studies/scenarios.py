"""Scenarios of the compressor study: one image, four images or a clip, and the longest clip that fits the context."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import torch

from mmspec.app.cli.arguments import split_commas
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.scenes.render import render_scene
from mmspec.targets.registry import find_adapter
from research.scenes.clips import generate_clip
from research.scenes.tasks import SceneRequest, generate_requests

if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin

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


def generate_scenario(shape: str, scene_seed: int) -> Iterator[SceneRequest]:
    """Endless requests of a scenario; `scene_seed` is the seed of the first scene."""
    num_images = count_images(shape)
    if shape == "short":
        yield from generate_requests("answer", scene_seed)
    if shape == "one":
        yield from generate_requests("describe", scene_seed)
    if shape == "four":
        single_requests = generate_requests("describe", scene_seed)
        while True:
            group = list(islice(single_requests, num_images))
            yield replace(group[0], images=tuple(request.images[0] for request in group))
    for request in generate_requests("clip", scene_seed):
        clip = generate_clip(request.seed, num_images)
        yield replace(request, images=tuple(map(render_scene, clip.frames)), ground_truth=clip)


def count_prompt_tokens(model: PreTrainedModel, processor: ProcessorMixin, request: SceneRequest) -> tuple[int, int]:
    """(visual tokens, all tokens) of the prompt of a request."""
    ids = Captioner(model, processor).build_inputs([request.images], [request.question])["input_ids"]
    placeholders = torch.tensor(find_adapter(model).media_token_ids, device=ids.device)
    return int(torch.isin(ids, placeholders).sum()), ids.shape[1]


def fit_to_context(shape: str, model: PreTrainedModel, processor: ProcessorMixin, new_tokens: int) -> str:
    """The scenario, or the longest clip whose prompt and answer fit the context of the model.

    Raises:
        ValueError: not even a clip of two frames fits.
    """
    max_positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if CLIP_PATTERN.fullmatch(shape) is None or max_positions is None:
        return shape

    def fits(frames: int) -> bool:
        request = next(generate_scenario(f"clip{frames}", 0))
        _, num_prompt_tokens = count_prompt_tokens(model, processor, request)
        return num_prompt_tokens + new_tokens + RESERVED_POSITIONS <= max_positions

    visual, tokens = count_prompt_tokens(model, processor, next(generate_scenario("clip2", 0)))
    room = max_positions - (tokens - visual) - new_tokens - RESERVED_POSITIONS
    frames = min(count_images(shape), 2 * room // max(1, visual))
    while frames > 1 and not fits(frames):
        frames -= 1
    if frames < 2:
        raise ValueError(
            f"a clip and {new_tokens} new tokens must fit into the {max_positions} positions of this model, and two "
            f"frames alone are a prompt of {tokens}: ask for fewer new tokens."
        )
    return f"clip{frames}"


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
        values = [int(number) for number in split_commas(text)]
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
]
