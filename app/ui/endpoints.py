"""What programs call, through `gradio_client`: `/compare` and `/caption`. The same work as the pages, in one answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradio as gr

from mmspec.app.settings import PROMPT
from mmspec.app.ui.context import ONE_AT_A_TIME, Context, told
from mmspec.app.ui.folder import Batch
from mmspec.app.ui.race import Race
from mmspec.app.ui.report import report_of
from mmspec.app.ui.worker import Halt


def endpoints(context: Context) -> None:
    """Register both. Their parts are there for Gradio alone, and never shown."""
    shelf = context.shelf

    @told
    def compare(
        file: str,
        question: str = PROMPT,
        model: str = shelf.models[0],
        drafter: str = shelf.drafters[0],
        compressor: str = "none",
        temperature: float = 0,
        seed: float = 0,
        max_new_tokens: float = 128,
    ) -> dict[str, Any]:
        choice = context.choice(model, drafter, compressor, temperature, seed, max_new_tokens)
        asked, shown, halt = context.limits.question(question), context.limits.shown(file), Halt()
        race = Race(context.shelf, shown, (), asked, choice, halt)
        context.worker.wait(race.run, halt)
        return report_of(race).as_dict()

    @told
    def caption(
        files: list[str],
        prompt: str = "",
        model: str = shelf.models[0],
        drafter: str = shelf.drafters[0],
        compressor: str = "none",
        temperature: float = 0,
        seed: float = 0,
        max_new_tokens: float = 64,
    ) -> list[dict[str, Any]]:
        choice = context.choice(model, drafter, compressor, temperature, seed, max_new_tokens)
        given, halt = context.limits.many(files), Halt()
        asked = context.limits.question(prompt) if (prompt or "").strip() else None
        batch = Batch(context.shelf, given, asked, choice, context.limits, context.space.new())
        context.worker.wait(lambda: batch.run(halt), halt)
        return batch.rows

    with gr.Row(visible=False):
        _register(context, "compare", compare, gr.File(), PROMPT, 128)
        _register(context, "caption", caption, gr.File(file_count="multiple"), "", 64)


def _register(context: Context, name: str, fn: Callable[..., Any], file: Any, prompt: str, tokens: int) -> None:
    shelf = context.shelf
    inputs = [
        file,
        gr.Textbox(prompt),
        gr.Textbox(shelf.models[0]),
        gr.Textbox(shelf.drafters[0]),
        gr.Textbox("none"),
        gr.Number(0),
        gr.Number(0),
        gr.Number(tokens),
    ]
    gr.Button(name).click(fn, inputs, gr.JSON(), api_name=name, **ONE_AT_A_TIME)


__all__ = ["endpoints"]
