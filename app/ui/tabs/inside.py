"""The Inside tab: the decoding rounds of the last answer, each with its draft tree."""

from __future__ import annotations

from typing import Any

import gradio as gr

from mmspec.app.ui import render
from mmspec.app.ui.context import UNQUEUED
from mmspec.app.ui.report import Report

EMPTY_MESSAGE = "Ask something in the Compare tab first; the rounds of mmspec's answer then appear here."


def build_inside_tab(report_state: Any, tab: Any) -> None:
    """Create the tab and connect its events.

    Args:
        report_state: `gr.State` with the last finished `Report`.
        tab: the `gr.Tab`, which updates when it is selected.
    """
    gr.HTML(
        '<p class="mm-intro">A round is one forward of the model. The drafter proposes a tree of tokens that may '
        "follow the last one; the forward computes the model's own token at every node; the path of equal tokens is "
        "accepted.</p>"
    )
    with gr.Row(elem_classes="mm-end"):
        back = gr.Button("Back", elem_id="mm-back", min_width=70, scale=1, size="sm")
        forward = gr.Button("Forward", elem_id="mm-forth", min_width=70, scale=1, size="sm")
        tree = gr.Button("Next tree", elem_id="mm-next-tree", min_width=70, scale=1, size="sm")
        slider = gr.Slider(0, 1, value=0, step=1, label="Round", elem_id="mm-round", scale=4, min_width=220)
    output = gr.HTML(render.render_status(EMPTY_MESSAGE), elem_id="mm-inside")
    visible = gr.HTML("", elem_id="mm-visible")

    def render_at(report: Report | None, number: float) -> str:
        if report is None or not report.rounds:
            return render.render_status(EMPTY_MESSAGE)
        return render.render_round(report, clamp_round(report, number))

    def step(report: Report | None, number: float, offset: int) -> tuple[float, str]:
        number = number if report is None else clamp_round(report, number + offset)
        return number, render_at(report, number)

    def next_tree(report: Report | None, number: float) -> tuple[float, str]:
        number = number if report is None else next_round_with_tree(report, clamp_round(report, number))
        return number, render_at(report, number)

    def reset(report: Report | None) -> tuple[Any, str, str]:
        if report is None or not report.rounds:
            return gr.skip(), render.render_status(EMPTY_MESSAGE), ""
        first = next_round_with_tree(report, 0)
        slider_update = gr.update(maximum=max(1, len(report.rounds) - 1), value=first)
        return slider_update, render_at(report, first), render.render_visible_tokens(report)

    back.click(lambda report, number: step(report, number, -1), [report_state, slider], [slider, output], **UNQUEUED)
    forward.click(lambda report, number: step(report, number, 1), [report_state, slider], [slider, output], **UNQUEUED)
    tree.click(next_tree, [report_state, slider], [slider, output], **UNQUEUED)
    slider.input(render_at, [report_state, slider], output, **UNQUEUED)
    gr.on([tab.select, report_state.change], reset, report_state, [slider, output, visible], **UNQUEUED)


def clamp_round(report: Report, round_index: float) -> int:
    """The nearest valid index of a round."""
    return int(max(0, min(len(report.rounds) - 1, round_index)))


def next_round_with_tree(report: Report, round_index: int) -> int:
    """Index of the next round with draft tokens, wrapping around; `round_index` if no round has any."""
    indices = [index for index, item in enumerate(report.rounds) if item.num_draft_tokens]
    return next((index for index in indices if index > round_index), indices[0] if indices else round_index)
