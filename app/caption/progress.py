"""Progress of long steps on standard error: a bar, or a line every half minute; the summary of a caption job."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from types import TracebackType
from typing import TYPE_CHECKING, Self

from mmspec.app.io.jsonl import Row
from mmspec.messages import printable

if TYPE_CHECKING:
    from mmspec.app.caption.config import ProcessInfo
    from mmspec.app.io.output import JobSummary, Output
    from mmspec.app.modeling.captioner import ComparisonTotals

LINE_SECONDS = 30.0
"""Between two lines of progress where standard error is no terminal."""


def print_stderr(text: str) -> None:
    """Print one line to standard error, above a bar if there is one; standard output is for rows."""
    text = printable(text)
    if (bars := sys.modules.get("tqdm")) is not None:
        bars.tqdm.write(text, file=sys.stderr)
        sys.stderr.flush()
    else:
        print(text, file=sys.stderr, flush=True)


class Progress:
    """How much of a long step is done: a bar on a terminal, else a line every `LINE_SECONDS`; both on standard error.

    While there is a bar, whatever else is written to standard error (warnings, log records) is put above it.

    Attributes:
        done: units so far, those of an earlier run included.
        has_summary: the caller says how it ended.
    """

    has_summary = False

    def __init__(self, label: str, total: int | None, unit: str, *, done: int = 0, show: bool | None = None) -> None:
        """`show` None: a bar if standard error is a terminal, else lines; True: a bar; False: nothing."""
        from tqdm import tqdm

        self._label, self._total, self._unit, self._state = label, total, unit, ""
        self.done = self._num_before = done
        self._start_time = time.perf_counter()
        self._has_bar = sys.stderr.isatty() if show is None else show
        self._prints_lines = show is None and not self._has_bar
        self._bar = tqdm(
            total=total, initial=done, disable=not self._has_bar, desc=label, unit=unit, file=sys.stderr,
            smoothing=0.1, dynamic_ncols=True,
        )  # fmt: skip
        self._ended, self._stack = threading.Event(), ExitStack()

    def update(self, count: int = 1, state: str = "") -> None:
        """Count units; `state` is what else is to be said of the step."""
        self.done, self._state = self.done + count, state
        self._bar.set_postfix_str(state, refresh=False)
        self._bar.update(count)

    def resume(self, count: int) -> None:
        """Count units of an earlier run, which do not count for the speed of this one."""
        self.done, self._num_before = self.done + count, self._num_before + count
        self._bar.update(count)

    def line(self) -> str:
        """The state in one line."""
        new = self.done - self._num_before
        rate = new / max(1e-9, time.perf_counter() - self._start_time)
        of = "" if self._total is None else f" of {self._total}"
        parts = [f"{self._label}: {self.done}{of} {self._unit}s", f"{rate:.2f} {self._unit}s/s", self._state]
        if self._total is not None and new and self.done < self._total:
            parts.append(f"{format_duration((self._total - self.done) / rate)} left")
        return f"mmspec: {', '.join(filter(None, parts))}"

    def _print_lines(self) -> None:
        while not self._ended.wait(LINE_SECONDS):
            print_stderr(self.line())

    def __enter__(self) -> Self:
        if self._has_bar:
            self._stack.enter_context(write_above_bars())
        if self._prints_lines:
            thread = threading.Thread(target=self._print_lines, name="mmspec-progress", daemon=True)
            thread.start()
            self._stack.callback(thread.join)
            self._stack.callback(self._ended.set)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()
        self._bar.close()
        if self._prints_lines and not self.has_summary and kind is None and self.done > self._num_before:
            print_stderr(self.line())


class CaptionProgress(Progress):
    """The same of a caption job: also tau and errors."""

    has_summary = True

    def __init__(self, total: int | None, done: int, show: bool | None, label: str) -> None:
        super().__init__(label, total, "image", done=done, show=show)
        self._captioned = self._tokens = self._rounds = 0
        self._seconds = 0.0
        self._kinds: Counter[str] = Counter()  # of errors
        self._first_error = ""

    @property
    def tau(self) -> float:
        """Tokens per forward pass of a row, without the first token, which the prompt's forward gives."""
        return (self._tokens - self._captioned) / self._rounds if self._rounds else 1.0

    def add(self, rows: Iterable[Row]) -> None:
        """Count rows and move the bar."""
        rows = list(rows)
        for row in rows:
            if row["error"]:
                self._kinds[row["error"]["type"]] += 1
                self._first_error = self._first_error or f"{row['file_name']}: {row['error']['message']}"
            else:
                self._captioned += 1
                self._tokens += max(1, row["n_new_tokens"])
                self._rounds += row["n_rounds"]
                self._seconds += row["seconds"]
        self.update(len(rows), f"tau {self.tau:.2f}, {self._kinds.total()} errors")

    def summary(self, skipped: int, acceptance: float | None) -> list[str]:
        """The lines of the summary: rows, speed, failures."""
        failed, wall = self._kinds.total(), time.perf_counter() - self._start_time
        lines = [f"{self._captioned} captioned, {failed} failed, {skipped} skipped (already done)"]
        if self._captioned:
            accepted = ", nothing drafted" if acceptance is None else f", {acceptance:.0%} of the draft tokens accepted"
            images, tokens = (self._captioned + failed) / wall, self._tokens / max(1e-9, self._seconds)
            lines.append(f"{images:.2f} images/s, {tokens:.1f} tokens/s, tau {self.tau:.2f}{accepted}")
        if failed:
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self._kinds.items()))
            lines.append(f"failed: {kinds}; the first: {self._first_error}")
        return lines


