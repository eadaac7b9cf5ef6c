"""What a running job tells the terminal: a bar with images/s and tau, a closing summary; on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from mmspec.app.io.jsonl import Row


def print_stderr(text: str) -> None:
    """A line for people, kept out of standard output."""
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
        """Tokens per forward of a row, the first token (which the prompt's forward gives) left out."""
        return self.later_tokens / self.rounds if self.rounds else 1.0


class Progress:
    """The bar, and the tally behind it."""

    def __init__(self, total: int, done: int, show: bool | None, label: str) -> None:
        """`show` None: only if standard error is a terminal."""
        from tqdm import tqdm

        self.totals, self._began = Totals(), time.perf_counter()
        hide = not (sys.stderr.isatty() if show is None else show)
        self._bar = tqdm(total=total, initial=done, disable=hide, desc=label, unit="image", file=sys.stderr)

    def add(self, rows: Iterable[Row]) -> None:
        """Count rows and move the bar."""
        rows = list(rows)
        for row in rows:
            self.totals.add(row)
        rate = (self.totals.ok + self.totals.failed) / max(1e-9, time.perf_counter() - self._began)
        self._bar.set_postfix_str(f"{rate:.1f} images/s, tau {self.totals.tau:.2f}", refresh=False)
        self._bar.update(len(rows))

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.close()

    def summary(self, skipped: int, acceptance: float | None) -> list[str]:
        """The closing lines: what was done, how fast, what failed."""
        tally, wall = self.totals, time.perf_counter() - self._began
        lines = [f"{tally.ok} captioned, {tally.failed} failed, {skipped} skipped (done before)"]
        if tally.ok:
            kept = "" if acceptance is None else f", {acceptance:.0%} of the drafted tokens kept"
            images, tokens = (tally.ok + tally.failed) / wall, tally.tokens / max(1e-9, tally.seconds)
            lines.append(f"{images:.2f} images/s, {tokens:.1f} tokens/s, tau {tally.tau:.2f}{kept}")
        if tally.failed:
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(tally.kinds.items()))
            lines.append(f"failed: {kinds}; the first: {tally.first_error}")
        return lines


def comparison_lines(check: Any, half: bool) -> list[str]:
    """What comparing with plain `generate` found, as `Captioner.check` has it."""
    if check is None or not check.rows:
        return []
    lines = [f"identical: {check.identical}/{check.rows}"]
    if check.patched_s:
        lines[0] += f" to plain generate, which took {check.plain_s / check.patched_s:.2f} times as long"
    if check.first_difference:
        lines.append(f"first difference {check.first_difference}")
    if half and check.identical < check.rows:
        lines.append("(in half precision near-ties may round either way, so this is reported and is no error)")
    return lines


__all__ = ["Progress", "Totals", "comparison_lines", "print_stderr"]
