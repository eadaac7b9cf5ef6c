"""A language model as the target of `mmspec train`: its requests, and its answers to them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from mmspec.app.caption.progress import print_stderr
from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.text import decode_text, find_fault
from mmspec.app.modeling.text import TextCaptioner
from mmspec.app.train.data import Teacher
from mmspec.app.train.datasets import Request, StandIns

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class TextRequests:
    """Questions without images. A `RequestDataset`."""

    def __init__(self, questions: Sequence[str]) -> None:
        self.questions = list(questions)
        self._stand_ins = StandIns(len(self.questions))

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, index: int) -> Request:
        return Request([], self.questions[self._stand_ins.find(index)])

    def reject(self, index: int, error: Exception) -> bool:
        """As `RequestDataset`."""
        number = self._stand_ins.find(index)
        self._stand_ins.leave_out(number, repr(self.questions[number][:40]), error)
        return True

    @property
    def digest(self) -> str:
        """Hash of the questions."""
        return hashlib.sha256(json.dumps(self.questions).encode()).hexdigest()[:16]


class TextTeacher(Teacher):
    """`Teacher` of a language model."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: TextRequests, cache_bytes: int = 0
    ) -> None:
        processor: Any = SimpleNamespace(tokenizer=tokenizer)
        super().__init__(model, processor, data, cache_bytes)
        processor = tokenizer
        self.captioner = TextCaptioner(model, processor)


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
