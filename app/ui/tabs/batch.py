"""The Batch tab: many pictures or clips to a table of captions, and a file of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from mmspec.app.caption.config import PROMPT
from mmspec.app.errors import UsageError
from mmspec.app.io import images, videos
from mmspec.app.io.sources import MANIFESTS
from mmspec.app.scenes.examples import list_example_files
from mmspec.app.ui import render
from mmspec.app.ui.batch import CaptionBatch
from mmspec.app.ui.context import (
    UNQUEUED,
    VALIDATION,
    Context,
    Controls,
    build_controls,
    format_queue_position,
    get_client,
    report_errors,
)
from mmspec.app.ui.tabs.run_events import RUN_EVENT, RunControls, begin_run, connect_run_end
from mmspec.app.ui.worker import Client, LeftQueueError


@dataclass(frozen=True)
class BatchComponents:
    """Components of the tab that its events read or update."""

    uploads: Any
    prompt: Any
    start: Any
    cancel: Any
    download: Any
    status: Any
    table: Any


def build_batch_tab(context: Context) -> None:
    """Create the tab and connect its events."""
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            uploads = gr.File(
                file_count="multiple",
                file_types=sorted(images.IMAGE_SUFFIXES | videos.VIDEO_SUFFIXES | MANIFESTS),
                label="Pictures, clips, or a list with them",
                height=220,
                elem_id="mm-files",
            )
            examples = gr.Button("Use the example files", elem_id="mm-take-examples")
            prompt = gr.Textbox(
                "", label="Prompt", placeholder=f"{PROMPT} (a list may contain its own)", elem_id="mm-prompt"
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
    _connect_batch_events(context, BatchComponents(uploads, prompt, start, cancel, download, status, table), settings)


def _connect_batch_events(context: Context, parts: BatchComponents, settings: Controls) -> None:
    @report_errors
    def begin(request: gr.Request) -> tuple[Any, Any]:
        return begin_run(context, request)

    @report_errors
    def work(request: gr.Request, paths: Any, prompt: Any, *values: Any) -> Iterator[dict[Any, Any]]:
        num_rendered = -1
        for batch, is_running in stream_batch(context, paths, prompt, values, get_client(request)):
            text = format_queue_position(batch.num_ahead) if batch.num_ahead else format_progress(batch, is_running)
            updates: dict[Any, Any] = {parts.status: render.render_status(text)}
            if len(batch.rows) != num_rendered:
                num_rendered = len(batch.rows)
                updates[parts.table] = render.render_captions(batch.rows)
            if not is_running:
                file = str(batch.output_file) if num_rendered else None
                updates[parts.download] = gr.update(value=file, interactive=num_rendered > 0)
            yield updates

    controls = RunControls(parts.start, parts.cancel, parts.status)
    started = parts.start.click(begin, None, controls.buttons, **VALIDATION)
    running = started.success(
        work,
        [parts.uploads, parts.prompt, *settings.inputs],
        [parts.status, parts.table, parts.download],
        show_progress_on=[parts.status],
        **RUN_EVENT,
    )
    connect_run_end(context, controls, [running])


def stream_batch(
    context: Context, paths: Any, prompt: str | None, settings: tuple[Any, ...], client: Client
) -> Iterator[tuple[CaptionBatch, bool]]:
    """Caption the files; yields the batch at every poll, and whether it is still running.

    Args:
        context: the app.
        paths: uploaded files.
        prompt: for files without their own; empty for the default.
        settings: values of the controls, as `Context.parse_settings` takes them.
        client: the page, and its network address.

    Raises:
        UsageError: the files, the prompt or the settings are refused, or the queue is full.
    """
    limits = context.limits
    cancel_signal = context.sessions.get_signal(client.session)
    files = limits.check_files([Path(path) for path in paths or ()])
    checked_prompt = limits.check_question(prompt) if (prompt or "").strip() else None
    run_settings = context.parse_settings(*settings)
    folder = context.temp_storage.new_folder()
    batch = CaptionBatch(context.model_store, files, checked_prompt, run_settings, limits, folder)
    work = functools.partial(batch.run, cancel_signal)
    try:
        for num_ahead in context.worker.submit_and_poll(work, cancel_signal, yield_first=True, client=client):
            batch.num_ahead = num_ahead
            yield batch, True
    except LeftQueueError:
        batch.discard()
    except UsageError:
        batch.discard()
        raise
    yield batch, False


def format_progress(batch: CaptionBatch, is_running: bool) -> str:
    """Number of rows that are done and that failed."""
    num_done = len(batch.rows)
    num_failed = sum(1 for row in batch.rows if row["error"])
    text = f"{num_done} of {batch.total} done" + (f", {num_failed} failed" if num_failed else "")
    if is_running:
        return f"{text}; running."
    return f"{text}; cancelled, finished rows can be downloaded." if batch.cancelled else f"{text}."


__all__ = ["build_batch_tab", "format_progress", "stream_batch"]
