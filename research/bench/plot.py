"""Figures of `research.bench` and of the studies, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.app.errors import UsageError
from research.bench.rows import ResultRow, num_drafter_tokens

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def require_matplotlib(file: Path) -> None:
    """Check that matplotlib is installed and can write such a file.

    Raises:
        UsageError: it is missing, with the command that installs it; or the name has another end than `PLOT_SUFFIXES`.
    """
    if file.suffix not in PLOT_SUFFIXES:
        raise UsageError(f"--plot writes {', '.join(PLOT_SUFFIXES)}, by the end of the name; got {file}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: pip install matplotlib, or leave --plot out") from error


def plot_bench(rows: Sequence[ResultRow], file: Path) -> None:
    """One panel per batch size and prompt length, one bar per drafter, with the noise band of plain `generate`."""
    require_matplotlib(file)
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((row["batch"], row["prompt_tokens"]) for row in rows))
    figure = Figure(figsize=(1.5 + 3.2 * len(panels), 3.6), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (batch, prompt) in zip(axes, panels, strict=True):
        _panel(axis, [row for row in rows if (row["batch"], row["prompt_tokens"]) == (batch, prompt)])
        axis.set_title(f"batch {batch}, prompt {prompt}", fontsize=10)
    axes[0].set_ylabel("decode speed-up over plain generate")
    title = "{model}, {dtype}, {new_tokens} new tokens, {device}".format(device=rows[0]["run"]["device"], **rows[0])
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(file, dpi=150)


def plot_token_classes(rows: Sequence[ResultRow], classes: Sequence[str], file: Path) -> None:
    """Tau, and the accepted share of the tokens of each class, with 95% intervals: a line for each drafter."""
    require_matplotlib(file)
    from matplotlib.figure import Figure

    panels = ("tau", *classes)
    figure = Figure(figsize=(2.0 + 1.9 * len(panels), 1.2 + 0.24 * len(rows)), layout="constrained")
    heights = list(range(len(rows)))
    for axis, name in zip(figure.subplots(1, len(panels), sharey=True), panels, strict=True):
        values, low, high = zip(*(row[name] for row in rows), strict=True)
        axis.errorbar(values, heights, xerr=_spread(values, low, high), fmt="o", markersize=4, capsize=2)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("tokens per forward" if name == "tau" else "share accepted", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(axis="x", color="0.9")
    first = figure.axes[0]
    first.set_yticks(heights, [row["drafter"] for row in rows])
    first.set_ylim(len(rows) - 0.5, -0.5)
    figure.savefig(file, dpi=150)


MARKERS = "osD^vP*X"
"""Of the drafters in `plot_compression`, in turn; colours are those of the compressors."""
TAB20 = """1f77b4 ff7f0e 2ca02c d62728 9467bd 8c564b e377c2 7f7f7f bcbd22 17becf
aec7e8 ffbb78 98df8a ff9896 c5b0d5 c49c94 f7b6d2 c7c7c7 dbdb8d 9edae5"""
COLOURS = [f"#{colour}" for colour in TAB20.split()]
"""Twenty distinct colours, the strong ones first."""


def plot_compression(rows: Sequence[ResultRow], file: Path) -> None:
    """Tau against the number of visual tokens of the drafter, a panel per shape, with 95% intervals.

    A colour for each family of compressors, a marker for each drafter; rows with the same of both are one line.
    """
    require_matplotlib(file)
    from matplotlib.figure import Figure

    rows = [row for row in rows if "prefill_ms" in row]
    shapes, families, drafters = (list(dict.fromkeys(r[key] for r in rows)) for key in ("shape", "family", "drafter"))
    wide = min(3, max(1, len(shapes)))
    deep = -(-max(1, len(shapes)) // wide)
    figure = Figure(figsize=(2.5 + 4 * wide, 4 * deep), layout="constrained")
    axes = list(figure.subplots(deep, wide, squeeze=False).flat)
    for axis in axes[len(shapes) :]:
        axis.set_visible(False)
    for axis in axes[::wide]:
        axis.set_ylabel("tau")
    lines: dict[str, Any] = {}
    for axis, shape in zip(axes, shapes, strict=False):
        groups: dict[tuple[str, str], list[ResultRow]] = {}
        for row in (row for row in rows if row["shape"] == shape):
            groups.setdefault((row["drafter"], row["family"]), []).append(row)
        for index, ((drafter, family), points) in enumerate(groups.items()):
            points.sort(key=num_drafter_tokens)
            values, low, high = zip(*(row["tau"] for row in points), strict=True)
            marker, colour = MARKERS[drafters.index(drafter) % len(MARKERS)], COLOURS[families.index(family) % 20]
            style = {"marker": marker, "color": colour, "markersize": 4, "linewidth": 1.2}
            label = family if len(drafters) == 1 else f"{drafter}, {family}"
            offset = 1.03 ** (index - len(groups) / 2)  # so that intervals do not cover each other
            num_tokens = [max(0.5, num_drafter_tokens(row)) * offset for row in points]
            axis.vlines(num_tokens, low, high, color=colour, linewidth=0.5, alpha=0.4)
            [line] = axis.plot(num_tokens, values, **style)
            lines.setdefault(label, line)
            if any(row["spec"] == row["base"] for row in points):
                axis.axhline(values[-1], color="0.8", linewidth=1, zorder=0)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("visual tokens of the drafter (0 at the left edge)", fontsize=8)
        axis.set_title(f"{shape}: {points[0]['num_visual_tokens']} visual tokens", fontsize=10)
    figure.legend(lines.values(), lines.keys(), loc="outside right upper", fontsize=7)
    figure.savefig(file, dpi=110)


def plot_blocks(settings: Mapping[str, Sequence[ResultRow]], file: Path) -> None:
    """Tau, draft time and speed-up against the tokens per pass (or levels): a row of panels for each setting.

    A line for each `kind` of drafter; rows whose `size` is None are left out. Speed-ups have 95% intervals.
    """
    require_matplotlib(file)
    from matplotlib.figure import Figure

    panels = {"tau": "tau", "draft_ms": "draft ms per round", "speedup_hf": "decode speed-up over plain"}
    figure = Figure(figsize=(3.6 * len(panels), 0.6 + 2.9 * len(settings)), layout="constrained")
    grid = figure.subplots(len(settings), len(panels), squeeze=False)
    lines: dict[str, Any] = {}
    kinds = list(dict.fromkeys(row["kind"] for rows in settings.values() for row in rows if row["size"] is not None))
    for (title, rows), axes in zip(settings.items(), grid, strict=True):
        for axis, (name, label) in zip(axes, panels.items(), strict=True):
            for index, kind in enumerate(kinds):
                points = sorted((r for r in rows if r["kind"] == kind and r["size"]), key=lambda row: row["size"])
                if not points:
                    continue
                values = [row[name] for row in points]
                limits = list(zip(*(row["speedup_hf_ci"] for row in points), strict=True))
                spread = _spread(values, *limits) if name == "speedup_hf" else None
                style = {"marker": MARKERS[index % len(MARKERS)], "color": f"C{index}", "markersize": 4, "capsize": 2}
                lines[kind] = axis.errorbar([r["size"] for r in points], values, yerr=spread, linewidth=1, **style)
            axis.set_ylabel(label, fontsize=8)
            axis.tick_params(labelsize=8)
            axis.grid(axis="y", color="0.9")
        axes[0].set_title(title, fontsize=9, loc="left")
    for axis in grid[-1]:
        axis.set_xlabel("tokens per pass (drafters of one token: levels)", fontsize=8)
    figure.legend(lines.values(), lines.keys(), loc="outside upper right", ncols=max(1, len(lines)), fontsize=8)
    figure.savefig(file, dpi=150)


def _spread(values: Sequence[float], low: Sequence[float], high: Sequence[float]) -> list[list[float]]:
    """Distances of the limits from the values, as error bars take them; at least 0, although limits are rounded."""
    return [
        [max(0.0, value - limit) for value, limit in zip(values, low, strict=True)],
        [max(0.0, limit - value) for value, limit in zip(values, high, strict=True)],
    ]


def _panel(axis: Any, rows: Sequence[ResultRow]) -> None:
    noise = next(row for row in rows if row["drafter"] == "hf-again")
    bars = [row for row in rows if row["drafter"] not in ("hf", "hf-again")]
    axis.axhspan(noise["speedup_hf_lo"], noise["speedup_hf_hi"], color="0.85", label="plain against itself")
    axis.axhline(1.0, color="0.4", linewidth=0.8)
    heights = [row["speedup_hf"] for row in bars]
    spread = [
        [row["speedup_hf"] - row["speedup_hf_lo"] for row in bars],
        [row["speedup_hf_hi"] - row["speedup_hf"] for row in bars],
    ]
    labels = [f"{row['drafter']}\ntau {row['tau']:.2f}" for row in bars]
    axis.bar(labels, heights, yerr=spread, capsize=3, color="#4477aa", width=0.6)
    axis.tick_params(labelsize=8)
