"""The model card: what the model is, what it was trained on and how, how often it is right, what it cannot do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmspec.app.scenes.objects import KINDS

CARD = "README.md"
FACTS = "training.json"
"""Stages, seed and versions of the run that made the weights, and a note if there is more to say, beside them."""

ROWS = {
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

HEAD = """\
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

LIMITS = """\
## Limits

It knows its world and no other: of photographs it makes nonsense. Signs bear words of the generator's list or numbers
up to 999; how often they are read right, the table says. It was asked in the few dozen forms of the grammar, in
English; other wording may or may not work. It was never asked how many there are of what is not there.

Licence of the weights: Apache-2.0, as the rest of mmspec.
"""


def training_text(facts: Mapping[str, Any]) -> str:
    """How it was trained."""
    lines = [
        "## Training",
        "",
        "`{command}`; seed {seed}, torch {torch}, transformers {transformers}.".format(**facts),
        "",
    ]
    lines += [
        "| stage | steps | batch | rate | tower's share | layers | upper half's share |",
        "|---|---|---|---|---|---|---|",
    ]
    for stage in facts["stages"]:
        lines.append("| {name} | {steps} | {batch} | {rate:g} | {eyes:g} | {layers} | {upper:g} |".format(**stage))
    return "\n".join([*lines, "", *([facts["note"], ""] if facts.get("note") else [])])


def accuracy_text(shares: Mapping[str, float]) -> str:
    """The table of what is right, with shuffled pictures beside it."""
    first, count = int(shares["first_seed"]), int(shares["count"])
    lines = [
        "## Accuracy",
        "",
        f"Greedy, on {count:,} held-out scenes (seeds {first:,} to {first + count - 1:,}) and {count // 4} clips;",
        f"`python -m mmspec.app.scenes.training.evaluate --first-seed {first} --count {count}`.",
        "The control is the same questions with another scene's picture. Things less than half visible or under 38",
        f"pixels would be left out; there were {int(shares['left_out'])}.",
        "",
        "| | right | control | asked |",
        "|---|---|---|---|",
    ]
    for name, told in ROWS.items():
        if name in shares:
            control = shares.get(f"control_{name}")
            beside = "" if control is None else f"{control:.1%}"
            lines.append(f"| {told} | {shares[name]:.1%} | {beside} | {int(shares[f'{name}_n']):,} |")
    return "\n".join([*lines, ""])


def write_card(folder: Path, parameters: int, shares: Mapping[str, float] | None = None) -> None:
    """Write the card of the model in `folder`, which holds the facts of its training."""
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    parts = [HEAD.format(parameters=parameters / 1e6, kinds=len(KINDS)), training_text(facts)]
    parts += [accuracy_text(shares)] if shares is not None else []
    (folder / CARD).write_text("\n".join([*parts, LIMITS]), encoding="utf-8")


__all__ = ["CARD", "FACTS", "ROWS", "write_card"]
