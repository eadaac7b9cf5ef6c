"""The Batch tab: many pictures or clips to a table of captions, and a file of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gradio as gr

from mmspec.app.caption.config import PROMPT
from mmspec.app.errors import UsageError
from mmspec.app.io import images, videos
from mmspec.app.io.sources import MANIFESTS
from mmspec.app.scenes.examples import list_example_files
from mmspec.app.ui import render
from mmspec.app.ui.batch import COMPARED_FILES, CaptionBatch, write_parquet
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
from mmspec.app.ui.plots import caption_curve
from mmspec.app.ui.tabs.run_events import RUN_EVENT, RunControls, begin_run, connect_run_end
from mmspec.app.ui.worker import Client, LeftQueueError

BATCH_INTRO = (
    "Captions of many files: the model describes each picture or clip, with mmspec. Plain <code>generate</code> "
    f"describes the first {COMPARED_FILES} too, so that the speed-up is known. Captions are saved as JSONL or Parquet."
)
ROW_FORMATS = (
    "JSONL and Parquet hold the same rows, one per file: <code>file_name</code>, <code>caption</code>, "
    "<code>prompt</code>, <code>error</code> (empty, or why there is no caption), <code>n_new_tokens</code>, "
    "<code>tau</code>, and how it was made. One text file per picture: <code>mmspec caption --format txt</code>."
)
OUT_OF_DOMAIN_NOTE = (
    "not like the drawn pictures that the small built-in model was trained on, so expect a wrong caption; start the "
    "demo with a model for photographs (mmspec demo --model)."
)


@dataclass(frozen=True)
class BatchComponents:
    """Components of the tab that its events read or update."""

    uploads: Any
    prompt: Any
    start: Any
    cancel: Any
    download: Any
    parquet: Any
    status: Any
    curve: Any
    table: Any


def build_batch_tab(context: Context) -> None:
    """Create the tab and connect its events."""
    gr.HTML(f'<p class="mm-intro">{BATCH_INTRO}</p>')
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
            settings = build_controls(context, 128, "batch")
        with gr.Column(scale=5, min_width=320):
            with gr.Row():
                start = gr.Button("Caption all", variant="primary", elem_id="mm-start", min_width=120)
                cancel = gr.Button("Cancel", variant="stop", interactive=False, elem_id="mm-cancel", min_width=120)
                download = gr.DownloadButton("JSONL", interactive=False, elem_id="mm-rows", min_width=120)
                has_parquet = find_spec("pyarrow") is not None
                parquet = gr.DownloadButton("Parquet", interactive=False, elem_id="mm-parquet", min_width=120)
            if not has_parquet:
                gr.HTML('<p class="mm-legend">Parquet needs pyarrow: pip install pyarrow</p>')
            gr.HTML(f'<p class="mm-legend">{ROW_FORMATS}</p>', elem_id="mm-formats")
            status = gr.HTML(render.render_status("Drop some files."), elem_id="mm-batch-status")
            curve = gr.HTML("", elem_id="mm-curve")
            table = gr.HTML(render.render_captions([]), elem_id="mm-captions")
    examples.click(lambda: [str(path) for path in list_example_files()], None, uploads, **UNQUEUED)
    parts = BatchComponents(uploads, prompt, start, cancel, download, parquet, status, curve, table)
    _connect_batch_events(context, parts, settings)


def _connect_batch_events(context: Context, parts: BatchComponents, settings: Controls) -> None:
    @functools.partial(report_errors, sessions=context.sessions)
    def begin(request: gr.Request) -> tuple[Any, Any]:
        return begin_run(context, request)

    @functools.partial(report_errors, sessions=context.sessions)
    def work(request: gr.Request, uploads: Any, prompt: Any, *values: Any) -> Iterator[dict[Any, Any]]:
        num_rendered = -1
        for batch, is_running in stream_batch(context, uploads, prompt, values, get_client(request)):
            text = format_queue_position(batch.num_ahead) if batch.num_ahead else format_progress(batch, is_running)
            updates: dict[Any, Any] = {parts.status: render.render_status(text)}
            if len(batch.rows) != num_rendered:
                num_rendered = len(batch.rows)
                updates[parts.table] = render.render_captions(batch.rows, batch.thumbnails)
                updates[parts.curve] = caption_curve(batch.rows)
            if not is_running:
                updates |= offer_files(batch, parts)
            yield updates

    controls = RunControls(parts.start, parts.cancel, parts.status)
    started = parts.start.click(begin, None, controls.buttons, **VALIDATION)
    running = started.success(
        work,
        [parts.uploads, parts.prompt, *settings.inputs],
        [parts.status, parts.table, parts.curve, parts.download, parts.parquet],
        preprocess=False,  # the given names of the files; Gradio still checks that they are uploads
        show_progress_on=[parts.status],
        **RUN_EVENT,
    )
    connect_run_end(context, controls, started, [running])


def offer_files(batch: CaptionBatch, parts: BatchComponents) -> dict[Any, Any]:
    """Updates of the download buttons when a batch has ended."""
    has_rows = len(batch.rows) > 0
    updates = {parts.download: gr.update(value=str(batch.output_file) if has_rows else None, interactive=has_rows)}
    if has_rows and find_spec("pyarrow") is not None:
        file = batch.output_file.with_suffix(".parquet")
        write_parquet(batch.rows, file)
        updates[parts.parquet] = gr.update(value=str(file), interactive=True)
    return updates


def read_uploads(uploads: Any) -> tuple[list[Path], list[str]]:
    """Paths and given names of uploaded files, from the value of an unprocessed `gr.File`."""
    files = [file for file in uploads or () if isinstance(file, dict) and isinstance(file.get("path"), str)]
    paths = [Path(file["path"]) for file in files]
    names = [str(file.get("orig_name") or path.name) for file, path in zip(files, paths, strict=True)]
    return paths, names


def stream_batch(
    context: Context, uploads: Any, prompt: str | None, settings: tuple[Any, ...], client: Client
) -> Iterator[tuple[CaptionBatch, bool]]:
    """Caption the files; yields the batch at every poll, and whether it is still running.

    Args:
        context: the app.
        uploads: value of an unprocessed `gr.File`.
        prompt: for files without their own; empty for the default.
        settings: values of the controls, as `Context.parse_settings` takes them.
        client: the page, and its network address.

    Raises:
        UsageError: the files, the prompt or the settings are refused, or the queue is full.
    """
    limits = context.limits
    cancel_signal = context.sessions.get_signal(client.session)
    paths, names = read_uploads(uploads)
    files = limits.check_files(paths)
    checked_prompt = limits.check_question(prompt) if (prompt or "").strip() else None
    run_settings = context.parse_settings(*settings)
    folder = context.temp_storage.new_folder()
    batch = CaptionBatch(context.model_store, files, checked_prompt, run_settings, limits, folder, names)
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
    text += "; cancelled, finished rows can be downloaded." if batch.cancelled else "."
    if batch.tau is not None:
        text += f" {format_speedup(batch)}"
    if batch.num_out_of_domain:
        files = "One file" if batch.num_out_of_domain == 1 else f"{batch.num_out_of_domain} files"
        text += f" {files}: {OUT_OF_DOMAIN_NOTE}"
    return text


def format_speedup(batch: CaptionBatch) -> str:
    """The speed-up of a batch with captions: measured on the files that plain `generate` described too."""
    forwards = f"{batch.tau:.2f} tokens per forward, where plain generate has 1"
    totals, speedup = batch.comparison, batch.speedup
    if totals is None or speedup is None:
        return f"In all {forwards}."
    compared = "one file" if totals.rows == 1 else f"{totals.rows} files"
    same = f"{totals.identical} of {totals.rows} captions identical"
    return f"In all {speedup:.2f}x the speed of plain generate, which described {compared} too ({same}); {forwards}."
