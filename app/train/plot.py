"""The curves of a training run, drawn with matplotlib."""

from __future__ import annotations

import json
from pathlib import Path

LOG_PANELS = (
    ("Agreement with the target", "share of tokens", ("agree",)),
    ("Loss", "loss", ("loss", "words", "logits", "states", "hidden", "compressor")),
)
"""Panels of `plot_training_log`: title, label of the y axis, prefixes of the metrics."""


def plot_training_log(log: Path, file: Path, title: str) -> None:
    """The curves of a training run: agreement with the target per training-time-test step, and the parts of the loss.

    Args:
        log: log.jsonl of the run.
        title: of the figure: what is trained for which target.
    """
    from matplotlib.figure import Figure

    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    names = sorted({name for row in rows for name in row})
    figure = Figure(figsize=(9, 3.9), layout="constrained")
    figure.suptitle(title, fontsize=10)
    for axis, (heading, label, prefixes) in zip(figure.subplots(1, 2), LOG_PANELS, strict=True):
        for name in (name for name in names if name.rpartition("/")[2].startswith(prefixes)):
            axis.plot([r["step"] for r in rows if name in r], [r[name] for r in rows if name in r], label=name)
        axis.set_title(heading, fontsize=10)
        axis.set_xlabel("training step")
        axis.set_ylabel(label)
        if axis.lines:
            axis.legend(fontsize=7)
    figure.savefig(file, dpi=150)
