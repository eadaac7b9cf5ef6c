"""Endpoints for programs, through `gradio_client`: `/compare` and `/caption`. They run the same jobs as the tabs.

Both handlers are generators that yield None until the result: when a client disconnects, Gradio stops iterating, which
ends the run.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gradio as gr

from mmspec.app.caption.config import default_prompt
from mmspec.app.errors import UsageError
from mmspec.app.io import videos
from mmspec.app.ui.batch import CaptionBatch
from mmspec.app.ui.comparison import ComparisonRun
from mmspec.app.ui.context import DEVICE_QUEUE, Context, get_client, report_errors
from mmspec.app.ui.report import build_report
from mmspec.app.ui.worker import CancelSignal, LeftQueueError

report_errors_as_text = functools.partial(report_errors, format_message=str)
"""`report_errors` for programs, which do not render the message as HTML."""


def register_endpoints(context: Context) -> None:
    """Register both endpoints. Gradio ties endpoints to components; these are invisible."""
    store = context.model_store

    @report_errors_as_text
    def compare(
        request: gr.Request,
        file: str,
        question: str | None = None,
        model: str = store.model_names[0],
        drafter: str = store.drafter_names[0],
        compressor: str = "none",
        temperature: float = 0,
        seed: float = 0,
        max_new_tokens: float = 128,
    ) -> Iterator[dict[str, Any] | None]:
        settings = context.parse_settings(model, drafter, compressor, temperature, seed, max_new_tokens)
        is_clip = Path(file or "").suffix.lower() in videos.VIDEO_SUFFIXES
        prompt = context.limits.check_question(default_prompt(is_clip) if question is None else question)
        path = context.limits.check_media_path(file)
        with open_session(context) as cancel_signal:
            run = ComparisonRun(
                context.model_store, lambda: context.limits.load_media(path), (), prompt, settings, cancel_signal
            )
            with report_left_queue():
                for _ in context.worker.submit_and_poll(run.run, cancel_signal, client=get_client(request)):
                    yield None
            if run.loaded_model is None:
                raise UsageError("The app was stopped before this run started.")
            yield build_report(run).as_dict()

    @report_errors_as_text
    def caption(
        request: gr.Request,
        files: list[str],
        prompt: str = "",
        model: str = store.model_names[0],
        drafter: str = store.drafter_names[0],
        compressor: str = "none",
        temperature: float = 0,
        seed: float = 0,
        max_new_tokens: float = 64,
    ) -> Iterator[list[dict[str, Any]] | None]:
        settings = context.parse_settings(model, drafter, compressor, temperature, seed, max_new_tokens)
        paths = context.limits.check_files(files)
        checked_prompt = context.limits.check_question(prompt) if (prompt or "").strip() else None
        folder = context.temp_storage.new_folder()
        batch = CaptionBatch(context.model_store, paths, checked_prompt, settings, context.limits, folder)
        with open_session(context) as cancel_signal:
            with report_left_queue():
                work = functools.partial(batch.run, cancel_signal)
                for _ in context.worker.submit_and_poll(work, cancel_signal, client=get_client(request)):
                    yield None
            yield batch.rows

    with gr.Row(visible=False):
        _add_endpoint(context, "compare", compare, gr.File(), None, 128)
        _add_endpoint(context, "caption", caption, gr.File(file_count="multiple"), "", 64)


@contextmanager
def report_left_queue() -> Iterator[None]:
    """Raise `UsageError` where the run was cancelled before it started."""
    try:
        yield
    except LeftQueueError:
        raise UsageError("The run was cancelled before it started.") from None


@contextmanager
def open_session(context: Context) -> Iterator[CancelSignal]:
    """Register a run under a name of its own, so that it ends with the app; a client may have several in the queue."""
    name = f"api {secrets.token_hex(8)}"
    try:
        yield context.sessions.begin(name)
    finally:
        context.sessions.end(name)


def _add_endpoint(
    context: Context, name: str, fn: Callable[..., Any], file: Any, prompt: str | None, max_new_tokens: int
) -> None:
    store = context.model_store
    inputs = [
        file,
        gr.Textbox(prompt),
        gr.Textbox(store.model_names[0]),
        gr.Textbox(store.drafter_names[0]),
        gr.Textbox("none"),
        gr.Number(0),
        gr.Number(0),
        gr.Number(max_new_tokens),
    ]
    gr.Button(name).click(fn, inputs, gr.JSON(), api_name=name, **DEVICE_QUEUE)
