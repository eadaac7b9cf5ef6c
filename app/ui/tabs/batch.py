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
from mmspec.app.scenes.examples import files
from mmspec.app.ui import render as drawing
from mmspec.app.ui.batch import Batch
from mmspec.app.ui.context import FAILED, HIDDEN, IN_LINE, QUICK, REFUSING, Context, controls, queued, told
from mmspec.app.ui.worker import LeftError


def batch_tab(context: Context) -> None:
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
            settings = controls(context, 64, "batch")
        with gr.Column(scale=5, min_width=320):
            with gr.Row():
                start = gr.Button("Caption all", variant="primary", elem_id="mm-start", min_width=90)
                cancel = gr.Button("Cancel", variant="stop", interactive=False, elem_id="mm-cancel", min_width=90)
                download = gr.DownloadButton("Download JSONL", interactive=False, elem_id="mm-rows", min_width=90)
            status = gr.HTML(drawing.status("Drop some files."), elem_id="mm-batch-status")
            table = gr.HTML(drawing.captions([]), elem_id="mm-captions")

    examples.click(lambda: [str(path) for path in files()], None, uploads, **QUICK)

    @told
    def begin(request: gr.Request) -> tuple[Any, Any]:
        context.sessions.begin(str(request.session_hash))
        return gr.update(interactive=False), gr.update(interactive=True)

    @told
    def work(request: gr.Request, paths: Any, asked: Any, *chosen: Any) -> Iterator[dict[Any, Any]]:
        drawn = -1
        for batch, busy in steps(context, paths, asked, chosen, str(request.session_hash)):
            values = {status: drawing.status(queued(batch.ahead) if batch.ahead else progress(batch, busy))}
            if len(batch.rows) != drawn:
                drawn = len(batch.rows)
                values[table] = drawing.captions(batch.rows)
            if not busy:
                values[download] = gr.update(value=str(batch.file) if drawn else None, interactive=drawn > 0)
            yield values

    def end(request: gr.Request) -> tuple[Any, Any]:
        context.sessions.end(str(request.session_hash))
        return gr.update(interactive=True), gr.update(interactive=False)

    def failed(request: gr.Request) -> tuple[Any, Any, str]:
        return (*end(request), drawing.status(FAILED))

    def halt(request: gr.Request) -> None:
        context.sessions.stop(request.session_hash)

    started = start.click(begin, None, [start, cancel], **REFUSING)
    running = started.success(
        work,
        [uploads, prompt, *settings.all],
        [status, table, download],
        show_progress="minimal",
        show_progress_on=[status],
        **IN_LINE,
        **HIDDEN,
    )
    running.then(end, None, [start, cancel], **QUICK)
    running.failure(failed, None, [start, cancel, status], **QUICK)  # gradio 6.31 leaves `then` out after an error
    cancel.click(halt, None, None, **QUICK)


def steps(
    context: Context, paths: Any, prompt: str | None, chosen: tuple[Any, ...], session: str
) -> Iterator[tuple[Batch, bool]]:
    """Caption the files; yields the batch now and then, and whether it is still going.

    Raises:
        UsageError: the files, the prompt or the settings do not do.
    """
    limits, halt = context.limits, context.sessions.of(session)
    given = limits.many([Path(path) for path in paths or ()])
    asked = limits.question(prompt) if (prompt or "").strip() else None
    batch = Batch(context.shelf, given, asked, context.choice(*chosen), limits, context.space.new())
    try:
        for ahead in context.worker.follow(lambda: batch.run(halt), halt, first=True):
            batch.ahead = ahead
            yield batch, True
    except LeftError:
        batch.leave()
    except UsageError:
        batch.leave()
        raise
    yield batch, False


def progress(batch: Batch, busy: bool) -> str:
    """How far a batch has come."""
    done, failed = len(batch.rows), sum(1 for row in batch.rows if row["error"])
    text = f"{done} of {batch.total} done" + (f", {failed} failed" if failed else "")
    if busy:
        return f"{text}; working."
    return f"{text}; cancelled, what is done can be downloaded." if batch.stopped else f"{text}."


__all__ = ["batch_tab", "progress", "steps"]
