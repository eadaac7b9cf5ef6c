"""Line and bar charts as HTML: lines in SVG that stretches, words in the page's own size and colours.

Gradio's native plots write warnings to the console at every drawing (Vega-Lite 6 reads a specification of 5.17, and
counts as categories have no zero), and leave screen readers without a description. Independent of gradio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from mmspec.app.ticks import axis_ticks

MAX_X_LABELS = 8
"""Numbers at the x axis: as many fit on a phone."""


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        name: in the key.
        color: of CSS.
        values: at 1, 2, 3 and so on; not empty.
    """

    name: str
    color: str
    values: Sequence[float]


def line_chart(
    title: str, axes: tuple[str, str], lines: Sequence[Line], label: str, *, lowest: float = 0.0, top: float = 0.0
) -> str:
    """A chart of values over counts from 1.

    Args:
        title: above the chart.
        axes: names of the x and y axis.
        lines: at least one.
        label: the chart in a sentence, for those who cannot see it.
        lowest: start of the y axis.
        top: smallest end of the y axis.
    """
    last = max(len(line.values) for line in lines)
    ticks = _y_ticks(lowest, max(top, *(max(line.values) for line in lines)))
    shapes = _grid(ticks)
    for line in lines:
        points = [
            (_share(number, 1, last), _share(value, ticks[0], ticks[-1])) for number, value in enumerate(line.values, 1)
        ]
        points = points if len(points) > 1 else [(0.0, points[0][1]), (100.0, points[0][1])]
        path = " ".join(f"{x:.2f},{100 - y:.2f}" for x, y in points)
        shapes += f'<polyline class="mm-line" points="{path}" style="stroke:{line.color}"/>'
    step = next(step for step in _steps() if (last - 1) // step < MAX_X_LABELS)
    numbers = [1, *range(step, last + 1, step)] if step > 1 else list(range(1, last + 1))
    x_labels = [(str(number), _share(number, 1, last)) for number in numbers]
    key = "".join(f'<span><i style="background:{line.color}"></i>{escape(line.name)}</span>' for line in lines)
    return _figure(title, axes, shapes, (x_labels, ticks), label, f'<p class="mm-key">{key}</p>')


def bar_chart(title: str, axes: tuple[str, str], bars: Sequence[tuple[str, float]], color: str, label: str) -> str:
    """A chart of one value for each name. `axes` and `label` as in `line_chart`."""
    ticks = _y_ticks(0.0, max((value for _, value in bars), default=0.0))
    width = 100 / max(1, len(bars))
    shapes, x_labels = _grid(ticks), []
    for index, (name, value) in enumerate(bars):
        height = _share(value, 0, ticks[-1])
        x_labels.append((name, (index + 0.5) * width))
        place = (
            f'x="{(index + 0.15) * width:.2f}" y="{100 - height:.2f}" width="{0.7 * width:.2f}" height="{height:.2f}"'
        )
        shapes += f'<rect {place} style="fill:{color}"/>'
    return _figure(title, axes, shapes, (x_labels, ticks), label)


def _figure(
    title: str,
    axes: tuple[str, str],
    shapes: str,
    scales: tuple[Sequence[tuple[str, float]], Sequence[float]],
    label: str,
    key: str = "",
) -> str:
    x_labels, ticks = scales
    x_texts = "".join(f'<span style="left:{place:.2f}%">{escape(text)}</span>' for text, place in x_labels)
    y_texts = "".join(
        f'<span style="bottom:{_share(tick, ticks[0], ticks[-1]):.2f}%">{tick:g}</span>' for tick in ticks
    )
    svg = f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">{shapes}</svg>'
    return (
        f'<figure class="mm-chart"><figcaption>{escape(title)}</figcaption>{key}'
        f'<div role="img" aria-label="{escape(label)}"><small>{escape(axes[1])}</small>'
        f'<div class="mm-area">{svg}<div class="mm-y">{y_texts}</div><div class="mm-x">{x_texts}</div></div>'
        f'<small class="mm-x-title">{escape(axes[0])}</small></div></figure>'
    )


def _y_ticks(lowest: float, top: float) -> list[float]:
    """Round numbers from `lowest` to at least `top`."""
    return [lowest + tick for tick in axis_ticks(max(0.0, top - lowest))]


def _grid(ticks: Sequence[float]) -> str:
    places = [100 - _share(tick, ticks[0], ticks[-1]) for tick in ticks]
    return "".join(f'<path class="mm-grid" d="M0 {place:.2f}H100"/>' for place in places)


def _share(value: float, low: float, high: float) -> float:
    """Where a value lies between two others, from 0 to 100."""
    return 100 * (value - low) / (high - low) if high > low else 0.0


def _steps() -> Sequence[int]:
    """Distances between numbers at an axis of counts."""
    return [factor * 10**power for power in range(6) for factor in (1, 2, 5)]