@contextmanager
def write_above_bars() -> Iterator[None]:
    """Within the context, what is written to standard error is put above the bars of tqdm."""
    from tqdm.contrib import DummyTqdmFile
    from tqdm.contrib.logging import logging_redirect_tqdm

    known = [logging.getLogger(name) for name in logging.root.manager.loggerDict]
    loggers = [logger for logger in known if any(isinstance(one, logging.StreamHandler) for one in logger.handlers)]
    loggers += [logging.root] if logging.root.handlers else []
    with logging_redirect_tqdm(loggers), redirect_stderr(DummyTqdmFile(sys.stderr)):
        yield


def format_duration(seconds: float) -> str:
    """As in "45 s", "12 min" and "3 h 20 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def file_line(summary: JobSummary | None, out: str, output: Output, process: ProcessInfo) -> str:
    """What is in the file at the end; None if the job is not complete."""
    if summary is None and process.world_size > 1:
        return (
            f"rows of process {process.rank + 1} of {process.world_size} in {output.rank_path}, until "
            "the other processes have run (for one process, unset RANK and WORLD_SIZE)"
        )
    if summary is None:
        return f"rows in {out}"
    return f"{summary.num_rows} rows in {out}, {summary.num_errors} of them errors"


def comparison_lines(totals: ComparisonTotals | None, half_precision: bool) -> list[str]:
    """The lines about `ComparisonTotals`: how many rows equal plain `generate`, and the first difference."""
    if totals is None or not totals.rows:
        return []
    lines = [f"identical: {totals.identical}/{totals.rows}"]
    if totals.patched_s:
        speedup = totals.plain_s / totals.patched_s
        rest = "" if totals.is_warm else " without the first batch"
        seconds = f"{totals.plain_s:.1f} s and {totals.patched_s:.1f} s in generate{rest}"
        lines[0] += f" to plain generate; {speedup:.2f} times its speed ({seconds})"
    else:
        lines[0] += " to plain generate; one batch is too little to measure a speed-up"
    if totals.first_difference:
        lines.append(f"first difference {totals.first_difference}")
    if half_precision and totals.identical < totals.rows:
        lines.append("(in half precision near-ties may round either way, so this is reported and is no error)")
    return lines
