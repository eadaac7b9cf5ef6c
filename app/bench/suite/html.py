"""The report of a suite as one HTML file: tables and plots (SVG), no other file and no script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from mmspec.app.bench.suite.report import LIMITS, Cells, provenance_lines, remark_lines, report_title, sections
from mmspec.app.bench.suite.runner import CallRecord
from mmspec.app.bench.suite.session import SuiteResult
from mmspec.app.bench.suite.summary import ALL, SuiteRow

WIDTH, BAR_HEIGHT, CDF_HEIGHT, LABEL_WIDTH = 720, 22, 260, 150
PEER_COLOURS = ("#555", "#aaa", "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf")
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0;font-size:13px}
td,th{padding:.25rem .6rem;border-bottom:1px solid #ddd;text-align:left}
code{font-size:12px}svg{max-width:100%}text{font:12px system-ui,sans-serif}"""


def format_html(result: SuiteResult) -> str:
    """The whole page."""
    title = escape(report_title(result))
    body = [f"<h1>{title}</h1>", *(f"<p>{escape(line)}</p>" for line in provenance_lines(result))]
    for form, batch in dict.fromkeys((row.form, row.batch) for row in result.rows):
        rows = [row for row in result.rows if (row.form, row.batch, row.category) == (form, batch, ALL)]
        calls = [one for one in result.calls if (one.form, one.batch) == (form, batch)]
        body.append(f"<h2>Decode speed-up over hf: {escape(form)}, batch {batch}</h2>{speed_plot(rows)}")
        body.append(f"<h2>Seconds of a whole call: {escape(form)}, batch {batch}</h2>{latency_plot(calls)}")
    body += [f"<h2>{escape(heading)}</h2>{_table(table)}" for heading, table in sections(result)]
    if remarks := remark_lines(result):
        body.append(f"<h2>Remarks</h2>{_list(remarks)}")
    body.append(f"<h2>How to read it</h2>{_list(LIMITS)}")
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def speed_plot(rows: Sequence[SuiteRow]) -> str:
    """A bar with its 95% interval for each peer, and a line at 1."""
    shown = [row for row in rows if row.speedup_decode is not None and row.speedup_decode_ci]
    if not shown:
        return "<p>No calls.</p>"
    top = max(1.0, *(row.speedup_decode_ci[1] for row in shown if row.speedup_decode_ci))
    scale = (WIDTH - LABEL_WIDTH - 60) / top
    parts = []
    for index, row in enumerate(shown):
        assert row.speedup_decode is not None and row.speedup_decode_ci is not None
        y, (low, high) = index * BAR_HEIGHT, row.speedup_decode_ci
        middle, colour = y + BAR_HEIGHT / 2, PEER_COLOURS[index % len(PEER_COLOURS)]
        parts += [
            f'<text x="{LABEL_WIDTH - 8}" y="{middle + 4}" text-anchor="end">{escape(row.peer)}</text>',
            f'<rect x="{LABEL_WIDTH}" y="{y + 4}" width="{row.speedup_decode * scale:.1f}" height="{BAR_HEIGHT - 8}" '
            f'fill="{colour}" opacity=".75"/>',
            f'<line x1="{LABEL_WIDTH + low * scale:.1f}" x2="{LABEL_WIDTH + high * scale:.1f}" '
            f'y1="{middle}" y2="{middle}" stroke="#000"/>',
            f'<text x="{LABEL_WIDTH + high * scale + 6:.1f}" y="{middle + 4}">{row.speedup_decode:.2f}</text>',
        ]
    height, one = len(shown) * BAR_HEIGHT, LABEL_WIDTH + scale
    parts.append(f'<line x1="{one:.1f}" x2="{one:.1f}" y1="0" y2="{height}" stroke="#888" stroke-dasharray="3"/>')
    return _svg(height, parts)


def latency_plot(calls: Sequence[CallRecord]) -> str:
    """Cumulative distribution of the seconds of whole calls, a line for each peer."""
    seconds: dict[str, list[float]] = {}
    for one in calls:
        if one.run is not None and not one.run.without_media:
            seconds.setdefault(one.peer, []).append(one.run.total_s)
    if not seconds:
        return "<p>No calls.</p>"
    top, width, height = max(map(max, seconds.values())), WIDTH - LABEL_WIDTH - 60, CDF_HEIGHT - 30
    parts = [f'<rect x="40" y="0" width="{width}" height="{height}" fill="none" stroke="#ddd"/>']
    for index, (peer, values) in enumerate(seconds.items()):
        colour, ordered = PEER_COLOURS[index % len(PEER_COLOURS)], sorted(values)
        points = [f"40,{height}"]
        for rank, value in enumerate(ordered):
            x = 40 + width * value / top
            points += [f"{x:.1f},{height * (1 - share / len(ordered)):.1f}" for share in (rank, rank + 1)]
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{" ".join(points)}"/>')
        parts.append(f'<text x="{width + 50}" y="{14 + 16 * index}" fill="{colour}">{escape(peer)}</text>')
    for share in (0.0, 0.5, 1.0):
        parts.append(f'<text x="34" y="{height * (1 - share) + 10:.0f}" text-anchor="end">{share:g}</text>')
        parts.append(
            f'<text x="{40 + width * share:.0f}" y="{height + 18}" text-anchor="middle">{top * share:.2f} s</text>'
        )
    return _svg(max(CDF_HEIGHT, 16 * len(seconds) + 10), parts)


def _svg(height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" role="img">{"".join(parts)}</svg>'


def _table(table: Sequence[Cells]) -> str:
    rows = []
    for number, cells in enumerate(table):
        tag = "td" if number else "th"
        rows.append(f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>")
    return f"<table>{''.join(rows)}</table>"


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


__all__ = ["format_html", "latency_plot", "speed_plot"]
