"""One thread that runs all model work, one job at a time, and signals that end a job early.

Two concurrent runs would distort both timings and share torch's random generator. This module does not know what a job
computes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from transformers.generation.stopping_criteria import MaxTimeCriteria, StoppingCriteriaList

from mmspec.app.errors import UsageError

MAX_QUEUED = 20
"""Jobs that may wait for the device."""


class CancelSignal:
    """Whether a job should end: the deadline of transformers' own criterion, which mmspec evaluates on the host.

    A criterion of our own would be user code, for which the loop builds and compares tensors at every token.
    """

    def __init__(self) -> None:
        self._criterion = MaxTimeCriteria(math.inf, initial_timestamp=0.0)

    def cancel(self) -> None:
        """End the job at its next token."""
        self._criterion.max_time = -math.inf

    @property
    def should_stop(self) -> bool:
        """Whether `cancel` was called."""
        return self._criterion.max_time < 0

    def stopping_criteria(self) -> StoppingCriteriaList:
        """`stopping_criteria` of `generate`: every row ends when the job is cancelled."""
        return StoppingCriteriaList([self._criterion])


@dataclass(eq=False)
class Job:
    """Work in the queue, on the device, or done.

    Attributes:
        work: runs in the worker's thread.
        signal: ends it.
        page: who asked; empty for the app itself, which nobody is told to wait for.
        error: what `work` raised.
    """

    work: Callable[[], None]
    signal: CancelSignal
    page: str = ""
    error: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)


class Worker:
    """The device thread and its queue. The thread is a daemon: a command that ends waits for no model."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []
        self._changed = threading.Condition()
        self._is_open = True
        threading.Thread(target=self._run, name="mmspec-device", daemon=True).start()

    def submit(self, work: Callable[[], None], signal: CancelSignal, page: str = "") -> Job:
        """Run `work` after all jobs before it. A new job of a page ends its earlier ones.

        Raises:
            UsageError: the queue is full.
        """
        job = Job(work, signal, page)
        with self._changed:
            for other in self._jobs:
                if page and other.page == page:
                    other.signal.cancel()
            if sum(not other.signal.should_stop for other in self._jobs) > MAX_QUEUED:
                raise UsageError(f"{MAX_QUEUED} questions are waiting already, which is the limit; try again later.")
            self._jobs.append(job)
            self._changed.notify()
        return job

    def num_ahead(self, job: Job) -> int:
        """How many questions of other pages must end before this job starts."""
        with self._changed:
            before = self._jobs[: self._jobs.index(job)] if job in self._jobs else []
        return sum(other.page not in ("", job.page) and not other.signal.should_stop for other in before)

    @property
    def is_busy(self) -> bool:
        """Whether a job runs or waits."""
        with self._changed:
            return bool(self._jobs)

    def close(self) -> None:
        """End all jobs and start no further one."""
        with self._changed:
            self._is_open = False
            for job in self._jobs:
                job.signal.cancel()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or not self._is_open)
                if not self._is_open:
                    return
                job = self._jobs[0]
            try:
                if not job.signal.should_stop:
                    job.work()
            except Exception as error:
                job.error = error
            finally:
                with self._changed:
                    self._jobs.remove(job)
                job.done.set()
