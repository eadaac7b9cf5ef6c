"""What a finished race can be shared as: one HTML file, and Python code that reproduces it. `gif` draws the GIF.

Both are made here, without a service. The HTML file loads nothing: style, script and pictures are in it, and its
Content-Security-Policy admits that script alone.
"""

from __future__ import annotations

import base64
import hashlib
from html import escape
from pathlib import Path

from mmspec.app.ui.race import render_race
from mmspec.app.ui.report import Report

STATIC = Path(__file__).parent / "static"
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'">
<title>{title}</title><style>{style}</style></head>
<body class="gradio-container mm-shared"><h1>{title}</h1>
{race}
<p class="mm-legend">{note} <button type="button" id="mm-play">Play again</button></p>
<script>{script}</script></body></html>
"""
START = """
document.documentElement.classList.toggle("dark", matchMedia("(prefers-color-scheme: dark)").matches);
document.getElementById("mm-play").addEventListener("click", () => window.mmspecRace.play(document));
window.mmspecRace.autoplay(document);
"""
CODE = """\
from pathlib import Path

import torch

import mmspec
from mmspec.app.io.videos import load_media
from mmspec.app.modeling.chat import ChatTurn, build_inputs
from mmspec.app.modeling.load import load_model
from mmspec.app.modeling.sampling import Sampling

model, processor = load_model({model!r})
mmspec.patch(model, drafter={drafter!r}{compressor}{tree_size}, processor=processor)  # the line that makes it faster

media = load_media(Path({file!r}){frames})
inputs = build_inputs(model, processor, [media], [{question!r}], [{turns}])
for name, enabled in (("plain", False), ("mmspec", True)):
    torch.manual_seed({seed})
    ids = model.generate(**inputs, max_new_tokens={max_new_tokens}, {sampling}, mmspec={{"enabled": enabled}})
    print(name, processor.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(mmspec.stats(model, last=True))
"""


def render_share_page(report: Report) -> str:
    """The race as one HTML file."""
    run, choice = report.metrics["run"], report.metrics["choice"]
    script = (STATIC / "race.js").read_text(encoding="utf-8") + START
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    note = (
        f"Recorded with mmspec {run['mmspec']} on {run['time']}: model {choice['model']} on {run['device']} "
        f"({run['dtype']}). Each answer was recorded alone and is played in its own time."
    )
    return PAGE.format(
        digest=digest,
        title="mmspec: the same answer, sooner",
        style=(STATIC / "race.css").read_text(encoding="utf-8"),
        race=render_race(report),
        note=escape(note),
        script=script,
    )


def build_code(report: Report) -> str:
    """Python code that repeats the run: the same model, file, question and settings.

    The file is named as it was uploaded, without a folder. Everything of a visitor is written as a Python literal.
    """
    choice = report.metrics["choice"]
    turns = ", ".join(f"ChatTurn({turn.question!r}, {turn.answer!r})" for turn in report.turns)
    sampling = f"**Sampling({choice['temperature']}).generation_kwargs(model.generation_config)"
    return CODE.format(
        model=choice["model"],
        drafter=choice["drafter"],
        compressor=f", compressor={choice['compressor']!r}" if choice["compressor"] else "",
        tree_size=f", tree_size={choice['tree_size']}" if choice["tree_size"] else "",
        file=report.file_name,
        frames=f", frames={len(report.media)}" if report.is_clip else "",
        question=report.question,
        turns=f"[{turns}]",
        seed=choice["seed"],
        max_new_tokens=choice["max_new_tokens"],
        sampling=sampling,
    )


__all__ = ["build_code", "render_share_page"]
