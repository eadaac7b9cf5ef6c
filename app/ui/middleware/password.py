"""A password for all requests, by HTTP Basic authentication: browsers ask for it once, programs send a header.

Checked here and not by Gradio's login, whose routes are not served.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import secrets
from collections.abc import Mapping

from mmspec.app.ui.middleware.hosts import ErrorResponse

MIN_PASSWORD_CHARS = 12
"""Shortest password that may be chosen: attempts are not counted, so that it must not be guessable."""
STARTUP_PATH = "/gradio_api/startup-events"
"""Gradio requests it from itself at the start, without a password. It tells nothing, and does nothing a second time."""
CHALLENGE = ErrorResponse(
    401,
    "This app needs a password; any user name will do.",
    ((b"www-authenticate", b'Basic realm="mmspec demo", charset="UTF-8"'),),
)


def generate_password() -> str:
    """A random password of 96 bits."""
    return secrets.token_urlsafe(12)


class PasswordGate:
    """Refuses requests without the password. The user name is ignored."""

    def __init__(self, password: str) -> None:
        """Create the gate.

        Raises:
            ValueError: the password is too short.
        """
        if len(password) < MIN_PASSWORD_CHARS:
            raise ValueError(f"the password must have at least {MIN_PASSWORD_CHARS} characters; got {len(password)}")
        self._password = password.encode()

    def check(self, headers: Mapping[str, list[str]], path: str) -> ErrorResponse | None:
        """The refusal of a request; None if it carries the password."""
        if path == STARTUP_PATH:
            return None
        values = headers.get("authorization", [])
        given = _parse_password(values[0]) if len(values) == 1 else None
        return None if given is not None and hmac.compare_digest(given, self._password) else CHALLENGE


def _parse_password(value: str) -> bytes | None:
    """The password of an `Authorization` header; None if it is not of the scheme Basic."""
    scheme, _, encoded = value.partition(" ")
    if scheme.lower() != "basic" or len(encoded) > 1000:
        return None
    try:
        _, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
    except (binascii.Error, ValueError):
        return None
    return password if colon else None
