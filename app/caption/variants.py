"""Several captions of one picture: one for each prompt of a file, and several of each. Each is a row of its own.

The rows of a picture follow each other in batches of their own, so that pictures are encoded, and what comes before the
question computed, once (`reuse_prefix` of `mmspec.patch`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from mmspec.app.caption.config import CaptionConfig
from mmspec.app.errors import UsageError
from mmspec.app.io.fields import MissingFieldError, answer_number, field_names, fill
from mmspec.app.io.text import find_fault

if TYPE_CHECKING:
    from mmspec.app.io.item import Item


def check_variants(config: CaptionConfig) -> None:
    """Refuse settings that contradict several captions of a picture.

    Raises:
        UsageError: they do.
    """
    if config.prompts and config.prompt is not None:
        raise UsageError("--prompt is one prompt, --prompts a file of them: give one of the two")
    for line, prompt in enumerate(config.prompts or (config.prompt or "",), 1):
        number = max((answer_number(name) or 0 for name in field_names(prompt)), default=0)
        if number >= line:
            where = f"--prompts line {line}" if config.prompts else "--prompt"
            raise UsageError(
                f"{where} names {{answer{number}}}, the answer to a prompt that does not come before: only later "
                "lines of --prompts have it"
            )
    if config.num_captions > 1 and config.temperature == 0:
        raise UsageError(
            f"--num-captions {config.num_captions} without sampling gives equal captions: add --temperature 1"
        )
    if config.num_variants > 1 and config.writes_texts:
        raise UsageError(
            f"a text file beside a picture holds one caption, not {config.num_variants}: use --format jsonl"
        )


def variants(item: Item, config: CaptionConfig) -> list[Item]:
    """The rows of an item, with ids and positions of their own. A prompt of its own takes the place of the file's."""
    if config.num_variants == 1 and not config.prompts and not config.prompt_fields:
        return [item]
    start = item.index * config.num_variants
    prompts = [item.prompt] if item.prompt else config.prompts or [config.prompt if config.prompt_fields else None]
    asked = [
        (prompt, "") if prompt is None or item.prompt else _filled(prompt, item.fields)
        for prompt in prompts
        for _ in range(config.num_captions)
    ]
    return [
        replace(item, id=ident, prompt=prompt, template=template, index=start + number)
        for number, (ident, (prompt, template)) in enumerate(zip(variant_ids(item.id, config), asked, strict=False))
    ]


def _filled(prompt: str, values: Mapping[str, str]) -> tuple[str, str]:
    """A prompt with the fields of a row, and ""; else twice as it is: `RowCaptioner` has the answers, or an error."""
    with suppress(MissingFieldError):
        text = fill(prompt, values)
        if find_fault(text) is None:
            return text, ""
    return prompt, prompt


def picture_number(item: Item, config: CaptionConfig) -> int:
    """The position in the input of what a row of `variants` is about: equal for all rows of a picture."""
    return item.index // config.num_variants


def variant_ids(ident: str, config: CaptionConfig) -> list[str]:
    """The ids of all rows that an item of that id may have."""
    if config.num_variants == 1:
        return [ident]
    return [f"{ident}#{number + 1}" for number in range(config.num_variants)]
