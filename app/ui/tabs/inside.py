"""The Inside tab: the last answer, one round after another, each with the tree that was guessed."""

from __future__ import annotations

from typing import Any

import gradio as gr

from mmspec.app.ui import render as drawing
from mmspec.app.ui.context import QUICK
from mmspec.app.ui.report import Report

EMPTY = "Ask something in the Compare tab first; then every round of mmspec's answer can be looked at here."


def inside_tab(run: Any, tab: Any) -> None:
    """Draw the tab. run: the state that holds the last finished `Report`. tab: shown when this one is chosen."""
    gr.HTML(
        '<p class="mm-intro">A round is one forward of the model. The drafter hangs a tree of guesses below the last '
        "token; the model says its own word at every node at once; the walk goes on while a guess is that word.</p>"
    )
    with gr.Row(elem_classes="mm-end"):
        back = gr.Button("Back", elem_id="mm-back", min_width=80, scale=1, size="md")
        forth = gr.Button("Forward", elem_id="mm-forth", min_width=80, scale=1, size="md")
        tree = gr.Button("Next tree", elem_id="mm-next-tree", min_width=80, scale=1, size="md")
        place = gr.Slider(0, 1, value=0, step=1, label="Round", elem_id="mm-round", scale=4, min_width=220)
    shown = gr.HTML(drawing.status(EMPTY), elem_id="mm-inside")

    def at(report: Report | None, number: float) -> str:
        if report is None or not report.rounds:
            return drawing.status(EMPTY)
        return drawing.round_text(report, clamped(report, number))

    def step(report: Report | None, number: float, by: int) -> tuple[float, str]:
        number = number if report is None else clamped(report, number + by)
        return number, at(report, number)

    def next_tree(report: Report | None, number: float) -> tuple[float, str]:
        found = number if report is None else tree_after(report, clamped(report, number))
        return found, at(report, found)

    def opened(report: Report | None) -> tuple[Any, str]:
        if report is None or not report.rounds:
            return gr.skip(), drawing.status(EMPTY)
        first = tree_after(report, 0)
        return gr.update(maximum=max(1, len(report.rounds) - 1), value=first), at(report, first)

    back.click(lambda report, number: step(report, number, -1), [run, place], [place, shown], **QUICK)
    forth.click(lambda report, number: step(report, number, 1), [run, place], [place, shown], **QUICK)
    tree.click(next_tree, [run, place], [place, shown], **QUICK)
    place.input(at, [run, place], shown, **QUICK)
    gr.on([tab.select, run.change], opened, run, [place, shown], **QUICK)


def clamped(report: Report, number: float) -> int:
    """The round of that number, or the nearest there is."""
    return int(max(0, min(len(report.rounds) - 1, number)))


def tree_after(report: Report, number: int) -> int:
    """The next round with a tree; the first such after the last; `number` if no round has one."""
    trees = [place for place, one in enumerate(report.rounds) if one.guesses]
    return next((place for place in trees if place > number), trees[0] if trees else number)


__all__ = ["clamped", "inside_tab", "tree_after"]
