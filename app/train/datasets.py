"""Requests that a drafter is trained on: images and videos that the user names, or the questions of text files."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmspec.app.caption.config import MAX_PIXELS
from mmspec.app.caption.option_fields import FRAMES
from mmspec.app.caption.progress import print_stderr
from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.decode import decode_item
from mmspec.app.io.held import Spool
from mmspec.app.io.images import ImageError, Media, Video
from mmspec.app.io.inputs import Inputs
from mmspec.app.io.item import SourceOptions
from mmspec.app.io.text import decode_text, find_fault
from mmspec.vision.video.decoder_pool import DecoderPool
from mmspec.vision.video.samplers import Uniform

MAX_NAMED_SKIPS = 8
"""Requests that are left out, each of which is named."""


@dataclass(frozen=True)
class Request:
    """Media and a question; `answer` is None where the target generates it."""

    media: Media
    question: str
    answer: str | None = None


class Requests:
    """Requests by index. One that cannot be used is counted, and the next one takes its place, in every run alike.

    Attributes:
        digest: hash of all that is asked.
        left_out: numbers of the requests that cannot be used.
        also_text: as many follow, the same questions without media.
    """

    also_text = False

    def __init__(self, asked: Sequence[Any]) -> None:
        """`asked` is what the digest is of, for each request."""
        self.digest = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
        self.left_out: set[int] = set()
        self._all = self._part = range(len(asked))

    def part(self, numbers: range, also_text: bool = False) -> Requests:
        """Some of the requests, indexed from 0; they stand in for each other."""
        part = copy.copy(self)
        part._part, part.also_text = numbers, also_text
        return part

    def __len__(self) -> int:
        return len(self._part) * (2 if self.also_text else 1)

    def __getitem__(self, index: int) -> Request:
        """Request `index`, or what stands in for it.

        Raises:
            UsageError: none can be used.
        """
        while True:
            number = self._find(index)
            try:
                request = self.load(number)
            except ImageError as error:
                self._leave_out(number, error)
            else:
                return request if index < len(self._part) else Request((), request.question)

    def reject(self, index: int, error: Exception) -> None:
        """Leave out a request that the target cannot take."""
        self._leave_out(self._find(index), error)

    def load(self, number: int) -> Request:
        """One of all requests; an ImageError: it cannot be used."""
        raise NotImplementedError

    def name(self, number: int) -> str:
        """Its name in messages."""
        raise NotImplementedError

    def _find(self, index: int) -> int:
        """Which request is in the place of `index`: itself, the next one of the part, or any if the part has none."""
        first, part = self._part[index % len(self._part)], self._part
        for number in (*range(first, part.stop), *range(part.start, first), *self._all):
            if number not in self.left_out:
                return number
        raise UsageError(f"--data: none of the {len(self._all)} requests can be used")

    def _leave_out(self, number: int, error: Exception) -> None:
        self.left_out.add(number)
        total = len(self.left_out)
        if total <= MAX_NAMED_SKIPS or total & (total - 1) == 0:  # then each time that it has doubled
            count = f"{total} of {len(self._all)} so far"
            print_stderr(
                f"mmspec: skipped {self.name(number)}: {one_line(error)} ({count}; the next one takes its place)"
            )


class FileData(Requests):
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
        self.decoders = DecoderPool()  # starts no process before there is a file to decode
        super().__init__([(str(item.path), item.resolve_prompt(prompt), item.answer) for item in self.items])

    def load(self, number: int) -> Request:
        item = self.items[number]
        if (fault := find_fault(item.answer or "")) is not None:
            raise ImageError("BadText", f"the answer {fault}")
        media = decode_item(item, Uniform(FRAMES), MAX_PIXELS, self.decoders)
        return Request(media, item.resolve_prompt(self._prompt, isinstance(media, Video)), item.answer)

    def name(self, number: int) -> str:
        return self.items[number].id


class TextRequests(Requests):
    """Questions without images."""

    def __init__(self, questions: Sequence[str]) -> None:
        self.questions = list(questions)
        super().__init__(self.questions)

    def load(self, number: int) -> Request:
        return Request([], self.questions[number])

    def name(self, number: int) -> str:
        return repr(self.questions[number][:40])


def read_questions(paths: Sequence[str]) -> list[str]:
    """The lines of text files that are not empty; of .jsonl files the "prompt" of each row.

    Raises:
        UsageError: a file cannot be read, or there is no line in any of them.
    """
    questions: list[str] = []
    for path in paths:
        try:
            text = decode_text(Path(path).read_bytes())
        except (OSError, ValueError) as error:
            raise UsageError(
                f"--data {path}: {one_line(error)}; for a language model --data names text files, a request per line"
            ) from error
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if path.endswith(".jsonl"):
            lines = [_prompt_of(path, number, line) for number, line in enumerate(lines, 1)]
        good = [line for line in lines if find_fault(line) is None]
        if len(good) < len(lines):
            first = next(line for line in lines if find_fault(line) is not None)
            print_stderr(f"mmspec: {path}: skipped {len(lines) - len(good)} requests; the first {find_fault(first)}")
        questions += good
    if not questions:
        raise UsageError("--data: the text files are empty; they hold a request per line")
    return questions


def _prompt_of(path: str, number: int, line: str) -> str:
    """The "prompt" of a row."""
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, TypeError, KeyError, RecursionError):
        prompt = None
    if not isinstance(prompt, str):
        raise UsageError(f'--data {path}, row {number}: no object with a "prompt" of text; got {line[:60]!r}')
    return prompt


def image_fraction(progress: float) -> float:
    """MSD's schedule: no images in the first half of the training, then a linear rise to all (MSD, section 6).

    Args:
        progress: share of the steps that are done.
    """
    return min(1.0, max(0.0, 2 * progress - 1))
