"""Gradio's server app behind `RequestFilter`, and without stack traces on stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import gradio.queueing
import gradio.routes
from gradio.routes import App, ORJSONResponse

from mmspec.app.errors import one_line
from mmspec.app.ui.middleware.request_filter import RequestFilter

logger = logging.getLogger("mmspec")

MODULES_WITH_TRACEBACKS = (gradio.queueing, gradio.routes)
"""Modules of Gradio that call `traceback.print_exc` when a handler fails."""


class FilteredApp(App):
    """Gradio's app with a `RequestFilter` outside all of its own middleware."""

    def __init__(self, wrap: Callable[[Any], RequestFilter]) -> None:
        super().__init__(default_response_class=ORJSONResponse, openapi_url=None)
        self._wrap = wrap

    def build_middleware_stack(self) -> Any:
        """See FastAPI. Called once, when the server starts."""
        return self._wrap(super().build_middleware_stack())


@contextmanager
def suppress_tracebacks() -> Iterator[None]:
    """Within this block Gradio logs one line per failed handler instead of a stack trace on stderr."""
    originals = [module.traceback for module in MODULES_WITH_TRACEBACKS]
    for module in MODULES_WITH_TRACEBACKS:
        module.traceback = SimpleNamespace(print_exc=_log_request_error)
    try:
        yield
    finally:
        for module, original in zip(MODULES_WITH_TRACEBACKS, originals, strict=True):
            module.traceback = original


def _log_request_error(*_: Any, **__: Any) -> None:
    error = sys.exc_info()[1]
    if error is not None:
        logger.warning("mmspec: a request failed: %s: %s", type(error).__name__, ascii(one_line(error, 200)))
        logger.debug("mmspec: stack trace", exc_info=error)
