"""Below the race: replay, numbers, plots, and what it can be shared as."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gradio as gr

from mmspec.app.errors import UsageError
from mmspec.app.ui import render
from mmspec.app.ui.context import PRIVATE_API, Context, get_client, report_errors
from mmspec.app.ui.gif import write_gif
from mmspec.app.ui.repeat_code import MAX_SHOWN_BYTES, build_code
from mmspec.app.ui.report import Report
from mmspec.app.ui.share import render_share_page
from mmspec.app.ui.tabs.run_events import RUN_EVENT
from mmspec.app.ui.worker import CancelSignal, LeftQueueError

REPLAY_SPEEDS = {"real time": 1, "4 times slower": 4, "16 times slower": 16}
LONG_CODE = "# The code holds the picture or clip, which is too long to be shown: Share, Python code."
COPY_LINK = """async () => {
    const button = document.querySelector("#mm-link");
    try { await navigator.clipboard.writeText(location.href); button.textContent = "Link copied"; }
    catch { button.textContent = location.href; }
}"""
"""Copies the address of the page; where a browser forbids that, shows it."""


@dataclass(frozen=True)
class ResultComponents:
    """Components that a finished run updates."""

    replay: Any
    details: Any
    share: Any
    page: Any
    make_gif: Any
    gif: Any
    json: Any
    script: Any
    code: Any

    @property
    def outputs(self) -> list[Any]:
        """All of them."""
        return list(vars(self).values())


def build_results(context: Context, report: Any) -> ResultComponents:
    """Create the components and connect those that need no run.

    Args:
        context: the app.
        report: `gr.State` with the last finished `Report`.
    """
    with gr.Row(elem_classes="mm-replay"):
        speed = gr.Dropdown(
            list(REPLAY_SPEEDS),
            value="real time",
            label="Replay speed",
            scale=0,
            min_width=180,
            container=False,
            elem_id="mm-speed",
        )
        replay = gr.Button("Replay", interactive=False, elem_id="mm-replay", scale=0, min_width=120)
    script = f"(speed) => {{ window.mmspecRace.play(document, {REPLAY_SPEEDS}[speed] ?? 1); }}"
    replay.click(None, speed, None, js=script, **PRIVATE_API)
    details = gr.HTML("", elem_id="mm-results")
    with gr.Column(visible=False, elem_id="mm-share") as share:
        with gr.Accordion("Share", open=False, elem_id="mm-share-box"):
            with gr.Row():
                page = gr.DownloadButton("HTML file", elem_id="mm-share-page", min_width=140)
                make_gif = gr.Button("Make GIF", elem_id="mm-make-gif", min_width=140)
                gif = gr.DownloadButton("Save GIF", interactive=False, elem_id="mm-gif", min_width=140)
                download = gr.DownloadButton("JSON data", elem_id="mm-download", min_width=140)
                script = gr.DownloadButton("Python code", elem_id="mm-script", min_width=140)
                link = gr.Button("Copy link", elem_id="mm-link", min_width=140)
            link.click(None, None, None, js=COPY_LINK, **PRIVATE_API)
        with gr.Accordion("Code that repeats this run", open=False, elem_id="mm-code-box"):
            code = gr.Code(
                "",
                language="python",
                show_label=False,
                show_line_numbers=False,
                wrap_lines=True,
                interactive=False,
                elem_id="mm-code",
            )
    parts = ResultComponents(replay, details, share, page, make_gif, gif, download, script, code)
    _connect_gif(context, parts, report)
    return parts


def _connect_gif(context: Context, parts: ResultComponents, report: Any) -> None:
    @report_errors
    def draw_gif(request: gr.Request, report: Report | None) -> Iterator[Any]:
        if report is None or not report.mmspec.token_times:
            raise UsageError("Start a race first; there is nothing to draw yet.")
        file = context.temp_storage.new_folder() / "mmspec-race.gif"
        # On the device thread: drawing takes a core, which the measurement of another visitor needs.
        work, client = functools.partial(write_gif, report, file), get_client(request)
        try:
            for _ in context.worker.submit_and_poll(work, CancelSignal(), yield_first=True, client=client):
                yield gr.update(interactive=False)
        except LeftQueueError:
            return
        yield gr.update(value=str(file), interactive=True)

    parts.make_gif.click(draw_gif, report, parts.gif, show_progress_on=[parts.make_gif], **RUN_EVENT)


def clear_results(parts: ResultComponents) -> dict[Any, Any]:
    """Values of the outputs without a finished run."""
    skipped = dict.fromkeys(parts.outputs, gr.skip())
    return skipped | {
        parts.replay: gr.update(interactive=False),
        parts.details: "",
        parts.share: gr.update(visible=False),
        parts.gif: gr.update(value=None, interactive=False),
    }


def update_results(context: Context, parts: ResultComponents, report: Report) -> dict[Any, Any]:
    """Values of the outputs after a run."""
    has_all, code = report.identical is not None, build_code(report)
    return {
        parts.replay: gr.update(interactive=True),
        parts.details: render.render_results(report) if has_all else "",
        parts.share: gr.update(visible=True),
        parts.json: gr.update(value=str(context.temp_storage.write_report(report))),
        parts.page: gr.update(
            value=str(context.temp_storage.write_text("mmspec-race.html", render_share_page(report)))
        ),
        parts.make_gif: gr.update(interactive=has_all),
        parts.gif: gr.update(value=None, interactive=False),
        parts.script: gr.update(value=str(context.temp_storage.write_text("mmspec_run.py", code))),
        parts.code: code if len(report.request.content) <= MAX_SHOWN_BYTES else LONG_CODE,
    }
