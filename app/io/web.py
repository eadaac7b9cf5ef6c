"""Bytes of an http or https address, within limits of size, time and place. Knows nothing of pictures.

A table of addresses is not trusted: by default only public addresses are connected to, so that a row cannot read the
services of this machine or its network. What a name resolves to is checked, and that very address is connected to.
"""

from __future__ import annotations

import http.client
import os
import re
import socket
import string
import time
import urllib.error
import urllib.parse
import urllib.request
from datetime import UTC, datetime
from email.message import Message
from email.utils import parsedate_to_datetime
from typing import Any

from mmspec.app.errors import one_line
from mmspec.app.io.web_connection import CHUNK_BYTES, Pace, PacedHTTPConnection, PacedHTTPSConnection
from mmspec.app.versions import mmspec_version
from mmspec.vision.images import ImageError

FETCH_TIMEOUT_S = 20.0
"""Seconds that an answer may take, and `web_connection.MIN_BYTES_PER_S` for its bytes."""
MAX_FETCHES = 3
"""Connections to one address: the first, and two more after an error of the connection or a busy server."""
BUSY_STATUSES = (429, 503)
RETRY_WAITS_S = (0.5, 2.0)
"""Seconds before the second and the third attempt, where the server does not say."""
MAX_RETRY_AFTER_S = 30.0
"""Longest `Retry-After` that is waited for."""
MAX_URL_CHARS = 8192
USER_AGENT_VARIABLE = "MMSPEC_USER_AGENT"
"""Environment variable with the user agent: some servers want an address of who runs the job."""


class _Busy(Exception):
    """The server or the connection may do better later.

    Attributes:
        wait_s: what the server asks for; None: it does not say.
    """

    def __init__(self, failure: ImageError, wait_s: float | None = None) -> None:
        super().__init__(str(failure))
        self.failure, self.wait_s = failure, wait_s


class _PacedHandler(urllib.request.AbstractHTTPHandler):
    """Opens http and https with the limits of one attempt; the address is checked unless a proxy connects to it."""

    def __init__(self, pace: Pace, public_only: bool) -> None:
        super().__init__()
        self._pace, self._public_only = pace, public_only

    def _open(self, connection: type[PacedHTTPConnection], request: urllib.request.Request) -> Any:
        # `ProxyHandler` has run: it has put the proxy in the place of the host, for those requests that go to one.
        to_proxy = request.has_proxy() or getattr(request, "_tunnel_host", None) is not None
        checked = self._public_only and not to_proxy

        def open_connection(host: str, **options: Any) -> PacedHTTPConnection:
            return connection(host, pace=self._pace, public_only=checked, **options)

        return self.do_open(open_connection, request)

    def http_open(self, request: urllib.request.Request) -> Any:
        return self._open(PacedHTTPConnection, request)

    def https_open(self, request: urllib.request.Request) -> Any:
        return self._open(PacedHTTPSConnection, request)

    http_request = https_request = urllib.request.AbstractHTTPHandler.do_request_


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows http and https, at most ten times."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        return super().redirect_request(req, fp, code, msg, headers, _normalized(newurl))


def fetch(url: str, max_bytes: int, *, public_only: bool = True) -> bytes:
    """The body of `url`, at most `max_bytes + 1` bytes of it.

    A busy server (429, 503) and an error of the connection are tried twice more; `Retry-After` is obeyed.

    Args:
        public_only: refuse private addresses. A proxy of the environment that this address goes through decides for
            itself and is not checked.

    Raises:
        ImageError: not an http(s) address, not allowed, not there, cut short, or too slow: see `FETCH_TIMEOUT_S`.
    """
    address = _normalized(url)
    for attempt in range(MAX_FETCHES):
        try:
            return _attempt(address, max_bytes, public_only)
        except _Busy as busy:
            if attempt + 1 == MAX_FETCHES or (busy.wait_s or 0.0) > MAX_RETRY_AFTER_S:
                raise busy.failure from busy
            time.sleep(RETRY_WAITS_S[attempt] if busy.wait_s is None else busy.wait_s)
    raise AssertionError("the last attempt returns or raises")


