"""Data of the plots, as data frames for Gradio's native plots. Needs pandas, which Gradio depends on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmspec.app.ui.learning import UNTRAINED_DRAFTER, moving_means
from mmspec.app.ui.race import lane_title
from mmspec.app.ui.report import AnswerTrace, Report

if TYPE_CHECKING:
    import pandas as pd

    from mmspec.app.ui.learning import LearningRun

ROLLING_WINDOW = 5
"""Rounds of the moving mean."""
LANE_COLORS = ("#8a919c", "#2f9e52", "#3b82f6", "#d97706", "#a855f7", "#db2777")
"""Colours of the lanes, plain `generate` first; legible on light and dark backgrounds."""


MIN_NUMERIC_SPAN = 20
"""Shorter axes of counts are categories: on a numeric one Vega would put ticks at 1.5 and 2.5."""
MIN_COUNT_TOP = 4
"""Smallest top of an axis of counts, for the same reason."""


def count_axis(frame: pd.DataFrame, column: str) -> dict[str, Any]:
    """Options of a native plot, `value` included, so that the x axis of counts from 1 has ticks at whole numbers."""
    last = int(frame[column].max()) if len(frame) else 1
    if last > MIN_NUMERIC_SPAN:
        return {"value": frame, "x_lim": [1, last], "sort": None}
    labels = [str(number) for number in range(1, last + 1)]
    return {"value": frame.assign(**{column: frame[column].astype(str)}), "x_lim": None, "sort": labels}


def value_limits(values: Iterable[float], smallest: float = 0.0, lowest: float = 0.0) -> list[float]:
    """Limits of a y axis from `lowest` to the whole number above all values, at least to `smallest`."""
    return [lowest, max(smallest, math.ceil(max(values, default=0)))]


def lane_colors(report: Report) -> dict[str, str]:
    """{title of a lane: colour}."""
    titles = [lane_title(trace.drafter) for trace in (report.plain, *report.lanes)]
    return dict(zip(titles, LANE_COLORS, strict=False))


def round_lengths(report: Report) -> pd.DataFrame:
    """Tokens per forward over the rounds of all lanes: a moving mean over `ROLLING_WINDOW` rounds."""
    import pandas as pd

    rows = []
    for trace in (report.plain, *report.lanes):
        lengths = trace.round_lengths
        for number in range(1, len(lengths) + 1):
            window = lengths[max(0, number - ROLLING_WINDOW) : number]
            rows.append((number, sum(window) / len(window), lane_title(trace.drafter)))
    return pd.DataFrame(rows, columns=["forward", "tokens per forward", "lane"])


def length_histogram(report: Report) -> pd.DataFrame:
    """How many forwards of the first lane emitted how many tokens."""
    import pandas as pd

    counts = {int(size): count for size, count in report.metrics["stats"]["accept_length_hist"].items()}
    sizes = range(1, max(counts, default=0) + 1)
    return pd.DataFrame([(str(size), counts.get(size, 0)) for size in sizes], columns=["tokens", "forwards"])


def phase_times(report: Report) -> pd.DataFrame:
    """Milliseconds of each phase of the first lane."""
    import pandas as pd

    stats = report.metrics["stats"]
    phases = {
        "vision": report.metrics["vision_s"],
        "prefill": stats["prefill_s"],
        "draft": stats["draft_s"],
        "verify": stats["score_s"],
        "other": stats["overhead_s"],
    }
    rows = [(name, round(1000 * seconds, 1)) for name, seconds in phases.items()]
    return pd.DataFrame(rows, columns=["phase", "ms"])


def describe_lengths(report: Report) -> str:
    """The plot of `round_lengths` in a sentence, for those who cannot see it."""
    parts = [f"{lane_title(trace.drafter)} {_mean(trace):.2f}" for trace in (report.plain, *report.lanes)]
    return f"Mean tokens per forward of the model: {', '.join(parts)}. Moving mean over {ROLLING_WINDOW} forwards."


def _mean(trace: AnswerTrace) -> float:
    return sum(trace.round_lengths) / len(trace.round_lengths) if trace.round_lengths else 1.0


def caption_curve(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Tokens per forward of each captioned file in the order of the job, and their mean over the last eight."""
    import pandas as pd

    taus = [float(row["tau"]) for row in rows if not row["error"]]
    points = []
    for number, tau in enumerate(taus, 1):
        window = taus[max(0, number - 8) : number]
        points += [(number, tau, "each file"), (number, sum(window) / len(window), "mean of the last 8")]
    return pd.DataFrame(points, columns=["file", "tokens per forward", "series"])


def learning_curve(run: LearningRun) -> tuple[pd.DataFrame, dict[str, str]]:
    """Moving means of a drafter that learns and of one that does not; {name: colour} of both."""
    import pandas as pd

    names = f"{run.settings.drafter}, learns", f"{UNTRAINED_DRAFTER}, does not learn"
    rows = [
        (number, mean, name)
        for name, points in zip(names, (run.learning.curve, run.baseline), strict=True)
        for number, mean in enumerate(moving_means(points), 1)
    ]
    frame = pd.DataFrame(rows, columns=["picture", "tokens per forward", "drafter"])
    return frame, dict(zip(names, (LANE_COLORS[1], LANE_COLORS[0]), strict=True))
