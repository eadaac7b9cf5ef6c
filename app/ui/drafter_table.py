"""The drafters that a model can run, on one question, in turns; those that no measurement tells apart are ties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import mmspec
from mmspec.app.ui.lane import AnswerLane
from mmspec.app.ui.run import NOISE, Run
from mmspec.economy.store import unchanged_costs

PASSES, MAX_TOKENS, LANE_S = 3, 64, 1.0
"""Timed passes over all drafters; tokens at most, and seconds of plain `generate` at most, of one call."""


@dataclass
class Row:
    """One drafter, or plain `generate`.

    Attributes:
        choices: the names under which a page offers it; none of plain `generate`.
        rates: tokens per second after the first, of each pass.
        tau: tokens per forward.
        identical: whether the tokens are those of plain `generate`.
    """

    name: str
    choices: list[str]
    rates: list[float] = field(default_factory=list)
    tau: float = 1.0
    identical: bool = True


class DrafterTable:
    """Runs `PASSES` times the start of an answer with each drafter in turn, after one untimed pass.

    Attributes:
        num_done, num_calls: calls of `generate` that have ended, and all; 0 before it is known.
        rows: the result, the fastest first, as plain data.
    """

    def __init__(self, run: Run) -> None:
        """Set up; `run` is a question that is not asked otherwise."""
        self.run = run
        run.settings = replace(run.settings, compressor="none")  # not every drafter takes one
        self.num_done = self.num_calls = 0
        self.rows: list[dict[str, Any]] = []

    def work(self) -> None:
        """Measure, in the worker's thread. A cancelled run leaves no rows.

        Raises:
            UsageError: the picture or the question is refused.
        """
        run, model = self.run, self.run.model
        with unchanged_costs():
            request = run.prepare()
            rows = [Row("plain generate", [])]
            for choice in model.comparable(run.settings.drafter):
                name = model.get_drafter(choice).name
                if (same := next((row for row in rows if row.choices and row.name == name), None)) is not None:
                    same.choices.append(choice)
                else:
                    rows.append(Row(name, [choice]))
            self.num_calls = len(rows) * (1 + PASSES)
            count, expected = min(MAX_TOKENS, run.settings.max_new_tokens), None
            for number in range(1 + PASSES):
                for row in rows:
                    ids = self._measure(request, row, count)
                    if run.signal.should_stop:
                        return
                    expected = ids if expected is None else expected
                    if number == 0 and row is rows[0]:
                        count = max(2, min(len(ids), int(LANE_S * row.rates[0])))
                    row.identical &= ids == expected[: len(ids)] and len(ids) >= min(count, len(expected))
                    self.num_done += 1
            self.rows = ranked(rows)

    def _measure(self, request: dict[str, Any], row: Row, count: int) -> list[int]:
        run, lane = self.run, AnswerLane("drafters")
        if not row.choices:
            with mmspec.disabled(run.model.model):
                ids = run.generate(request, lane, count, streamer=lane.streamer)
            row.rates.append(lane.streamer.tokens_per_s)
            return ids
        ids = run.generate(request, lane, count, mmspec=run.options(row.choices[0]))
        stats = mmspec.stats(run.model.model, last=True)
        row.rates.append(stats.tokens_per_s)
        row.tau = stats.tau
        return ids


def ranked(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as plain data, the fastest first.

    The first pass is not counted. A row is tied with the fastest if it was not slower beyond noise in every pass; so
    are the rows above it.
    """
    order = sorted(rows, key=lambda row: -median(row.rates[1:]))
    best = order[0].rates[1:]
    tied = [any(rate * NOISE >= top for rate, top in zip(row.rates[1:], best, strict=True)) for row in order]
    last_tied = max(index for index, is_tied in enumerate(tied) if is_tied)
    return [
        vars(row) | {"tokens_per_s": median(row.rates[1:]), "is_tied": index <= last_tied}
        for index, row in enumerate(order)
    ]
