"""The model card of the scenes model: architecture, data, training record, accuracy, limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmspec.app.scenes import CARD_FILE
from mmspec.app.scenes.objects import OBJECT_KINDS

TRAINING_FILE = "training.json"
"""Training record in a model folder: command, seed, versions, stages, and an optional note."""

METRIC_LABELS = {
    "things_named": "things in the image that are named",
    "named_are_there": "named things that are in the image",
    "places": "region of a thing",
    "described_places": "regions in long descriptions",
    "counts": "number of things of a kind",
    "totals": "number of all things",
    "yes_no": "presence of a kind (yes or no)",
    "backgrounds": "colour and texture of the background",
    "words": "text on the sign",
    "bigger": "the larger of two things",
    "motion": "clips: direction of motion",
    "events": "clips: moves, appears, leaves or stays",
    "clip_things": "clips: the thing that acts",
}
"""Metric of `training.evaluate` -> row label of the accuracy table."""

CARD_HEADER = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: image-text-to-text
---
# The scenes model of mmspec

A small LLaVA ({parameters:.0f} M parameters: a SigLIP tower of 6 layers x 192, a Llama of 10 layers x 384) trained on a
synthetic world: images of one to six drawn objects of {kinds} kinds on a plain or patterned background, sometimes with
a sign that shows a word or a number, and clips of four to eight frames. It captions and describes images, answers where
an object is, how many there are and whether there is one, and reads signs. Its purpose is to demonstrate and measure
speculative decoding without a download; it is not a general vision-language model.

The classes are stock transformers: load it with `AutoModelForImageTextToText.from_pretrained(FOLDER)` or
`mmspec.app.scenes.load_scenes_model()`. The weights are bfloat16 on disk and float32 once loaded. One image is 144
visual tokens; images of other sizes are stretched to 192 x 192 pixels.

## Data

`research/scenes` generates all images and texts from seeds; no data was collected. The objects are drawn from Noto
Color Emoji (SIL Open Font License 1.1). Seeds from 50,000,000 on and one in twenty pairs of object kinds are held out.
"""

LIMITATIONS = """\
## Limits

The model knows only this world: its answers about photographs are meaningless. Signs hold words of the generator's list
or numbers up to 999. The training questions are the few dozen English forms of the grammar; other wording may not work.
No training question asks for the number of a kind that is absent.

Licence of the weights: Apache-2.0, as for the rest of mmspec.
"""


def format_training(training: Mapping[str, Any]) -> str:
    """Return the training section.

    Args:
        training: Content of `TRAINING_FILE`.
    """
    lines = [
        "## Training",
        "",
        "`{command}`; seed {seed}, torch {torch}, transformers {transformers}. The learning rates of the vision tower"
        " and of the upper half of the text layers are shares of the stage's peak learning rate.".format(**training),
        "",
        "| stage | steps | batch size | learning rate | tower (share) | text layers | upper half (share) |",
        "|---|---|---|---|---|---|---|",
    ]
    for stage in training["stages"]:
        lines.append("| {name} | {steps} | {batch} | {rate:g} | {eyes:g} | {layers} | {upper:g} |".format(**stage))
    return "\n".join([*lines, "", *([training["note"], ""] if training.get("note") else [])])


def format_accuracy(metrics: Mapping[str, float]) -> str:
    """Return the accuracy section.

    Args:
        metrics: Result of `training.evaluate.evaluate_scenes_model`.
    """
    first_seed = int(metrics["first_seed"])
    count = int(metrics["count"])
    lines = [
        "## Accuracy",
        "",
        f"Greedy decoding on {count:,} held-out scenes (seeds {first_seed:,} to {first_seed + count - 1:,}) and"
        f" {count // 4} clips:",
        f"`python -m research.scenes.evaluate --first-seed {first_seed} --count {count}`. The control asks"
        " the same questions with the image of another scene. Things that are less than half visible or smaller than 38"
        f" pixels need not be named; there were {int(metrics['left_out'])}.",
        "",
        "| metric | accuracy | control | checks |",
        "|---|---|---|---|",
    ]
    for name, label in METRIC_LABELS.items():
        if name in metrics:
            control = metrics.get(f"control_{name}")
            control_text = "" if control is None else f"{control:.1%}"
            lines.append(f"| {label} | {metrics[name]:.1%} | {control_text} | {int(metrics[f'{name}_n']):,} |")
    return "\n".join([*lines, ""])


def write_card(folder: Path, num_parameters: int, metrics: Mapping[str, float] | None = None) -> None:
    """Write the model card into a model folder.

    Args:
        folder: Model folder; it holds `TRAINING_FILE`.
        num_parameters: Number of parameters of the model.
        metrics: Result of the evaluation; None leaves the accuracy section out.
    """
    training = json.loads((folder / TRAINING_FILE).read_text(encoding="utf-8"))
    sections = [CARD_HEADER.format(parameters=num_parameters / 1e6, kinds=len(OBJECT_KINDS)), format_training(training)]
    sections += [format_accuracy(metrics)] if metrics is not None else []
    (folder / CARD_FILE).write_text("\n".join([*sections, LIMITATIONS]), encoding="utf-8")
