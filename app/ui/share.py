"""A finished race as one HTML file. `gif` draws the GIF, `repeat_code` writes the code that repeats the run.

Made here, without a service. The HTML file loads nothing: style, script and pictures are in it, and its
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