def _normalized(url: str) -> str:
    """The address with its path percent-encoded as UTF-8 and its host in ASCII, as browsers do it.

    Raises:
        ImageError: not an http or https address with a host.
    """
    url = url.strip()
    shown = repr(url[:80])
    if not url.lower().startswith(("http://", "https://")):
        raise ImageError("AddressNotAllowed", f"only http and https addresses are read, got {shown}")
    if len(url) > MAX_URL_CHARS:
        raise ImageError("BadAddress", f"{len(url)} characters; the limit is {MAX_URL_CHARS}: {shown}")
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname or "", parts.port
        if not host.isascii():
            host = host.encode("idna").decode()
        path, query = (_percent_encoded(part) for part in (parts.path, parts.query))
    except ValueError as error:  # a port above 65535, an open bracket, a name that IDNA forbids, a lone surrogate
        raise ImageError("BadAddress", f"{one_line(error, 120)}: {shown}") from error
    if not host or re.search(r"[\x00-\x20\x7f<>\"\\^`{|}]", host):
        raise ImageError("BadAddress", f"an address names a host, as in http://example.org/a.jpg; got {shown}")
    if "@" in parts.netloc:
        raise ImageError("BadAddress", "addresses with a user name or password are not read")
    place = (f"[{host}]" if ":" in host else host) + (f":{port}" if port is not None else "")
    return urllib.parse.urlunsplit((parts.scheme, place, path or "/", query, ""))


def _percent_encoded(text: str) -> str:
    """`text` with what an address may not hold percent-encoded; what is encoded already stays as it is."""
    return urllib.parse.quote(re.sub(r"%(?![0-9A-Fa-f]{2})", "%25", text), safe=string.punctuation)


def _attempt(url: str, max_bytes: int, public_only: bool) -> bytes:
    """One attempt to read the body.

    Raises:
        ImageError: it failed for good.
        _Busy: another attempt may succeed.
    """
    shown, pace = url[:160], Pace(FETCH_TIMEOUT_S)
    try:
        request = urllib.request.Request(url, headers={"User-Agent": user_agent()})
        with _opener(pace, public_only).open(request, timeout=FETCH_TIMEOUT_S) as answer:
            expected = answer.length
            data = _body(answer, max_bytes, pace)
    except ImageError:
        raise
    except urllib.error.HTTPError as error:
        error.close()
        failure = ImageError("HttpError", f"{error.code} {_reason(error.reason)}: {shown}")
        if error.code in BUSY_STATUSES:
            raise _Busy(failure, _retry_after(error.headers)) from error
        raise failure from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        cause = getattr(error, "reason", error)
        if isinstance(cause, ImageError):
            raise cause from error
        if isinstance(cause, TimeoutError):
            failure = ImageError("TooSlow", f"{pace.describe()}: {shown}")
            raise (_Busy(failure) if pace.was_suspended else failure) from error
        failure = ImageError("HttpError", f"{_reason(cause)}: {shown}")
        if isinstance(cause, http.client.IncompleteRead):
            failure = ImageError("Truncated", f"the connection ended within the answer: {shown}")
        is_lost = isinstance(cause, ConnectionError | http.client.IncompleteRead | http.client.RemoteDisconnected)
        if is_lost or (isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_AGAIN):
            raise _Busy(failure) from error
        raise failure from error
    if expected is not None and len(data) < min(expected, max_bytes):
        raise _Busy(ImageError("Truncated", f"{len(data)} of {expected} bytes, then the connection ended: {shown}"))
    return data


def _reason(cause: object) -> str:
    """A cause of a failure, which may be an exception or a text, on one line."""
    return one_line(cause if isinstance(cause, BaseException) else Exception(cause), 160)


def _opener(pace: Pace, public_only: bool) -> urllib.request.OpenerDirector:
    """Opens http and https, through the proxies of the environment, and nothing else."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        _Redirects(),
        urllib.request.HTTPErrorProcessor(),
        _PacedHandler(pace, public_only),
    ):
        opener.add_handler(handler)
    return opener


def _body(answer: Any, max_bytes: int, pace: Pace) -> bytes:
    """The body, at most `max_bytes + 1` bytes of it."""
    parts: list[bytes] = []
    left = max_bytes + 1
    while left and (part := answer.read1(min(CHUNK_BYTES, left))):
        parts.append(part)
        left -= len(part)
        pace.add(len(part))
    return b"".join(parts)


def _retry_after(headers: Message) -> float | None:
    """Seconds that a server asks to wait, as a number or a date; None if it does not say."""
    text = (headers.get("Retry-After") or "").strip()
    if text.isdecimal():
        return float(text[:9])
    try:
        when = parsedate_to_datetime(text)
    except ValueError:
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())


def user_agent() -> str:
    """The value of `$MMSPEC_USER_AGENT`, else the name and version of this package."""
    return os.environ.get(USER_AGENT_VARIABLE) or f"mmspec/{mmspec_version()} (caption jobs)"
