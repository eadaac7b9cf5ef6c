"""Several captions of one picture: one for each prompt of a file, and several of each. Each is a row of its own.

The rows of a picture follow each other in batches of their own, so that pictures are encoded, and what comes before the
question computed, once (`reuse_prefix` of `mmspec.patch`).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mmspec.app.caption.config import CaptionConfig
from mmspec.app.errors import UsageError
from mmspec.app.io.text import find_fault

if TYPE_CHECKING:
    from mmspec.app.io.item import Item

MAX_PROMPTS_BYTES = 1 << 20
"""Size of a file of prompts."""
MAX_PROMPTS = 1000


def read_prompts(path: str) -> tuple[str, ...]:
    """The lines of a file of prompts, for argparse.

    Raises:
        argparse.ArgumentTypeError: it cannot be read, is too large, or has an empty or a repeated line.
    """
    try:
        with Path(path).open("rb") as stream:
            content = stream.read(MAX_PROMPTS_BYTES + 1)
        if len(content) > MAX_PROMPTS_BYTES:
            raise argparse.ArgumentTypeError(
                f"{path} is larger than {MAX_PROMPTS_BYTES >> 20} MiB: name a file of prompts"
            )
        lines = content.decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if not 1 <= len(lines) <= MAX_PROMPTS:
        raise argparse.ArgumentTypeError(f"{path} must have 1 to {MAX_PROMPTS} lines, a prompt each; got {len(lines)}")
    first: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise argparse.ArgumentTypeError(f"{path} line {number} is empty: each line is a prompt")
        if fault := find_fault(line):
            raise argparse.ArgumentTypeError(f"{path} line {number} {fault}")
        if line in first:
            raise argparse.ArgumentTypeError(
                f"{path} line {number} is that of line {first[line]}: --num-captions asks again"
            )
        first[line] = number
    return tuple(lines)


def check_variants(config: CaptionConfig) -> None:
    """Refuse settings that contradict several captions of a picture.

    Raises:
        UsageError: they do.
    """
    if config.prompts and config.prompt is not None:
        raise UsageError("--prompt is one prompt, --prompts a file of them: give one of the two")
    if config.num_captions > 1 and config.temperature == 0:
        raise UsageError(
            f"--num-captions {config.num_captions} without sampling gives equal captions: add --temperature 1"
        )
    if config.num_variants > 1 and config.format == "txt":
        raise UsageError(
            f"a text file beside a picture holds one caption, not {config.num_variants}: use --format jsonl"
        )


def variants(item: Item, config: CaptionConfig) -> list[Item]:
    """The rows of an item, with ids and positions of their own. A prompt of its own takes the place of the file's."""
    if config.num_variants == 1 and not config.prompts:
        return [item]
    prompts = [item.prompt] if item.prompt else config.prompts or [None]
    asked = [prompt for prompt in prompts for _ in range(config.num_captions)]
    start = item.index * config.num_variants
    ids = variant_ids(item.id, config)
    return [
        replace(item, id=ident, prompt=prompt, index=start + number)
        for number, (ident, prompt) in enumerate(zip(ids, asked, strict=False))
    ]


def picture_number(item: Item, config: CaptionConfig) -> int:
    """The position in the input of what a row of `variants` is about: equal for all rows of a picture."""
    return item.index // config.num_variants


def variant_ids(ident: str, config: CaptionConfig) -> list[str]:
    """The ids of all rows that an item of that id may have."""
    if config.num_variants == 1:
        return [ident]
    return [f"{ident}#{number + 1}" for number in range(config.num_variants)]
