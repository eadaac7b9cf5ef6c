"""The report of a suite as one HTML file: tables and plots (SVG), no other file and no script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from research.bench.suite.report import LIMITS, Cells, provenance_lines, remark_lines, report_title, sections
from research.bench.suite.runner import CallRecord
from research.bench.suite.session import SuiteResult
from research.bench.suite.summary import ALL, SuiteRow
from research.bench.suite.ticks import axis_ticks

WIDTH, BAR_HEIGHT, CDF_HEIGHT, LABEL_WIDTH, LEGEND_COLUMNS = 520, 26, 240, 128, 3
"""Of the plots, in units of 1/520 of their width: legible at 360 pixels. Texts are 13 units high."""
PEER_COLOURS = (
    "#8a919c",
    "#b45309",
    "#3b82f6",
    "#2f9e52",
    "#d97706",
    "#a855f7",
    "#db2777",
    "#0d9488",
    "#ca8a04",
    "#e11d48",
)
"""Legible on light and dark backgrounds."""
STYLE = """:root{color-scheme:light dark;--ink:#1b1f24;--faint:#5d6470;--line:#d4d7dd;--paper:#fff}
@media(prefers-color-scheme:dark){:root{--ink:#e8eaee;--faint:#a0a7b3;--line:#3c424c;--paper:#14171c}}
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:1.5rem auto;padding:0 1rem;
color:var(--ink);background:var(--paper);overflow-wrap:anywhere}
h1{font-size:24px}h2{font-size:18px;margin:2rem 0 .5rem}
.wide{overflow-x:auto}table{border-collapse:collapse;margin:.5rem 0;font-size:13px;font-variant-numeric:tabular-nums}
td,th{padding:.25rem .6rem;border-bottom:1px solid var(--line);text-align:left;vertical-align:top;overflow-wrap:normal}
td:not([colspan]),th{white-space:nowrap}td[colspan]{min-width:16rem}th{color:var(--faint);font-weight:500}
code{font-size:13px}svg{display:block;width:100%;max-width:640px}
text{font:13px system-ui,sans-serif;fill:var(--ink)}.grid{stroke:var(--line)}.mark{stroke:var(--ink)}
.one{stroke:var(--faint);stroke-dasharray:3}"""


def format_html(result: SuiteResult) -> str:
    """The whole page."""
    title = escape(report_title(result))
    body = [f"<h1>{title}</h1>", *(f"<p>{_inline(line)}</p>" for line in provenance_lines(result))]
    for form, batch in dict.fromkeys((row.form, row.batch) for row in result.rows):
        rows = [row for row in result.rows if (row.form, row.batch, row.category) == (form, batch, ALL)]
        calls = [one for one in result.calls if (one.form, one.batch) == (form, batch)]
        body.append(f"<h2>Decode speed-up over hf: {escape(form)}, batch {batch}</h2>{speed_plot(rows)}")
        body.append(f"<h2>Seconds of a whole call: {escape(form)}, batch {batch}</h2>{latency_plot(calls)}")
    body += [f"<h2>{escape(heading)}</h2>{_table(table)}" for heading, table in sections(result)]
    if remarks := remark_lines(result):
        body.append(f"<h2>Remarks</h2>{_list(remarks)}")
    body.append(f"<h2>How to read it</h2>{_list(LIMITS)}")
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{viewport}<title>{title}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def speed_plot(rows: Sequence[SuiteRow]) -> str:
    """A bar with its 95% interval for each peer, and a line at 1."""
    shown = [row for row in rows if row.speedup_decode is not None and row.speedup_decode_ci]
    if not shown:
        return "<p>No calls.</p>"
    top = max(1.0, *(row.speedup_decode_ci[1] for row in shown if row.speedup_decode_ci))
    scale = (WIDTH - LABEL_WIDTH - 50) / top
    parts = []
    for index, row in enumerate(shown):
        assert row.speedup_decode is not None and row.speedup_decode_ci is not None
        y, (low, high) = index * BAR_HEIGHT, row.speedup_decode_ci
        middle, colour = y + BAR_HEIGHT / 2, PEER_COLOURS[index % len(PEER_COLOURS)]
        parts += [
            f'<text x="{LABEL_WIDTH - 8}" y="{middle + 4}" text-anchor="end">{escape(_shorten(row.peer))}</text>',
            f'<rect x="{LABEL_WIDTH}" y="{y + 4}" width="{row.speedup_decode * scale:.1f}" height="{BAR_HEIGHT - 8}" '
            f'fill="{colour}" opacity=".75"/>',
            f'<line class="mark" x1="{LABEL_WIDTH + low * scale:.1f}" x2="{LABEL_WIDTH + high * scale:.1f}" '
            f'y1="{middle}" y2="{middle}"/>',
            f'<text x="{LABEL_WIDTH + high * scale + 6:.1f}" y="{middle + 4}">{row.speedup_decode:.2f}x</text>',
        ]
    height, one = len(shown) * BAR_HEIGHT, LABEL_WIDTH + scale
    parts.append(f'<line class="one" x1="{one:.1f}" x2="{one:.1f}" y1="0" y2="{height}"/>')
    return _svg(height, parts, "Decode speed-up over hf, a bar for each peer; the tables below give the numbers")


def latency_plot(calls: Sequence[CallRecord]) -> str:
    """Cumulative distribution of the seconds of whole calls, a line for each peer, the legend below."""
    seconds: dict[str, list[float]] = {}
    for one in calls:
        if one.run is not None and not one.run.without_media:
            seconds.setdefault(one.peer, []).append(one.run.total_s)
    if not seconds:
        return "<p>No calls.</p>"
    left, width, height = 44, WIDTH - 70, CDF_HEIGHT
    ticks = axis_ticks(max(map(max, seconds.values())))
    top = ticks[-1]
    parts = [f'<rect class="grid" x="{left}" y="2" width="{width}" height="{height}" fill="none"/>']
    for share in (0.0, 0.5, 1.0):
        y = 2 + height * (1 - share)
        parts.append(f'<line class="grid" x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text x="{left - 6}" y="{min(max(y + 4, 12), height + 2):.1f}" text-anchor="end">{share:.0%}</text>'
        )
    for tick in ticks:
        x, unit = left + width * tick / top, " s" if tick == top else ""
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{height + 2}" y2="{height + 7}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height + 20}" text-anchor="middle">{tick:g}{unit}</text>')
    for index, (peer, values) in enumerate(seconds.items()):
        colour, ordered = PEER_COLOURS[index % len(PEER_COLOURS)], sorted(values)
        points = [f"{left},{height + 2}"]
        for rank, value in enumerate(ordered):
            x = left + width * value / top
            points += [f"{x:.1f},{2 + height * (1 - share / len(ordered)):.1f}" for share in (rank, rank + 1)]
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{" ".join(points)}"/>')
        x, y = left + index % LEGEND_COLUMNS * width / LEGEND_COLUMNS, height + 44 + 20 * (index // LEGEND_COLUMNS)
        parts.append(f'<rect x="{x:.1f}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18:.1f}" y="{y}">{escape(_shorten(peer))}</text>')
    total_height = height + 54 + 20 * ((len(seconds) - 1) // LEGEND_COLUMNS)
    return _svg(total_height, parts, "Share of calls that end within a time, a line for each peer")


def _shorten(peer: str) -> str:
    """A name that fits beside a bar."""
    return peer if len(peer) <= 18 else f"{peer[:16]}…"


def _svg(height: float, parts: Sequence[str], label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _table(table: Sequence[Cells]) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table[0])
    body = "".join(f"<tr>{_cells(cells)}</tr>" for cells in table[1:])
    return f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cells(cells: Cells) -> str:
    """The cells of a row; the last one that is not empty, such as an error, spans the empty ones behind it."""
    count = max((number for number, cell in enumerate(cells, 1) if cell), default=len(cells))
    spans = [""] * (count - 1) + [f' colspan="{len(cells) - count + 1}"' if count < len(cells) else ""]
    return "".join(f"<td{span}>{escape(cell)}</td>" for span, cell in zip(spans, cells, strict=False))


def _inline(line: str) -> str:
    """Text with `code` between backticks."""
    parts = escape(line).split("`")
    return "".join(f"<code>{part}</code>" if number % 2 else part for number, part in enumerate(parts))


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{_inline(line)}</li>' for line in lines)}</ul>"
