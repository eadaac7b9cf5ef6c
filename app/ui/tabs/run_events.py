"""Events that the tabs with a run share: their buttons follow the run, and the page can cancel it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from mmspec.app.ui.context import DEVICE_QUEUE, PRIVATE_API, UNQUEUED, Context, describe_error, get_client
from mmspec.app.ui.render import render_status

RUN_EVENT: dict[str, Any] = {"show_progress": "minimal", **DEVICE_QUEUE, **PRIVATE_API}
"""Event options of the handler that runs on the device."""


@dataclass(frozen=True)
class RunControls:
    """Components of a tab that follow its run."""

    start: Any
    cancel: Any
    status: Any

    @property
    def buttons(self) -> list[Any]:
        """The outputs that `begin_run` updates."""
        return [self.start, self.cancel]


def begin_run(context: Context, request: gr.Request) -> tuple[Any, Any]:
    """Register a run of the page; returns the updates of `RunControls.buttons`.

    Raises:
        UsageError: the page has an active run.
    """
    context.sessions.begin(get_client(request).session)
    return gr.update(interactive=False), gr.update(interactive=True)


UNKNOWN_FAILURE = "The run ended with an error; start it again."


def connect_run_end(
    context: Context,
    controls: RunControls,
    started: Any,
    events: Sequence[Any],
    on_failure: Callable[[Exception | None], dict[Any, Any]] = lambda error: {},
    failure_outputs: Sequence[Any] = (),
) -> None:
    """Let the cancel button cancel the run, and reset the buttons when the run has ended or failed.

    Why it failed stays in the status line until the next run.

    Args:
        context: the app.
        controls: of the tab.
        started: the event that begins the run. A run that it refuses leaves everything but the status as it is.
        events: of the run, each started by the success of the one before. Gradio 6.31 skips `then` after an error.
        on_failure: further updates of `failure_outputs` after an error, which is None if it is not known.
        failure_outputs: of `on_failure`.
    """

    def end(request: gr.Request) -> tuple[Any, Any]:
        context.sessions.end(get_client(request).session)
        return gr.update(interactive=True), gr.update(interactive=False)

    def fail(request: gr.Request) -> dict[Any, Any]:
        error = context.sessions.take_failure(get_client(request).session)
        buttons = dict(zip(controls.buttons, end(request), strict=True))
        return {**on_failure(error), **buttons, controls.status: render_failure(error)}

    def refuse(request: gr.Request) -> str:
        return render_failure(context.sessions.take_failure(get_client(request).session))

    def cancel_run(request: gr.Request) -> None:
        context.sessions.cancel(request.session_hash)

    started.failure(refuse, None, controls.status, **UNQUEUED)
    events[-1].then(end, None, controls.buttons, **UNQUEUED)
    for event in events:
        event.failure(fail, None, [*controls.buttons, controls.status, *failure_outputs], **UNQUEUED)
    controls.cancel.click(cancel_run, None, None, **UNQUEUED)


def render_failure(error: Exception | None) -> str:
    """The status line of a run that failed; an error that is not known did not come from its handlers."""
    return render_status(UNKNOWN_FAILURE if error is None else describe_error(error), "mm-error")
