"""Requests that a drafter is trained on: generated scenes, or images and videos that the user names."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mmspec.app.caption.config import FRAMES, MAX_PIXELS
from mmspec.app.caption.progress import print_stderr
from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.decode import decode_item
from mmspec.app.io.images import ImageError, Media
from mmspec.app.io.inputs import collect_items
from mmspec.vision.video.decoder_pool import DecoderPool
from mmspec.vision.video.samplers import Uniform

SCENES_MIX = {"describe": 0.6, "short": 0.15, "answer": 0.2, "clip": 0.05}
"""Share of each task when the scenes model is the target."""


@dataclass(frozen=True)
class Request:
    """Media and a question; `answer` is None where the target generates it."""

    media: Media
    question: str
    answer: str | None = None


class RequestDataset(Protocol):
    """Requests by index, the same in every run."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Request: ...


class ScenesData:
    """Requests about generated scenes, from a seed on."""

    def __init__(self, count: int, first_seed: int = 10_000_000) -> None:
        self.count, self.first_seed = count, first_seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Request:
        from mmspec.app.scenes.tasks import generate_requests

        rng = random.Random(f"mix {self.first_seed} {index}")
        task = rng.choices(tuple(SCENES_MIX), tuple(SCENES_MIX.values()))[0]
        request = next(generate_requests(task, self.first_seed + 2 * index))
        return Request(request.images if len(request.images) > 1 else request.images[0], request.question)


class FileData:
    """Requests about images and videos that the user names; a manifest may bring prompts and answers.

    Raises:
        UsageError: a path does not exist.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.items = collect_items(paths, Path())
        self.unreadable: set[int] = set()
        self.decoders = DecoderPool()  # starts no process before there is a file to decode

    def __len__(self) -> int:
        return len(self.items)

    @property
    def digest(self) -> str:
        """Hash of the list of files, questions and answers."""
        listed = json.dumps([(str(item.path), item.resolve_prompt(), item.answer) for item in self.items])
        return hashlib.sha256(listed.encode()).hexdigest()[:16]

    def __getitem__(self, index: int) -> Request:
        """Request `index`; one that cannot be read is counted, and the next one takes its place, in every run alike.

        Raises:
            UsageError: none can be read.
        """
        for step in range(len(self.items)):
            number = (index + step) % len(self.items)
            if number in self.unreadable:
                continue
            item = self.items[number]
            try:
                media = decode_item(item, Uniform(FRAMES), MAX_PIXELS, self.decoders)
            except ImageError as error:
                self.unreadable.add(number)
                name = item.file_name or str(item.path)
                count = f"{len(self.unreadable)} of {len(self.items)} so far"
                print_stderr(f"mmspec: skipped {name}: {one_line(error)} ({count}; the next one takes its place)")
                continue
            return Request(media, item.resolve_prompt(), item.answer)
        raise UsageError(f"none of the {len(self.items)} pictures and clips can be read")


class Subset:
    """A range of the requests of a dataset, indexed from 0."""

    def __init__(self, data: FileData, indices: range) -> None:
        self.data, self.indices = data, indices

    @property
    def digest(self) -> str:
        """Hash of the whole dataset."""
        return self.data.digest

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Request:
        return self.data[self.indices[index]]


class TextOnlyAugmented:
    """A dataset followed by the same questions without media: index n + len(data) is request n as text alone."""

    def __init__(self, data: RequestDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return 2 * len(self.data)

    def __getitem__(self, index: int) -> Request:
        if index < len(self.data):
            return self.data[index]
        return Request((), self.data[index - len(self.data)].question)


def image_fraction(progress: float) -> float:
    """MSD's schedule: no images in the first half of the training, then a linear rise to all (MSD, section 6).

    Args:
        progress: share of the steps that are done.
    """
    return min(1.0, max(0.0, 2 * progress - 1))
