"""The response to one request on its way out of Gradio: headers added, errors replaced by one line."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from mmspec.app.errors import one_line
from mmspec.app.ui.middleware.bodies import Message
from mmspec.app.ui.middleware.hosts import ErrorResponse

logger = logging.getLogger("mmspec")

Send = Callable[[Message], Awaitable[None]]
Scope = dict[str, Any]
RESPONSE_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"SAMEORIGIN"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


EVENT_STREAM = b"text/event-stream"
UNBUFFERED = (b"x-accel-buffering", b"no")
"""Tells nginx, and proxies that follow it, to pass an event stream on as it comes."""


class FilteredResponse:
    """The response to one request: Gradio's with other headers, or an `ErrorResponse`.

    Attributes:
        origin: trusted `Origin` of the request, which may read the response.
        error: refusal decided while Gradio was reading the body; replaces its response.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self.scope = scope
        self._send = send
        self.origin: str | None = None
        self.error: ErrorResponse | None = None
        self._has_started = False
        self._withheld = list[Message]()

    async def send(self, message: Message) -> None:
        """Pass a message of Gradio on. A status 500 is withheld until its cause is known."""
        if self.error is not None and not self._has_started:
            return
        if message["type"] == "http.response.start":
            if message["status"] == 500:
                self._withheld.append(message)
                return
            self._has_started = True
            headers = [(name, value) for name, value in message.get("headers", []) if not _is_cors_header(name)]
            if any(name.lower() == b"content-type" and value.startswith(EVENT_STREAM) for name, value in headers):
                headers = [*(one for one in headers if one[0].lower() != UNBUFFERED[0]), UNBUFFERED]
            message = {**message, "headers": [*headers, *RESPONSE_HEADERS, *self._cors_headers()]}
        elif self._withheld:
            self._withheld.append(message)
            return
        await self._send(message)

    def _cors_headers(self) -> list[tuple[bytes, bytes]]:
        """Lets a trusted origin read the response."""
        vary = [(b"vary", b"Origin")]
        return [(b"access-control-allow-origin", self.origin.encode("latin-1")), *vary] if self.origin else vary

    async def send_preflight(self) -> None:
        """Answer the CORS preflight of a trusted origin."""
        headers = [
            *self._cors_headers(),
            (b"access-control-allow-methods", b"GET, HEAD, POST"),
            (b"access-control-allow-headers", b"content-type"),
        ]
        self._has_started = True
        await self._send({"type": "http.response.start", "status": 204, "headers": headers})
        await self._send({"type": "http.response.body", "body": b""})

    async def finish(self) -> None:
        """Complete the response after Gradio returned."""
        if self.error is not None and not self._has_started:
            await self.refuse(self.error)
        elif self._withheld:  # a page handler failed on its inputs, and has logged why
            await self.refuse(ErrorResponse(422, "The inputs of this request cannot be processed."))

    async def refuse(self, error: ErrorResponse) -> None:
        """Send and log a refusal."""
        client = (self.scope.get("client") or ("?",))[0]
        path = ascii(self.scope["path"])[:100]
        logger.info("mmspec: refused (%d) %s %s %s: %s", error.status, client, self.scope["method"], path, error.text)
        await self._send_error(error)

    async def fail(self, error: Exception) -> None:
        """Send and log that Gradio raised an error, nearly always because of the request."""
        if self.error is not None:
            await self.refuse(self.error)
            return
        path = ascii(self.scope["path"])[:100]
        reason = ascii(one_line(error, 200))
        logger.warning("mmspec: failed: %s %s: %s: %s", self.scope["method"], path, type(error).__name__, reason)
        logger.debug("mmspec: stack trace", exc_info=error)
        is_server_error = isinstance(error, OSError | MemoryError)
        status, text = (500, "Storage error.") if is_server_error else (400, "The request cannot be processed.")
        await self._send_error(ErrorResponse(status, text))

    async def _send_error(self, error: ErrorResponse) -> None:
        if self._has_started:
            return
        self._has_started = True
        body = (error.text + "\n").encode("utf-8", "replace")
        headers = [
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", b"%d" % len(body)),
            *RESPONSE_HEADERS,
            *error.headers,
            (b"connection", b"close"),  # the unread rest of the body would be parsed as the next request
        ]
        await self._send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": b"" if self.scope["method"] == "HEAD" else body})


def _is_cors_header(name: bytes) -> bool:
    return name.lower().startswith(b"access-control-")
