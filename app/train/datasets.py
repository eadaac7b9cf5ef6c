"""Requests that a drafter is trained on: images and videos that the user names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mmspec.app.caption.config import MAX_PIXELS
from mmspec.app.caption.option_fields import FRAMES
from mmspec.app.caption.progress import print_stderr
from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.decode import decode_item
from mmspec.app.io.held import Spool
from mmspec.app.io.images import ImageError, Media, Video
from mmspec.app.io.inputs import Inputs
from mmspec.app.io.item import SourceOptions
from mmspec.app.io.text import find_fault
from mmspec.vision.video.decoder_pool import DecoderPool
from mmspec.vision.video.samplers import Uniform


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

    @property
    def digest(self) -> str:
        """Hash of all that is asked."""
        ...

    def reject(self, index: int, error: Exception) -> bool:
        """Leave out a request that the target cannot take.

        Returns:
            Whether another takes its place; False where all are made to be taken.
        """


MAX_NAMED_SKIPS = 8
"""Requests that are left out, each of which is named."""


class StandIns:
    """Requests that cannot be used are counted, and the next one takes the place of each, in every run alike.

    Attributes:
        left_out: their numbers.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.left_out: set[int] = set()

    def find(self, index: int, part: range | None = None) -> int:
        """Which request is in the place of `index`: itself, the next one of a part, or any if the part has none.

        Args:
            part: None for all.

        Raises:
            UsageError: none can be used.
        """
        part = part or range(self.count)
        for number in (*range(index, part.stop), *range(part.start, index), *range(self.count)):
            if number not in self.left_out:
                return number
        raise UsageError(f"--data: none of the {self.count} requests can be used")

    def leave_out(self, number: int, name: str, error: Exception) -> None:
        """Count a request that cannot be used."""
        self.left_out.add(number)
        total = len(self.left_out)
        if total <= MAX_NAMED_SKIPS or total & (total - 1) == 0:  # then each time that it has doubled
            count = f"{total} of {self.count} so far"
            print_stderr(f"mmspec: skipped {name}: {one_line(error)} ({count}; the next one takes its place)")


class FileData:
    """Requests about images and videos that the user names; a list may bring prompts and answers."""

    def __init__(self, paths: Sequence[str], source: SourceOptions | None = None, prompt: str | None = None) -> None:
        """
        Args:
            source: how the paths are read.
            prompt: of rows without their own; None for that of `mmspec caption`.

        Raises:
            UsageError: as `Inputs`.
        """
        inputs = Inputs(paths, source or SourceOptions())
        inputs.check()
        self._spool, self._prompt = Spool(), prompt
        self.items = [self._spool.keep(item) for item in inputs.rows(lambda ident: False)]
        for line in inputs.left_out():
            print_stderr(f"mmspec: {line}")
        self.stand_ins = StandIns(len(self.items))
        self.decoders = DecoderPool()  # starts no process before there is a file to decode

    def __len__(self) -> int:
        return len(self.items)

    @property
    def digest(self) -> str:
        """Hash of the list of files, questions and answers."""
        listed = json.dumps([(str(item.path), item.resolve_prompt(self._prompt), item.answer) for item in self.items])
        return hashlib.sha256(listed.encode()).hexdigest()[:16]

    def __getitem__(self, index: int) -> Request:
        return self.request(index)

    def request(self, index: int, part: range | None = None) -> Request:
        """Request `index` of a part of the data, or what stands in for it (`StandIns`).

        Raises:
            UsageError: none can be read.
        """
        while True:
            number = self.stand_ins.find(index, part)
            item = self.items[number]
            try:
                if (fault := find_fault(item.answer or "")) is not None:
                    raise ImageError("BadText", f"the answer {fault}")
                media = decode_item(item, Uniform(FRAMES), MAX_PIXELS, self.decoders)
            except ImageError as error:
                self.stand_ins.leave_out(number, item.id, error)
            else:
                question = item.resolve_prompt(self._prompt, isinstance(media, Video))
                return Request(media, question, item.answer)

    def reject(self, index: int, error: Exception, part: range | None = None) -> bool:
        """As `RequestDataset`, of a part."""
        number = self.stand_ins.find(index, part)
        self.stand_ins.leave_out(number, self.items[number].id, error)
        return True


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
        return self.data.request(self.indices[index], self.indices)

    def reject(self, index: int, error: Exception) -> bool:
        """As `RequestDataset`."""
        return self.data.reject(self.indices[index], error, self.indices)


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

    @property
    def digest(self) -> str:
        """Hash of the dataset."""
        return self.data.digest

    def reject(self, index: int, error: Exception) -> bool:
        """As `RequestDataset`."""
        return self.data.reject(index % len(self.data), error)


def image_fraction(progress: float) -> float:
    """MSD's schedule: no images in the first half of the training, then a linear rise to all (MSD, section 6).

    Args:
        progress: share of the steps that are done.
    """
    return min(1.0, max(0.0, 2 * progress - 1))
