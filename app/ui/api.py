"""What programs call, through `gradio_client`: `/compare` and `/caption`. The same work as the pages, in one answer.

Both are generators that give nothing until the end: as soon as a client has gone, Gradio stops iterating, which ends
the run.
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
from mmspec.app.io import videos as clips
from mmspec.app.ui.batch import CaptionBatch
from mmspec.app.ui.comparison import ComparisonRun
from mmspec.app.ui.context import DEVICE_QUEUE, Context, report_errors
from mmspec.app.ui.report import build_report
from mmspec.app.ui.worker import CancelSignal, LeftQueueError

report_errors_as_text = functools.partial(report_errors, format_message=str)
"""Programs get the sentence itself, not as HTML."""


def register_endpoints(context: Context) -> None:
    """Register both. Their parts are there for Gradio alone, and never shown."""
    shelf = context.model_store

    @report_errors_as_text
    def compare(
        file: str,
        question: str | None = None,
        model: str = shelf.model_names[0],
        drafter: str = shelf.drafter_names[0],
        compressor: str = "none",
        temperature: float = 0,
        seed: float = 0,
        max_new_tokens: float = 128,
    ) -> Iterator[dict[str, Any] | None]:
        choice = context.parse_settings(model, drafter, compressor, temperature, seed, max_new_tokens)
        is_clip = Path(file or "").suffix.lower() in clips.SUFFIXES
        asked = context.limits.check_question(default_prompt(is_clip) if question is None else question)
        given = context.limits.check_media_path(file)
        with open_session(context) as halt:
            race = ComparisonRun(context.model_store, lambda: context.limits.load_media(given), (), asked, choice, halt)
            with report_left_queue():
                for _ in context.worker.submit_and_poll(race.run, halt):
                    yield None
            if race.loaded_model is None:
                raise UsageError("The app was ended before this could be answered.")
            yield build_report(race).as_dict()

    @report_errors_as_text
    def caption(
        files: list[str],
        prompt: str = "",
        model: str = shelf.model_names[0],
        drafter: str = shelf.drafter_names[0],
        compressor: str = "none",
        temperature: float = 0,
        seed: float = 0,
        max_new_tokens: float = 64,
    ) -> Iterator[list[dict[str, Any]] | None]:
        choice = context.parse_settings(model, drafter, compressor, temperature, seed, max_new_tokens)
        given = context.limits.check_files(files)
        asked = context.limits.check_question(prompt) if (prompt or "").strip() else None
        batch = CaptionBatch(
            context.model_store, given, asked, choice, context.limits, context.temp_storage.new_folder()
        )
        with open_session(context) as halt:
            with report_left_queue():
                for _ in context.worker.submit_and_poll(lambda: batch.run(halt), halt):
                    yield None
            yield batch.rows

    with gr.Row(visible=False):
        _add_endpoint(context, "compare", compare, gr.File(), None, 128)
        _add_endpoint(context, "caption", caption, gr.File(file_count="multiple"), "", 64)


@contextmanager
def report_left_queue() -> Iterator[None]:
    """A run that left the line is an error to a program."""
    try:
        yield
    except LeftQueueError:
        raise UsageError("The run was ended before it began.") from None


@contextmanager
def open_session(context: Context) -> Iterator[CancelSignal]:
    """A run among those of the pages, so that it ends with the app."""
    name = f"api {secrets.token_hex(8)}"  # one client may have several in the queue
    try:
        yield context.sessions.begin(name)
    finally:
        context.sessions.end(name)


def _add_endpoint(
    context: Context, name: str, fn: Callable[..., Any], file: Any, prompt: str | None, tokens: int
) -> None:
    shelf = context.model_store
    inputs = [
        file,
        gr.Textbox(prompt),
        gr.Textbox(shelf.model_names[0]),
        gr.Textbox(shelf.drafter_names[0]),
        gr.Textbox("none"),
        gr.Number(0),
        gr.Number(0),
        gr.Number(tokens),
    ]
    gr.Button(name).click(fn, inputs, gr.JSON(), api_name=name, **DEVICE_QUEUE)


__all__ = ["register_endpoints"]
