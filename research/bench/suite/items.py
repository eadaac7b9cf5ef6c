"""Items of a suite: questions by category, with or without an image; from a folder, the toy world or text tasks.

The format of a folder is that of the MMSpec benchmark (arXiv 2603.14989): `mmspec.jsonl` with id, image, turns,
category and topic, and an `images/` folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image

from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.images import ImageError as ImageError
from mmspec.app.io.images import load_image
from mmspec.vision.video.decoder_pool import DecoderPool

FILE = "mmspec.jsonl"
TEXT_TASKS = Path(__file__).with_name("text_tasks.jsonl")
UNCATEGORISED = "uncategorised"


@dataclass(frozen=True)
class SuiteItem:
    """One conversation.

    Attributes:
        id: unique in its suite.
        turns: the questions, in order.
        category, topic: as the file has them; the report groups by one of them.
        images: a file, or images in memory; none for a text task.
        problem: why it cannot be run, in one line; None if it can.
    """

    id: str
    turns: tuple[str, ...]
    category: str
    topic: str = ""
    images: Path | tuple[Image.Image, ...] = ()
    problem: str | None = None

    @property
    def has_media(self) -> bool:
        """Whether there is an image."""
        return bool(self.images)


def load_item_media(item: SuiteItem, decoders: DecoderPool) -> tuple[Image.Image, ...]:
    """The images of an item, decoded in another process.

    Raises:
        ImageError: the file cannot be read or decoded.
    """
    return (load_image(item.images, isolated=decoders),) if isinstance(item.images, Path) else item.images


def read_items(file: Path, folder: Path | None = None) -> list[SuiteItem]:
    """Items of a JSON-lines file; an image that is not there becomes the `problem` of its item.

    Args:
        folder: of the images, whose paths are relative to it or to its `images/`; None for items without images.

    Raises:
        UsageError: no such file, or a line that is no item.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"a suite folder holds {FILE}; {file}: {one_line(error)}") from error
    items = [_parse(line, f"{file} line {number}", folder) for number, line in enumerate(lines, 1) if line.strip()]
    if not items:
        raise UsageError(f"{file} holds no items")
    return items


def scene_items(tasks: Sequence[str], count: int, scene_seed: int) -> list[SuiteItem]:
    """`count` requests of each task of the toy world, from `scene_seed` on."""
    from research.scenes.tasks import generate_requests

    return [
        SuiteItem(f"{task}-{one.seed}", (one.question,), task, images=one.images)
        for task in tasks
        for one in islice(generate_requests(task, scene_seed), count)
    ]


def choose_grouping(items: Sequence[SuiteItem]) -> str:
    """ "category" or "topic": the one with fewer different values, category if equal.

    Splits of the benchmark have the six tasks in one of them and a description of the image in the other.
    """
    values = {key: {getattr(item, key) for item in items} for key in ("category", "topic")}
    return "topic" if values["topic"] != {""} and len(values["topic"]) < len(values["category"]) else "category"


def group_items(items: Sequence[SuiteItem], key: str) -> list[SuiteItem]:
    """Items whose `category` is the value of `key`."""
    return [replace(item, category=getattr(item, key) or UNCATEGORISED) for item in items]


def select_categories(items: Sequence[SuiteItem], names: Sequence[str], limit: int | None) -> list[SuiteItem]:
    """The first `limit` items of each of the named categories; all of them without names.

    Raises:
        UsageError: a category that no item has.
    """
    known = list(dict.fromkeys(item.category for item in items))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"no item is of the category {unknown[0]!r}; known are {', '.join(known[:20])}")
    wanted = list(names) or known
    by_category = {name: [item for item in items if item.category == name] for name in wanted}
    return [item for group in by_category.values() for item in group[:limit]]


def _parse(line: str, where: str, folder: Path | None) -> SuiteItem:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where} is not JSON: {one_line(error)}") from error
    turns = row.get("turns") if isinstance(row, dict) else None
    is_valid = isinstance(turns, list) and bool(turns) and all(isinstance(turn, str) for turn in turns)
    if turns is None or not is_valid or "id" not in row:
        raise UsageError(f"{where}: an item is an object with an id and turns, a list of questions")
    texts = {key: str(row.get(key) or "") for key in ("category", "topic")}
    item = SuiteItem(str(row["id"]), tuple(turns), texts["category"], texts["topic"])
    name = row.get("image")
    if folder is None or not name:
        return item
    found = next((path for path in (folder / name, folder / "images" / name) if path.is_file()), None)
    if found is None:
        return replace(item, problem=f"no image {name} in {folder} or its images/")
    return replace(item, images=found)
