"""The state of a running demo, and what its routes do. Independent of gradio."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from mmspec.app.errors import UsageError, one_line
from mmspec.app.modeling.captioner import out_of_memory
from mmspec.app.modeling.chat import ChatTurn
from mmspec.app.ui.drafter_table import DrafterTable
from mmspec.app.ui.kept_media import KeptMedia
from mmspec.app.ui.limits import Limits
from mmspec.app.ui.model import COMPRESSORS, DemoModel
from mmspec.app.ui.run import Run, RunSettings
from mmspec.app.ui.samples import SAMPLE_PAIRS, TEXT_QUESTIONS
from mmspec.app.ui.script import build_script
from mmspec.app.ui.uploads import StoredFile, Uploads
from mmspec.app.ui.worker import CancelSignal, Job, Worker

logger = logging.getLogger("mmspec")

POLL_S = 0.06
"""Seconds between two parts of a streamed answer. Each takes the interpreter lock from the thread that decodes."""
MAX_REPORTS = 100
"""Finished answers that are kept for links, reloads and follow-up questions."""
INTERNAL_ERROR = "Internal error; details are in the terminal that runs mmspec demo."
"""What a page says of an unexpected error."""


@dataclass
class Demo:
    """The state of a running demo, and what its routes do.

    Attributes:
        model: answers.
        limits: of questions, files and answers.
        url: of the page, with a slash at the end.
        share_url: of the tunnel; None if there is none.
        worker: runs everything that uses the model.
        reports: {id: answer}, the oldest first; dicts of `Run.as_dict`.
        failure: why the model cannot be used; None if it can.
    """

    model: DemoModel
    limits: Limits = field(default_factory=Limits)
    url: str = ""
    share_url: str | None = None
    worker: Worker = field(default_factory=Worker)
    reports: OrderedDict[str, dict[str, Any]] = field(default_factory=OrderedDict)
    failure: Exception | None = None

    def __post_init__(self) -> None:
        self.uploads = Uploads(self.limits.max_file_mb * 1_000_000)
        self.kept = KeptMedia()
        self._files: dict[str, StoredFile | None] = {}  # of the reports

    def start(self) -> None:
        """Load the model in the worker's thread."""
        self.worker.submit(self._load, CancelSignal())

    def close(self) -> None:
        """End all runs and remove all files."""
        self.worker.close()
        self.uploads.close()

    def wait(self, interrupted: threading.Event) -> None:
        """Wait for an interrupt, or until the model turns out to be unusable.

        Raises:
            UsageError: it cannot be used.
        """
        while not interrupted.wait(0.2):
            if self.failure is not None:
                raise self.failure

    def _load(self) -> None:
        try:
            self.model.load()
            self.limits.load_media(self.uploads.find(SAMPLE_PAIRS[0][0]))  # starts the process that decodes files
        except Exception as error:
            self.failure = error
            raise

    def state(self) -> dict[str, Any]:
        """What a page shows before any question."""
        model = self.model
        pairs = [{"file": file, "question": question} for file, question in SAMPLE_PAIRS]
        return {
            "model": model.name,
            "description": model.description,
            "is_toy": model.is_toy,
            "is_text": model.is_text,
            "phase": model.phase,
            "seconds": round(time.monotonic() - model.phase_since, 1),
            "drafters": model.drafters,
            "compressors": () if model.is_text else COMPRESSORS,
            "samples": [{"question": question} for question in TEXT_QUESTIONS] if model.is_text else pairs,
            "max_question_chars": self.limits.max_question_chars,
            "max_new_tokens": self.limits.max_new_tokens,
            "max_file_mb": self.limits.max_file_mb,
        }

    def parse(self, sent: object) -> Run:
        """The run that a page asks for.

        Raises:
            UsageError: a field is missing, unknown or out of range.
        """
        if not isinstance(sent, dict):
            raise UsageError("The request must be a JSON object.")
        limits, check = self.limits, self.limits.check_number
        question = limits.check_question(sent.get("question"))
        after, before, turns = sent.get("after"), None, list[ChatTurn]()
        if after is not None:
            before = self.reports.get(after) if isinstance(after, str) else None
            if before is None:
                raise UsageError("This conversation is no longer kept; start a new one.")
            turns = [ChatTurn(**turn) for turn in before["turns"]]
            turns.append(ChatTurn(before["question"], "".join(token[0] for token in before["lanes"][0]["tokens"])))
            if len(turns) >= limits.max_turns:
                raise UsageError(f"A conversation has {limits.max_turns} questions at most; start a new one.")
        drafter, compressor = sent.get("drafter", self.model.drafters[0]), sent.get("compressor", "none")
        for kind, name, offered in (
            ("drafter", drafter, self.model.drafters),
            ("compressor", compressor, COMPRESSORS),
        ):
            if name not in offered:
                raise UsageError(f"There is no {kind} {str(name)[:60]!r} here; choose one of {', '.join(offered)}.")
        count = int(check("Max new tokens", sent.get("max_new_tokens", 200), 1, limits.max_new_tokens))
        settings = RunSettings(drafter, compressor, check("Temperature", sent.get("temperature", 0), 0, 5), count)
        if before is not None:
            file = self._files[before["id"]]
        else:
            file = None if self.model.is_text else self.uploads.find(sent.get("file"))
        load = (lambda: None) if file is None else (lambda: limits.load_media(file))
        page = str(sent.get("page") or "")[:64]
        run = Run(self.model, file, load, turns, question, settings, page=page, kept=self.kept)
        run.after = None if before is None else before["id"]
        run.file_id = before["file_id"] if before is not None else None if file is None else str(sent.get("file"))
        return run

    def store(self, run: Run) -> None:
        """Keep the answer of a run."""
        self.reports[run.id] = run.as_dict()
        self._files[run.id] = run.file
        while len(self.reports) > MAX_REPORTS:
            del self._files[self.reports.popitem(last=False)[0]]

    def script(self, report_id: str) -> str:
        """The code that repeats an answer."""
        return build_script(self.reports[report_id], self.model.name, self._files[report_id])

    async def stream(self, run: Run) -> AsyncIterator[bytes]:
        """The events of a run: what is new of its answers, then the whole. A client that leaves ends the run."""
        try:
            job = self.worker.submit(lambda: run.work(lambda: self.store(run)), run.signal, run.page)
        except UsageError as error:
            yield _event({"error": str(error)})
            return
        sent, num_reports = [0, 0], 0
        try:
            while not job.done.is_set():
                yield _event(self._progress(run, job, sent))
                if run.phase == "measuring" and not num_reports and run.id in self.reports:
                    num_reports = 1
                    yield _event({"report": self.reports[run.id]})
                await asyncio.sleep(POLL_S)
            if job.error is not None:
                yield _event({"error": self._describe(job.error)})
            elif run.id in self.reports:
                yield _event({"report": self.reports[run.id]})
            else:
                yield _event({"error": "Stopped."})
        finally:
            run.signal.cancel()

    async def compare(self, run: Run) -> AsyncIterator[bytes]:
        """The events of a comparison of the drafters on a question: how far it is, then the rows."""
        table = DrafterTable(run)
        try:
            job = self.worker.submit(table.work, run.signal, run.page)
        except UsageError as error:
            yield _event({"error": str(error)})
            return
        try:
            while not job.done.is_set():
                yield _event({"done": table.num_done, "of": table.num_calls})
                await asyncio.sleep(POLL_S)
            failed = "Stopped." if job.error is None else self._describe(job.error)
            yield _event({"rows": table.rows} if table.rows else {"error": failed})
        finally:
            run.signal.cancel()

    def _progress(self, run: Run, job: Job, sent: list[int]) -> dict[str, Any]:
        """What is new of a run; `sent` is how many tokens of each lane the page has."""
        message: dict[str, Any] = {"phase": run.phase, "ahead": self.worker.num_ahead(job)}
        if self.model.phase != "ready":
            message |= {"phase": self.model.phase, "seconds": round(time.monotonic() - self.model.phase_since, 1)}
        elif run.phase not in ("waiting", "encoding"):
            message["lanes"] = [
                lane.as_dict(self.model.tokenizer, first) for lane, first in zip(run.lanes, sent, strict=True)
            ]
            sent[:] = [lane["first"] + len(lane["tokens"]) for lane in message["lanes"]]
        return message

    def _describe(self, error: Exception) -> str:
        """An error as one sentence for a visitor; that of an unexpected one tells nothing."""
        if self.failure is not None:
            return "The model cannot be used; the terminal that runs mmspec demo says why."
        if isinstance(error, UsageError):
            return str(error)
        if out_of_memory(error):
            return "Out of memory; ask for fewer tokens, or use a smaller picture."
        logger.error("mmspec: a question failed: %s", one_line(error, 200), exc_info=error)
        return INTERNAL_ERROR


def _event(message: dict[str, Any]) -> bytes:
    """A message of a server-sent event stream."""
    return b"data: " + json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
