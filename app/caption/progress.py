"""Progress of a caption job on standard error: a bar with images/s and tau, and a summary."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from mmspec.app.io.jsonl import Row

if TYPE_CHECKING:
    from mmspec.app.modeling.captioner import ComparisonTotals


def print_stderr(text: str) -> None:
    """Print one line to standard error; standard output is for rows."""
    print(text, file=sys.stderr, flush=True)


@dataclass
class Totals:
    """Sums over the rows written in this run."""

    ok: int = 0
    failed: int = 0
    tokens: int = 0
    later_tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    kinds: dict[str, int] = field(default_factory=dict)
    first_error: str = ""

    def add(self, row: Row) -> None:
        """Count one row."""
        if row["error"]:
            self.failed += 1
            self.kinds[row["error"]["type"]] = self.kinds.get(row["error"]["type"], 0) + 1
            self.first_error = self.first_error or f"{row['file_name']}: {row['error']['message']}"
            return
        self.ok += 1
        self.tokens += row["n_new_tokens"]
        self.later_tokens += max(0, row["n_new_tokens"] - 1)
        self.rounds += row["n_rounds"]
        self.seconds += row["seconds"]

    @property
    def tau(self) -> float:
        """Tokens per forward pass of a row, without the first token, which the prompt's forward gives."""
        return self.later_tokens / self.rounds if self.rounds else 1.0


class CaptionProgress:
    """The progress bar and its totals."""

    def __init__(self, total: int | None, done: int, show: bool | None, label: str) -> None:
        """`show` None: only if standard error is a terminal."""
        from tqdm import tqdm

        self.totals, self._start_time = Totals(), time.perf_counter()
        hide = not (sys.stderr.isatty() if show is None else show)
        self._bar = tqdm(total=total, initial=done, disable=hide, desc=label, unit="image", file=sys.stderr)

    def add(self, rows: Iterable[Row]) -> None:
        """Count rows and move the bar."""
        rows = list(rows)
        for row in rows:
            self.totals.add(row)
        rate = (self.totals.ok + self.totals.failed) / max(1e-9, time.perf_counter() - self._start_time)
        self._bar.set_postfix_str(f"{rate:.1f} images/s, tau {self.totals.tau:.2f}", refresh=False)
        self._bar.update(len(rows))

    def __enter__(self) -> CaptionProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.close()

    def summary(self, skipped: int, acceptance: float | None) -> list[str]:
        """The lines of the summary: rows, speed, failures."""
        totals, wall = self.totals, time.perf_counter() - self._start_time
        lines = [f"{totals.ok} captioned, {totals.failed} failed, {skipped} skipped (already done)"]
        if totals.ok:
            accepted = ", nothing drafted" if acceptance is None else f", {acceptance:.0%} of the draft tokens accepted"
            images, tokens = (totals.ok + totals.failed) / wall, totals.tokens / max(1e-9, totals.seconds)
            lines.append(f"{images:.2f} images/s, {tokens:.1f} tokens/s, tau {totals.tau:.2f}{accepted}")
        if totals.failed:
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(totals.kinds.items()))
            lines.append(f"failed: {kinds}; the first: {totals.first_error}")
        return lines


def comparison_lines(totals: ComparisonTotals | None, half_precision: bool) -> list[str]:
    """The lines about `ComparisonTotals`: how many rows equal plain `generate`, and the first difference."""
    if totals is None or not totals.rows:
        return []
    lines = [f"identical: {totals.identical}/{totals.rows}"]
    if totals.patched_s:
        lines[0] += f" to plain generate, which took {totals.plain_s / totals.patched_s:.2f} times the time"
    if totals.first_difference:
        lines.append(f"first difference {totals.first_difference}")
    if half_precision and totals.identical < totals.rows:
        lines.append("(in half precision near-ties may round either way, so this is reported and is no error)")
    return lines


__all__ = ["CaptionProgress", "Totals", "comparison_lines", "print_stderr"]
