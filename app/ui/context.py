"""What all pages share: the models, the worker, limits and temporary files; and how their errors are told."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html import escape
from typing import Any

import gradio as gr

from mmspec.app.errors import UsageError
from mmspec.app.ui.limits import Limits
from mmspec.app.ui.model_store import COMPRESSOR_CHOICES, ModelStore, RunSettings
from mmspec.app.ui.report import TempStorage
from mmspec.app.ui.worker import MAX_QUEUED_RUNS, SessionRegistry, Worker

logger = logging.getLogger("mmspec")

DEVICE_QUEUE: dict[str, Any] = {"concurrency_limit": MAX_QUEUED_RUNS + 4, "concurrency_id": "device"}
"""For every event that needs the device. The line is the worker's: who waits there sees his place, and can leave it."""
PRIVATE_API: dict[str, Any] = {"api_visibility": "private"}
FAILURE_MESSAGE = "That did not work; the message says why."
UNQUEUED: dict[str, Any] = {"queue": False, "show_progress": "hidden", **PRIVATE_API}
VALIDATION: dict[str, Any] = {**UNQUEUED, "queue": True, "concurrency_limit": None}
"""For quick events that may refuse: of those outside the queue Gradio 6.31 shows no error. Where an output is not to
be covered by the word "Error", `show_progress_on` names another."""


@dataclass
class Context:
    """One running app."""

    model_store: ModelStore
    temp_storage: TempStorage
    limits: Limits = field(default_factory=Limits)
    worker: Worker = field(default_factory=Worker)
    sessions: SessionRegistry = field(default_factory=SessionRegistry)

    def parse_settings(
        self,
        model: str,
        drafter: str,
        compressor: str | None,
        temperature: float,
        seed: float,
        max_new_tokens: float,
        tree_size: str | None = None,
    ) -> RunSettings:
        """What a page chose, checked.

        Raises:
            UsageError: something on it cannot be.
        """
        few = None if compressor in (None, "", "none") else str(compressor)[:40]
        self.model_store.check_names(model, drafter)
        size = (
            None
            if tree_size in (None, "", "automatic")
            else int(self.limits.check_number("Tree size", _number(tree_size), 1, 64))
        )
        return RunSettings(
            model=model,
            drafter=drafter,
            compressor=few,
            temperature=self.limits.check_number("Temperature", temperature, 0, 5),
            seed=int(self.limits.check_number("Seed", seed, 0, 2**53)),
            max_new_tokens=int(
                self.limits.check_number("Most new tokens", max_new_tokens, 1, self.limits.max_new_tokens)
            ),
            tree_size=size,
        )


def format_queue_position(ahead: int) -> str:
    """What a visitor reads whose run is not the next."""
    return f"Waiting in the queue: {ahead} {'run' if ahead == 1 else 'runs'} ahead of yours. Stop leaves the queue."


def _number(text: Any) -> Any:
    return int(text) if isinstance(text, str) and text.isdecimal() else text


@dataclass(frozen=True)
class Controls:
    """The settings that a tab offers."""

    model: Any
    drafter: Any
    compressor: Any
    temperature: Any
    seed: Any
    max_new_tokens: Any
    tree_size: Any

    @property
    def inputs(self) -> list[Any]:
        """In the order of `Context.choice`."""
        return [
            self.model,
            self.drafter,
            self.compressor,
            self.temperature,
            self.seed,
            self.max_new_tokens,
            self.tree_size,
        ]


def build_controls(context: Context, max_new_tokens: int, name: str) -> Controls:
    """Draw the settings. `name` makes their ids differ from those of other tabs."""
    shelf = context.model_store
    with gr.Accordion("Settings", open=False, elem_id=f"{name}-settings"):
        with gr.Row():
            model = gr.Dropdown(shelf.model_names, value=shelf.model_names[0], label="Model", elem_id=f"{name}-model")
            drafter = gr.Dropdown(
                shelf.drafter_names, value=shelf.drafter_names[0], label="Drafter", elem_id=f"{name}-drafter"
            )
            compressor = gr.Dropdown(
                list(COMPRESSOR_CHOICES),
                value="none",
                label="Compressor",
                info="What the drafter is shown of the picture",
                allow_custom_value=True,
            )
        with gr.Row():
            most = gr.Slider(1, context.limits.max_new_tokens, value=max_new_tokens, step=1, label="Most new tokens")
            temperature = gr.Slider(0, 2, value=0, step=0.1, label="Temperature", info="0 takes the likeliest token")
            seed = gr.Number(0, precision=0, label="Seed", minimum=0)
            nodes = gr.Dropdown(
                ["automatic", "2", "4", "8", "16", "32"],
                value="automatic",
                label="Tree size",
                info="Automatic is never slower; a fixed size shows more",
            )
    return Controls(model, drafter, compressor, temperature, seed, most, nodes)


def report_errors(fn: Callable[..., Any], format_message: Callable[[str], str] = escape) -> Callable[..., Any]:
    """`fn`, whose errors reach the page as one sentence and never as a stack trace. For functions and generators.

    Args:
        shown: what is done to the sentence. Pages read it as HTML, programs do not.
    """
    if inspect.isgeneratorfunction(fn):

        @functools.wraps(fn)
        def steps(*args: Any, **kwargs: Any) -> Iterator[Any]:
            try:
                yield from fn(*args, **kwargs)
            except Exception as error:
                raise to_gradio_error(error, format_message) from None

        return steps

    @functools.wraps(fn)
    def plain(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            raise to_gradio_error(error, format_message) from None

    return plain


def to_gradio_error(error: Exception, format_message: Callable[[str], str] = escape) -> gr.Error:
    """An error as one sentence."""
    from mmspec.app.modeling.captioner import out_of_memory

    if isinstance(error, gr.Error):
        return error
    if isinstance(error, UsageError):
        text = str(error)
    elif out_of_memory(error):
        text = "There is not enough memory for this; ask for fewer tokens, or take a smaller picture."
    else:
        logger.error("mmspec: a page failed", exc_info=error)
        text = "Something went wrong here; the terminal that runs mmspec demo says what."
    return gr.Error(format_message(text), print_exception=False)


__all__ = [
    "DEVICE_QUEUE",
    "FAILURE_MESSAGE",
    "PRIVATE_API",
    "UNQUEUED",
    "VALIDATION",
    "Context",
    "Controls",
    "build_controls",
    "format_queue_position",
    "report_errors",
    "to_gradio_error",
]
