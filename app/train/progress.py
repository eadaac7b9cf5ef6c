"""Progress of a long step: a bar on a terminal, else a line every so often; both on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType

from mmspec.app.caption.progress import print_stderr

LINE_EVERY_S = 30.0
"""Seconds between lines where standard error is no terminal."""
NUM_METRICS = 3
"""Metrics per line."""


class ProgressReporter:
    """Reports how much of a known total is done.

    Attributes:
        done: units so far, those of an earlier run included.
    """

    def __init__(
        self, name: str, total: int, unit: str, *, show_bar: bool | None = None, is_silent: bool = False
    ) -> None:
        """
        Args:
            name: of the step, first in every line.
            show_bar: True for a bar, False for nothing, None for a bar on a terminal and lines elsewhere.
            is_silent: report nothing (processes other than the first).
        """
        from tqdm import tqdm

        self.name, self.total, self.unit = name, total, unit
        self.done = self.num_resumed = 0
        is_terminal = sys.stderr.isatty()
        has_bar = (is_terminal if show_bar is None else show_bar) and not is_silent
        self._has_lines = show_bar is None and not is_terminal and not is_silent
        self._bar = tqdm(total=total, desc=name, unit=unit, disable=not has_bar, file=sys.stderr)
        self._start_time = self._last_line = time.monotonic()

    def resume(self, count: int) -> None:
        """Count units of an earlier run, which do not count for the speed of this one."""
        self.num_resumed += count
        self.done += count
        self._bar.update(count)

    def update(self, count: int = 1, metrics: Mapping[str, float] | None = None) -> None:
        """Count units; the first of `metrics` are printed beside them."""
        self.done += count
        formatted = {name: f"{value:.3f}" for name, value in list((metrics or {}).items())[:NUM_METRICS]}
        if formatted:
            self._bar.set_postfix(formatted, refresh=False)
        self._bar.update(count)
        now = time.monotonic()
        if self._has_lines and now - self._last_line >= LINE_EVERY_S:
            self._last_line = now
            print_stderr(self._line(now - self._start_time, formatted))

    def _line(self, seconds: float, formatted: Mapping[str, str]) -> str:
        rate = (self.done - self.num_resumed) / max(seconds, 1e-9)
        cells = [f"mmspec: {self.name}: {self.done} of {self.total} {self.unit}s"]
        cells += [f"{name} {value}" for name, value in formatted.items()]
        cells.append(f"{rate:.2f} {self.unit}s/s")
        if rate and self.done < self.total:
            cells.append(f"about {_format_seconds((self.total - self.done) / rate)} left")
        return ", ".join(cells)

    def __enter__(self) -> ProgressReporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.close()
        if self._has_lines and kind is None and self.done > self.num_resumed:
            seconds = time.monotonic() - self._start_time
            print_stderr(f"mmspec: {self.name}: {self.done} of {self.total} {self.unit}s, {_format_seconds(seconds)}")


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
