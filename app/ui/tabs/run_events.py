"""Events that the tabs with a run share: their buttons follow the run, and the page can cancel it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from mmspec.app.ui.context import DEVICE_QUEUE, FAILURE_MESSAGE, PRIVATE_API, UNQUEUED, Context, get_client
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


def connect_run_end(context: Context, controls: RunControls, events: Sequence[Any]) -> None:
    """Let the cancel button cancel the run, and reset the buttons when the run has ended or failed.

    Args:
        context: the app.
        controls: of the tab.
        events: of the run, each started by the success of the one before. Gradio 6.31 skips `then` after an error.
    """

    def end(request: gr.Request) -> tuple[Any, Any]:
        context.sessions.end(get_client(request).session)
        return gr.update(interactive=True), gr.update(interactive=False)

    def fail(request: gr.Request) -> tuple[Any, Any, str]:
        return (*end(request), render_status(FAILURE_MESSAGE))

    def cancel_run(request: gr.Request) -> None:
        context.sessions.cancel(request.session_hash)

    events[-1].then(end, None, controls.buttons, **UNQUEUED)
    for event in events:
        event.failure(fail, None, [*controls.buttons, controls.status], **UNQUEUED)
    controls.cancel.click(cancel_run, None, None, **UNQUEUED)


__all__ = ["RUN_EVENT", "RunControls", "begin_run", "connect_run_end"]
