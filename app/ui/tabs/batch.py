"""The Batch tab: many pictures or clips to a table of captions, and a file of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from mmspec.app.caption.config import PROMPT
from mmspec.app.errors import UsageError
from mmspec.app.io import images
from mmspec.app.io import videos as clips
from mmspec.app.io.sources import MANIFESTS
from mmspec.app.scenes.examples import list_example_files
from mmspec.app.ui import render as render
from mmspec.app.ui.batch import CaptionBatch
from mmspec.app.ui.context import (
    DEVICE_QUEUE,
    FAILURE_MESSAGE,
    PRIVATE_API,
    UNQUEUED,
    VALIDATION,
    Context,
    build_controls,
    format_queue_position,
    report_errors,
)
from mmspec.app.ui.worker import LeftQueueError


def build_batch_tab(context: Context) -> None:
    """Draw the tab."""
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            uploads = gr.File(
                file_count="multiple",
                file_types=sorted(images.SUFFIXES | clips.SUFFIXES | MANIFESTS),
                label="Pictures, clips, or a list with them",
                height=220,
                elem_id="mm-files",
            )
            examples = gr.Button("Take the example files", elem_id="mm-take-examples")
            prompt = gr.Textbox(
                "", label="Prompt", placeholder=f"{PROMPT} (a list may bring its own)", elem_id="mm-prompt"
            )
            settings = build_controls(context, 64, "batch")
        with gr.Column(scale=5, min_width=320):
            with gr.Row():
                start = gr.Button("Caption all", variant="primary", elem_id="mm-start", min_width=90)
                cancel = gr.Button("Cancel", variant="stop", interactive=False, elem_id="mm-cancel", min_width=90)
                download = gr.DownloadButton("Download JSONL", interactive=False, elem_id="mm-rows", min_width=90)
            status = gr.HTML(render.render_status("Drop some files."), elem_id="mm-batch-status")
            table = gr.HTML(render.render_captions([]), elem_id="mm-captions")

    examples.click(lambda: [str(path) for path in list_example_files()], None, uploads, **UNQUEUED)

    @report_errors
    def begin(request: gr.Request) -> tuple[Any, Any]:
        context.sessions.begin(str(request.session_hash))
        return gr.update(interactive=False), gr.update(interactive=True)

    @report_errors
    def work(request: gr.Request, paths: Any, asked: Any, *chosen: Any) -> Iterator[dict[Any, Any]]:
        drawn = -1
        for batch, busy in stream_batch(context, paths, asked, chosen, str(request.session_hash)):
            values = {
                status: render.render_status(
                    format_queue_position(batch.num_ahead) if batch.num_ahead else format_progress(batch, busy)
                )
            }
            if len(batch.rows) != drawn:
                drawn = len(batch.rows)
                values[table] = render.render_captions(batch.rows)
            if not busy:
                values[download] = gr.update(value=str(batch.output_file) if drawn else None, interactive=drawn > 0)
            yield values

    def end(request: gr.Request) -> tuple[Any, Any]:
        context.sessions.end(str(request.session_hash))
        return gr.update(interactive=True), gr.update(interactive=False)

    def failed(request: gr.Request) -> tuple[Any, Any, str]:
        return (*end(request), render.render_status(FAILURE_MESSAGE))

    def halt(request: gr.Request) -> None:
        context.sessions.cancel(request.session_hash)

    started = start.click(begin, None, [start, cancel], **VALIDATION)
    running = started.success(
        work,
        [uploads, prompt, *settings.inputs],
        [status, table, download],
        show_progress="minimal",
        show_progress_on=[status],
        **DEVICE_QUEUE,
        **PRIVATE_API,
    )
    running.then(end, None, [start, cancel], **UNQUEUED)
    running.failure(failed, None, [start, cancel, status], **UNQUEUED)  # gradio 6.31 leaves `then` out after an error
    cancel.click(halt, None, None, **UNQUEUED)


def stream_batch(
    context: Context, paths: Any, prompt: str | None, chosen: tuple[Any, ...], session: str
) -> Iterator[tuple[CaptionBatch, bool]]:
    """Caption the files; yields the batch now and then, and whether it is still going.

    Raises:
        UsageError: the files, the prompt or the settings do not do.
    """
    limits, halt = context.limits, context.sessions.get_signal(session)
    given = limits.check_files([Path(path) for path in paths or ()])
    asked = limits.check_question(prompt) if (prompt or "").strip() else None
    batch = CaptionBatch(
        context.model_store, given, asked, context.parse_settings(*chosen), limits, context.temp_storage.new_folder()
    )
    try:
        for ahead in context.worker.submit_and_poll(lambda: batch.run(halt), halt, yield_first=True):
            batch.num_ahead = ahead
            yield batch, True
    except LeftQueueError:
        batch.discard()
    except UsageError:
        batch.discard()
        raise
    yield batch, False


def format_progress(batch: CaptionBatch, busy: bool) -> str:
    """How far a batch has come."""
    done, failed = len(batch.rows), sum(1 for row in batch.rows if row["error"])
    text = f"{done} of {batch.total} done" + (f", {failed} failed" if failed else "")
    if busy:
        return f"{text}; working."
    return f"{text}; cancelled, what is done can be downloaded." if batch.cancelled else f"{text}."


__all__ = ["build_batch_tab", "format_progress", "stream_batch"]
