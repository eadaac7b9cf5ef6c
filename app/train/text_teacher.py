"""A language model as the target of `mmspec train`: its requests, and its answers to them.

The requests are the lines of text files, or written by the model itself: behind the beginning of a user's turn in its
chat template it continues with a question (Magpie, arXiv 2406.08464).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from mmspec.app.caption.progress import print_stderr
from mmspec.app.errors import UsageError, one_line
from mmspec.app.io.jsonl import replace_file
from mmspec.app.io.text import decode_text, find_fault
from mmspec.app.modeling.text import TextCaptioner, chat_text
from mmspec.app.train.data import Teacher
from mmspec.app.train.datasets import Request, StandIns

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("mmspec")

REQUESTS = "requests.json"
"""Requests that the target has written, in the folder of the run."""
QUESTION_TOKENS = 32
"""Largest length of such a request."""
_MARK = "<<question>>"


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


def write_questions(
    model: PreTrainedModel, tokenizer: Any, folder: Path, count: int, batch_size: int, seed: int
) -> list[str]:
    """Requests that the model writes itself, sampled at temperature 1; those in the folder are read, not written again.

    Raises:
        UsageError: the tokenizer has no chat template, in which a user's turn could begin.
    """
    file = folder / REQUESTS
    questions: list[str] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    if len(questions) >= count:
        return questions[:count]
    if tokenizer.chat_template is None:
        raise UsageError(
            "--target has no chat template, so that it cannot write requests itself: pass --data text files"
        )
    prefix = chat_text(tokenizer, _MARK).partition(_MARK)[0]
    inputs = tokenizer([prefix] * batch_size, add_special_tokens=False, return_tensors="pt").to(model.device)
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed + len(questions))
    while len(questions) < count:
        outputs = model.generate(
            **inputs, max_new_tokens=QUESTION_TOKENS, do_sample=True, temperature=1.0, top_p=0.95, top_k=0
        )
        texts = tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        new = (" ".join(text.split()) for text in texts)
        questions = list(dict.fromkeys([*questions, *(text for text in new if len(text) > 8)]))
        replace_file(file, json.dumps(questions, indent=0).encode())
        logger.info("mmspec: %d of %d requests written", len(questions), count)
    return questions[:count]
