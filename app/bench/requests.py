"""Inputs for benchmarks: images with prompts of a given length, all different, or generated scenes with questions."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image

from mmspec.app.caption.progress import print_stderr
from mmspec.app.io.decode import decode_readable
from mmspec.app.io.images import media_images
from mmspec.app.io.inputs import collect_items
from mmspec.app.modeling.captioner import Captioner
from mmspec.app.modeling.random_models import WORDS
from mmspec.app.modeling.synthetic_images import draw_image
from mmspec.vision.video.decoder_pool import DecoderPool


def bench_images(paths: Sequence[str], count: int, seed: int) -> list[Image.Image]:
    """`count` different images, synthetic or from `paths`; with a warning if there are fewer."""
    if not paths:
        return [draw_image(seed + number)[0] for number in range(count)]
    items = collect_items(paths, Path())[:count]
    if len(items) < count:
        print_stderr(f"mmspec: {len(items)} images for {count} requests: drafters that learn see some answers again")
    with DecoderPool() as decoders:
        loaded = [media_images(media)[0] for _, media in decode_readable(items, decoders, "--images")]
    return [loaded[number % len(loaded)] for number in range(count)]


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
    from mmspec.app.scenes.tasks import generate_requests

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
