"""Responses on their way out: headers that Gradio does not set, and a line in the log for each refusal and failure."""

from __future__ import annotations

import logging

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmspec.app.errors import one_line

logger = logging.getLogger("mmspec")

RESPONSE_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "SAMEORIGIN",
    "referrer-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Outermost:
    """The layer around all others. Websockets are closed: the pages need none."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        has_started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                _add_headers(scope, message)
            await send(message)

        try:
            await self.app(scope, receive, send_with_headers)
        except Exception as error:
            name, reason = type(error).__name__, ascii(one_line(error, 200))
            logger.warning("mmspec: failed: %s %s: %s: %s", scope["method"], _quote(scope["path"]), name, reason)
            logger.debug("mmspec: stack trace", exc_info=error)
            if not has_started:
                await answer_error(Request(scope), error)(scope, receive, send_with_headers)


def answer_error(_: Request, error: Exception) -> Response:
    """The answer to an error that Gradio raised, nearly always because of the request."""
    if isinstance(error, OSError | MemoryError):
        return PlainTextResponse("Storage error.\n", 500)
    return PlainTextResponse("The request cannot be processed.\n", 400)


def _add_headers(scope: Scope, message: Message) -> None:
    headers = MutableHeaders(scope=message)
    headers.update(RESPONSE_HEADERS)
    if headers.get("content-type", "").startswith("text/event-stream"):
        headers["x-accel-buffering"] = "no"  # nginx, and proxies that follow it, pass the stream on as it comes
    if message["status"] >= 400:
        headers["connection"] = "close"  # the rest of a body may be unread
        client, host = (scope.get("client") or ("?",))[0], dict(scope["headers"]).get(b"host", b"")
        where = f"{scope['method']} {_quote(scope['path'])} at {_quote(host.decode('latin-1'))}"
        logger.info("mmspec: refused (%d) %s %s", message["status"], client, where)


def _quote(text: str) -> str:
    return ascii(text)[:100]
