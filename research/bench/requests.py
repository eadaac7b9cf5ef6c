"""Inputs for benchmarks: images with prompts of a given length, all different, or generated scenes with questions."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from PIL import Image

from mmspec.app.caption.progress import print_stderr
from mmspec.app.io.decode import ReadableRows
from mmspec.app.io.images import media_images
from mmspec.app.modeling.captioner import Captioner
from research.synthetic_images import draw_image

_WORDS = """user assistant describe the image this picture what is in it a an of on and with to one two
short long detailed caption write please answer question list count name colour color how many which who where why are
do you see there does man woman child dog cat car tree house street red green blue black white left right"""
WORDS = _WORDS.split()


def synthetic_images(count: int, seed: int) -> list[Image.Image]:
    """`count` different images."""
    return [draw_image(seed + number)[0] for number in range(count)]


def named_images(rows: ReadableRows, count: int, quiet: bool = False) -> list[Image.Image]:
    """`count` images, of one row after the other; repeated where there are fewer rows.

    Args:
        quiet: print nothing about it.

    Raises:
        UsageError: there is none.
    """
    images = [media_images(media)[0] for _, media in islice(rows, count)]
    if not quiet:
        rows.report()
    if len(images) < count and not quiet:
        print_stderr(f"mmspec: {len(images)} images for {count} requests: drafters that learn see some answers again")
    return [images[number % len(images)] for number in range(count)]


def build_requests(
    captioner: Captioner, images: Sequence[Image.Image], prompt: str, batch: int, tokens: int, count: int, seed: int
) -> list[dict[str, Any]]:
    """`count` different batches of prompts, padded with words to about `tokens` prompt tokens (0: unpadded)."""

    def text(number: int, words: int) -> str:
        rng = random.Random(f"{seed}:{number}")
        return " ".join([prompt, *(rng.choice(WORDS) for _ in range(words))])

    def prompt_length(words: int) -> int:
        return int(captioner.build_inputs(images[:1], [text(0, words)])["input_ids"].shape[1])

    words = _min_num_words(prompt_length, tokens)
    starts = range(0, count * batch, batch)
    return [
        captioner.build_inputs(images[i : i + batch], [text(i + row, words) for row in range(batch)]) for i in starts
    ]


def build_scene_requests(
    captioner: Captioner, task: str, scene_seed: int, batch: int, rounds: int
) -> list[dict[str, Any]]:
    """A warm-up batch, then `rounds` batches about the scenes from seed `scene_seed` on."""
    from research.scenes.tasks import generate_requests

    requests = list(islice(generate_requests(task, scene_seed), batch * (rounds + 1)))
    requests = requests[-batch:] + requests[:-batch]  # the first seeds are measured, the last ones warm up
    groups = [requests[start : start + batch] for start in range(0, len(requests), batch)]
    return [captioner.build_inputs([one.images for one in group], [one.question for one in group]) for group in groups]


def _min_num_words(length: Callable[[int], int], wanted: int) -> int:
    """Smallest number of words with which a prompt has at least `wanted` tokens."""
    low, high = 0, 1
    if length(0) >= wanted:
        return 0
    while length(high) < wanted:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if length(middle) >= wanted else (middle, high)
    return high
