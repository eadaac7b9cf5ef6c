"""The model card: what the model is, what it was trained on and how, how often it is right, what it cannot do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmspec.app.scenes.objects import OBJECT_KINDS

CARD_FILE = "README.md"
TRAINING_FILE = "training.json"
"""Stages, seed and versions of the run that made the weights, and a note if there is more to say, beside them."""

METRIC_LABELS = {
    "things_named": "things in the picture that are named",
    "named_are_there": "things named that are in the picture",
    "places": "where a thing is",
    "described_places": "places in long descriptions",
    "counts": "how many of a kind",
    "totals": "how many things in all",
    "yes_no": "is there one",
    "backgrounds": "colour and pattern of the ground",
    "words": "the word on the sign",
    "bigger": "which of two is bigger",
    "motion": "clips: which way it moves",
    "events": "clips: moves, appears, leaves or stays",
    "clip_things": "clips: what does it",
}
"""Share and what it is of."""

CARD_HEADER = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: image-text-to-text
---
# The scenes model of mmspec

A small LLaVA ({parameters:.0f} M parameters: a SigLIP tower of 6 layers x 192, a Llama of 10 layers x 384) that really
sees, in a small world: drawn things on plain or patterned ground, {kinds} kinds, up to six in a picture, sometimes a
sign with a word, and clips of four to eight frames. It captions, describes, says where, how many, whether, and what a
sign says. It is there to show and to measure speculative decoding without a download, and for nothing else.

Stock classes of transformers: `AutoModelForImageTextToText.from_pretrained(FOLDER)`, or `mmspec.app.scenes.load()`. The
weights are bfloat16 on disk and float32 in use. 144 visual tokens a picture; pictures of other sizes are stretched.

## Data

Pictures and texts are made by `mmspec.app.scenes` from seeds; nothing was collected. The things are drawn from Noto
Color Emoji (SIL Open Font License 1.1). Seeds from 50,000,000 on, and one pair of kinds in twenty, were never trained
on.
"""

LIMITATIONS = """\
## Limits

It knows its world and no other: of photographs it makes nonsense. Signs bear words of the generator's list or numbers
up to 999; how often they are read right, the table says. It was asked in the few dozen forms of the grammar, in
English; other wording may or may not work. It was never asked how many there are of what is not there.

Licence of the weights: Apache-2.0, as the rest of mmspec.
"""


def format_training(training: Mapping[str, Any]) -> str:
    """How it was trained."""
    lines = [
        "## Training",
        "",
        "`{command}`; seed {seed}, torch {torch}, transformers {transformers}.".format(**training),
        "",
    ]
    lines += [
        "| stage | steps | batch | rate | tower's share | layers | upper half's share |",
        "|---|---|---|---|---|---|---|",
    ]
    for stage in training["stages"]:
        lines.append("| {name} | {steps} | {batch} | {rate:g} | {eyes:g} | {layers} | {upper:g} |".format(**stage))
    return "\n".join([*lines, "", *([training["note"], ""] if training.get("note") else [])])


def format_accuracy(metrics: Mapping[str, float]) -> str:
    """The table of what is right, with shuffled pictures beside it."""
    first, count = int(metrics["first_seed"]), int(metrics["count"])
    lines = [
        "## Accuracy",
        "",
        f"Greedy, on {count:,} held-out scenes (seeds {first:,} to {first + count - 1:,}) and {count // 4} clips;",
        f"`python -m mmspec.app.scenes.training.evaluate --first-seed {first} --count {count}`.",
        "The control is the same questions with another scene's picture. Things less than half visible or under 38",
        f"pixels would be left out; there were {int(metrics['left_out'])}.",
        "",
        "| | right | control | asked |",
        "|---|---|---|---|",
    ]
    for name, told in METRIC_LABELS.items():
        if name in metrics:
            control = metrics.get(f"control_{name}")
            beside = "" if control is None else f"{control:.1%}"
            lines.append(f"| {told} | {metrics[name]:.1%} | {beside} | {int(metrics[f'{name}_n']):,} |")
    return "\n".join([*lines, ""])


def write_card(folder: Path, num_parameters: int, metrics: Mapping[str, float] | None = None) -> None:
    """Write the card of the model in `folder`, which holds the facts of its training."""
    facts = json.loads((folder / TRAINING_FILE).read_text(encoding="utf-8"))
    parts = [CARD_HEADER.format(parameters=num_parameters / 1e6, kinds=len(OBJECT_KINDS)), format_training(facts)]
    parts += [format_accuracy(metrics)] if metrics is not None else []
    (folder / CARD_FILE).write_text("\n".join([*parts, LIMITATIONS]), encoding="utf-8")


__all__ = ["CARD_FILE", "METRIC_LABELS", "TRAINING_FILE", "write_card"]
