"""The Inside tab: the last answer, one round after another, each with the tree that was guessed."""

from __future__ import annotations

from typing import Any

import gradio as gr

from mmspec.app.ui import render as render
from mmspec.app.ui.context import UNQUEUED
from mmspec.app.ui.report import Report

EMPTY_MESSAGE = "Ask something in the Compare tab first; then every round of mmspec's answer can be looked at here."


def build_inside_tab(run: Any, tab: Any) -> None:
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
    shown = gr.HTML(render.render_status(EMPTY_MESSAGE), elem_id="mm-inside")

    def at(report: Report | None, number: float) -> str:
        if report is None or not report.rounds:
            return render.render_status(EMPTY_MESSAGE)
        return render.render_round(report, clamp_round(report, number))

    def step(report: Report | None, number: float, by: int) -> tuple[float, str]:
        number = number if report is None else clamp_round(report, number + by)
        return number, at(report, number)

    def next_tree(report: Report | None, number: float) -> tuple[float, str]:
        found = number if report is None else next_round_with_tree(report, clamp_round(report, number))
        return found, at(report, found)

    def opened(report: Report | None) -> tuple[Any, str]:
        if report is None or not report.rounds:
            return gr.skip(), render.render_status(EMPTY_MESSAGE)
        first = next_round_with_tree(report, 0)
        return gr.update(maximum=max(1, len(report.rounds) - 1), value=first), at(report, first)

    back.click(lambda report, number: step(report, number, -1), [run, place], [place, shown], **UNQUEUED)
    forth.click(lambda report, number: step(report, number, 1), [run, place], [place, shown], **UNQUEUED)
    tree.click(next_tree, [run, place], [place, shown], **UNQUEUED)
    place.input(at, [run, place], shown, **UNQUEUED)
    gr.on([tab.select, run.change], opened, run, [place, shown], **UNQUEUED)


def clamp_round(report: Report, round_index: float) -> int:
    """The round of that number, or the nearest there is."""
    return int(max(0, min(len(report.rounds) - 1, round_index)))


def next_round_with_tree(report: Report, round_index: int) -> int:
    """The next round with a tree; the first such after the last; `number` if no round has one."""
    trees = [place for place, one in enumerate(report.rounds) if one.num_draft_tokens]
    return next((place for place in trees if place > round_index), trees[0] if trees else round_index)


__all__ = ["build_inside_tab", "clamp_round", "next_round_with_tree"]
