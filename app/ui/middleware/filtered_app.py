"""Gradio's server app inside the layers of this package, and without stack traces on stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import gradio.queueing
import gradio.routes
from gradio.routes import App, ORJSONResponse
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware

from mmspec.app.errors import one_line
from mmspec.app.ui.middleware.bodies import UploadFolder
from mmspec.app.ui.middleware.hosts import KnownHosts, SameOrigin
from mmspec.app.ui.middleware.names import ServedNames
from mmspec.app.ui.middleware.password import PasswordGate
from mmspec.app.ui.middleware.requests import RequestFilter
from mmspec.app.ui.middleware.responses import Outermost, answer_error
from mmspec.app.ui.middleware.sessions import SessionCleaner

logger = logging.getLogger("mmspec")

MODULES_WITH_TRACEBACKS = (gradio.queueing, gradio.routes)
"""Modules of Gradio that call `traceback.print_exc` when a handler fails."""


class FilteredApp(App):
    """Gradio's app inside other layers. Gradio's own `add_middleware` would put them inside its CORS headers."""

    def __init__(self, layers: Sequence[Middleware]) -> None:
        handlers = {Exception: answer_error}
        super().__init__(default_response_class=ORJSONResponse, openapi_url=None, exception_handlers=handlers)
        self._layers = layers

    def build_middleware_stack(self) -> Any:
        """See Starlette. Called once, when the server starts."""
        app = super().build_middleware_stack()
        for layer, args, options in reversed(self._layers):
            app = layer(app, *args, **options)
        return app


def build_edge(
    names: ServedNames, uploads: UploadFolder, sessions: SessionCleaner, password: str | None = None
) -> list[Middleware]:
    """The layers around Gradio, the outermost first."""
    return [
        Middleware(Outermost),
        Middleware(ExceptionMiddleware),  # makes a response of an HTTPException
        Middleware(KnownHosts, names=names),
        Middleware(SameOrigin, names=names),
        *([Middleware(PasswordGate, password=password)] if password is not None else []),
        Middleware(RequestFilter, limits=uploads.request_limits, uploads=uploads, sessions=sessions),
    ]


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
