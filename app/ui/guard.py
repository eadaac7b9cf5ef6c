"""The one check in front of the demo: which names it answers to, which sites may send requests, which paths there are.

A page of another site can resolve its own name to 127.0.0.1 (DNS rebinding) and would then read the app as its own
origin; its requests still carry that name in `Host`. Without rebinding the browser sends `Origin`.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("localhost", "127.0.0.1", "::1")
PATHS = re.compile(
    r"/((page|examples|report)/[\w.-]{1,200}|state|file|ask|compare|login|logout|gradio_api/startup-events)?"
)
"""The app's own paths, Gradio's login, and what Gradio asks itself at its start. Its API and pages are not needed."""
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Guard:
    """ASGI middleware.

    Attributes:
        hosts: names in `Host` besides those of this machine: of the tunnel, and of the proxy.
    """

    def __init__(self, app: ASGIApp, hosts: set[str]) -> None:
        self.app = app
        self.hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI. Websockets are closed: the page needs none."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        status, reason = self._check(scope)
        answer = self.app if not status else PlainTextResponse(f"{reason}\n", status)
        await answer(scope, receive, send_with_headers)

    def _check(self, scope: Scope) -> tuple[int, str]:
        """Status and reason of a refusal; 0 if there is none."""
        headers = Headers(scope=scope)
        authority, name = headers.get("host", "").lower(), host_of(headers.get("host", ""))
        if len(headers.getlist("host")) != 1 or name not in {*LOOPBACK, *self.hosts}:
            return 400, "Invalid host header"
        for origin in headers.getlist("origin"):
            scheme, _, sender = origin.lower().partition("://")
            if scheme not in ("http", "https") or (sender != authority and host_of(sender) not in self.hosts):
                return 403, f"Origin {ascii(origin)[:80]} may not use this app."
        if not PATHS.fullmatch(scope["path"]):
            return 404, "There is nothing here."
        return 0, ""


def host_of(authority: str) -> str:
    """The host of `name`, `name:port` or `[address]:port` in lower case; empty if it is none of them."""
    try:
        parts = urlsplit(f"//{authority}")
        is_plain = parts.netloc == authority and not (parts.path or parts.query or parts.fragment or "@" in authority)
        has_port = parts.port is not None or not authority.endswith(":")  # a port that is no number raises
        return (parts.hostname or "") if is_plain and has_port else ""
    except ValueError:
        return ""
