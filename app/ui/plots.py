"""The charts of the pages, from reports, rows of a batch and learning runs. Independent of gradio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmspec.app.ui.charts import Line, bar_chart, line_chart
from mmspec.app.ui.learning import CALLS_PER_MEAN, UNTRAINED_DRAFTER, moving_means
from mmspec.app.ui.race import lane_title
from mmspec.app.ui.report import AnswerTrace, Report

if TYPE_CHECKING:
    from mmspec.app.ui.learning import LearningRun

ROLLING_WINDOW = 5
"""Rounds of the moving mean."""
FILES_PER_MEAN = 8
LANE_COLORS = ("#8a919c", "#2f9e52", "#3b82f6", "#d97706", "#a855f7", "#db2777")
"""Colours of the lanes, plain `generate` first; legible on light and dark backgrounds."""
TOKENS_PER_FORWARD = "tokens per forward"


def lengths_chart(report: Report) -> str:
    """Tokens per forward over the rounds of all lanes: a moving mean over `ROLLING_WINDOW` rounds."""
    lines = [
        Line(lane_title(trace.drafter), color, _rolling(trace.round_lengths, ROLLING_WINDOW))
        for trace, color in zip((report.plain, *report.lanes), LANE_COLORS, strict=False)
        if trace.round_lengths
    ]
    if not lines:
        return ""
    title = "Tokens per forward over the answer"
    axes = ("forward of the model", TOKENS_PER_FORWARD)
    return line_chart(title, axes, lines, describe_lengths(report), lowest=1, top=2)


def describe_lengths(report: Report) -> str:
    """The chart of the lengths in a sentence."""
    parts = [f"{lane_title(trace.drafter)} {_mean(trace):.2f}" for trace in (report.plain, *report.lanes)]
    return f"Mean tokens per forward of the model: {', '.join(parts)}. Moving mean over {ROLLING_WINDOW} forwards."


def length_histogram(report: Report) -> str:
    """How many forwards of the first lane emitted how many tokens."""
    counts = {int(size): count for size, count in report.metrics["stats"]["accept_length_hist"].items()}
    bars = [(str(size), counts.get(size, 0)) for size in range(1, max(counts, default=0) + 1)]
    title, axes = "How many tokens one forward gives", ("tokens of one forward", "forwards")
    return bar_chart(title, axes, bars, LANE_COLORS[1], _describe("Forwards by their tokens", bars))


def phase_times(report: Report) -> str:
    """Milliseconds of each phase of the first lane."""
    stats = report.metrics["stats"]
    phases = {
        "vision": report.metrics["vision_s"],
        "prefill": stats["prefill_s"],
        "draft": stats["draft_s"],
        "verify": stats["score_s"],
        "other": stats["overhead_s"],
    }
    bars = [(name, round(1000 * seconds, 1)) for name, seconds in phases.items()]
    title, axes = "Where the time of mmspec goes", ("phase of the mmspec call", "milliseconds")
    return bar_chart(title, axes, bars, LANE_COLORS[1], _describe("Milliseconds of each phase", bars))


def caption_curve(rows: Sequence[Mapping[str, Any]]) -> str:
    """Tokens per forward of each captioned file in the order of the job, and their mean; empty below three files."""
    taus = [float(row["tau"]) for row in rows if not row["error"]]
    if len(taus) < 3:
        return ""
    lines = [
        Line("each file", LANE_COLORS[0], taus),
        Line(f"mean of the last {FILES_PER_MEAN}", LANE_COLORS[1], _rolling(taus, FILES_PER_MEAN)),
    ]
    label = f"Tokens per forward of {len(taus)} files, and their moving mean. The table below gives the numbers."
    axes = ("file, in the order of the job", TOKENS_PER_FORWARD)
    return line_chart("Tokens per forward as the job runs", axes, lines, label)


def learning_curve(run: LearningRun) -> str:
    """Moving means of a drafter that learns and of one that does not; empty below three pictures."""
    names = f"{run.settings.drafter}, learns", f"{UNTRAINED_DRAFTER}, does not learn"
    means = [moving_means(points) for points in (run.learning.curve, run.baseline)]
    if min(map(len, means)) < 3:
        return ""
    colors = LANE_COLORS[1], LANE_COLORS[0]
    lines = [Line(name, color, values) for name, color, values in zip(names, colors, means, strict=True)]
    label = f"Tokens per forward at the last picture: {names[0]} {means[0][-1]:.2f}; {names[1]} {means[1][-1]:.2f}."
    axes = (f"picture (means of the last {CALLS_PER_MEAN})", TOKENS_PER_FORWARD)
    return line_chart("Tokens per forward as it learns", axes, lines, label, top=2)


def _describe(title: str, bars: Sequence[tuple[str, float]]) -> str:
    return f"{title}: {', '.join(f'{name}: {value:g}' for name, value in bars)}."


def _rolling(values: Sequence[float], window: int) -> list[float]:
    """Moving means."""
    parts = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in parts]


def _mean(trace: AnswerTrace) -> float:
    return sum(trace.round_lengths) / len(trace.round_lengths) if trace.round_lengths else 1.0
