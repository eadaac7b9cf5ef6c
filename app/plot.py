"""The bars of `mmspec bench`: decode speed-up over plain `generate`, with its spread and the machine's noise band."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmspec.app.errors import UsageError


def require() -> None:
    """Say how to get matplotlib if it is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: pip install matplotlib, or leave --plot out") from error


def plot(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """One panel per batch size and prompt length, one bar per system but the plain one."""
    require()
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


def plot_log(log: Path, file: Path) -> None:
    """The curves of a training: agreement with the target per rollout step, and the parts of the loss."""
    import json

    from matplotlib.figure import Figure

    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    names = sorted({name for row in rows for name in row})
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = zip(figure.subplots(1, 2), ("agree", "words"), strict=True)
    for axis, wanted in panels:
        for name in (name for name in names if name.rpartition("/")[2].startswith(wanted)):
            axis.plot([r["step"] for r in rows if name in r], [r[name] for r in rows if name in r], label=name)
        axis.set_xlabel("step")
        axis.legend(fontsize=7)
    figure.savefig(file, dpi=150)


def plot_study(rows: Sequence[dict[str, Any]], classes: Sequence[str], file: Path) -> None:
    """Share of the words of each class that were guessed, one group of bars per class, with 95% intervals."""
    require()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axis = figure.subplots()
    width = 0.8 / len(rows)
    for number, row in enumerate(rows):
        places = [group + number * width for group in range(len(classes))]
        values = [row[name][0] for name in classes]
        spread = [[row[name][0] - row[name][1] for name in classes], [row[name][2] - row[name][0] for name in classes]]
        axis.bar(places, values, width, yerr=spread, capsize=2, label=f"{row['drafter']} (tau {row['tau'][0]:.2f})")
    axis.set_xticks([group + 0.4 - width / 2 for group in range(len(classes))], classes)
    axis.set_ylabel("share that was guessed")
    axis.legend(fontsize=8)
    figure.savefig(file, dpi=150)


def plot_kept(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Tau against the visual tokens that the drafter was shown: a panel per shape, a line per way, 95% intervals."""
    require()
    from matplotlib.figure import Figure

    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    figure = Figure(figsize=(1.5 + 4 * len(shapes), 3.8), layout="constrained")
    for axis, shape in zip(figure.subplots(1, len(shapes), squeeze=False)[0], shapes, strict=True):
        lines: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            if row["shape"] == shape and "prefill_ms" in row:
                lines.setdefault(row["way"].partition(":")[0], []).append(row)
        for name, points in lines.items():
            points.sort(key=lambda row: row["kept"] if row["kept"] is not None else row["visual"])
            kept = [max(0.5, row["visual"] if row["kept"] is None else row["kept"]) for row in points]
            values = [row["tau"][0] for row in points]
            low = [row["tau"][0] - row["tau"][1] for row in points]
            high = [row["tau"][2] - row["tau"][0] for row in points]
            axis.errorbar(kept, values, yerr=[low, high], marker="o", markersize=4, capsize=2, label=name)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("visual tokens that the drafter is shown")
        axis.set_title(f"{shape}: {points[0]['visual']} visual tokens", fontsize=10)
        axis.legend(fontsize=7)
    figure.axes[0].set_ylabel("tau")
    figure.savefig(file, dpi=150)


def _panel(axis: Any, rows: Sequence[dict[str, Any]]) -> None:
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


__all__ = ["plot", "require"]
