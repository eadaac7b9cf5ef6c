"""Which names the server answers to, and the pages of which sites may send it requests.

A page of another site can resolve its own name to 127.0.0.1 (DNS rebinding) and then reads the app as its own origin;
its requests still carry that name in `Host`, which Starlette's `TrustedHostMiddleware` refuses. Without rebinding the
browser sends `Origin`.
"""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from mmspec.app.ui.middleware.names import ServedNames, host_of

ADDRESS_HEADERS = re.compile(rb"x-forwarded-host|x-gradio-server", re.IGNORECASE)
"""Headers from which Gradio takes the address of its own page."""


class KnownHosts(TrustedHostMiddleware):
    """Refuses an unknown `Host` with 400; the address that the connection was made to is known."""

    def __init__(self, app: ASGIApp, names: ServedNames) -> None:
        super().__init__(app, names.hosts, www_redirect=False)
        self.allowed_hosts = names.hosts  # the same list: a tunnel adds its name after the start

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        local = (scope.get("server") or ("", 0))[0]
        is_local = scope["type"] == "http" and local and _host_header(scope) in (local, f"[{local}]")
        await (self.app if is_local else super().__call__)(scope, receive, send)


class SameOrigin:
    """Refuses an `Origin` other than the page's own and the allowed ones.

    Gradio lets every site read the app at a name that is not of this machine, and every port of this machine otherwise.
    """

    def __init__(self, app: ASGIApp, names: ServedNames) -> None:
        self.app = app
        self.names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI. Address headers that name an unknown host are removed.

        Raises:
            HTTPException: the origin may not use the app.
        """
        if scope["type"] == "http":
            self._check(scope)
        await self.app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        trusted = [headers["host"].lower(), *self.names.origins]
        for origin in headers.getlist("origin"):
            scheme, _, authority = origin.lower().partition("://")
            if scheme not in ("http", "https") or authority not in trusted:
                raise HTTPException(403, f"Origin {ascii(origin)[:80]} may not use this app.")
        known = {host_of(name) for name in trusted} | set(self.names.hosts)
        scope["headers"] = [
            (name, value)
            for name, value in scope["headers"]
            if not ADDRESS_HEADERS.fullmatch(name) or _hosts_in(value.decode("latin-1")) <= known
        ]


def _host_header(scope: Scope) -> str:
    return host_of(Headers(scope=scope).get("host", ""))


def _hosts_in(value: str) -> set[str]:
    return {host_of(part.strip()) for part in value.split(",")}
