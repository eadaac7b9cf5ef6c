"""A password for all requests, by HTTP Basic authentication: browsers ask for it once, programs send a header.

Gradio's own login leaves `/cancel`, `/heartbeat` and the files of the page open to everybody.
"""

from __future__ import annotations

import hmac
import secrets

from fastapi.security import HTTPBasic
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

MIN_PASSWORD_CHARS = 12
"""Shortest password that may be chosen: attempts are not counted, so that it must not be guessable."""
STARTUP_PATH = "/gradio_api/startup-events"
"""Gradio requests it from itself at the start, without a password. It shows nothing, and does nothing a second time."""
CHALLENGE = {"WWW-Authenticate": 'Basic realm="mmspec demo"'}


def generate_password() -> str:
    """A random password of 96 bits."""
    return secrets.token_urlsafe(12)


def check_password(password: str) -> None:
    """Refuse a password that is too short, or that browsers would encode in different ways.

    Raises:
        ValueError: it is.
    """
    if len(password) < MIN_PASSWORD_CHARS or not password.isascii():
        raise ValueError(f"must have at least {MIN_PASSWORD_CHARS} characters, ASCII only; got {len(password)}")


class PasswordGate:
    """Refuses requests without the password. The user name is ignored."""

    def __init__(self, app: ASGIApp, password: str) -> None:
        self.app = app
        self._password = password.encode()
        self._basic = HTTPBasic(realm="mmspec demo", auto_error=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI.

        Raises:
            HTTPException: the password is missing or wrong.
        """
        if scope["type"] == "http" and scope["path"] != STARTUP_PATH:
            given = await self._basic(HTTPConnection(scope))
            if given is None or not hmac.compare_digest(given.password.encode(), self._password):
                raise HTTPException(401, "This app needs a password; any user name will do.", CHALLENGE)
        await self.app(scope, receive, send)
