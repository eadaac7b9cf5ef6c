"""Bytes of an http or https address, within limits of size, time and place. Knows nothing of pictures.

A table of addresses is not trusted: by default only public addresses are connected to, so that a row cannot read the
services of this machine or its network. The address of the open connection is checked, not a name that may change.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import urllib.error
import urllib.request
from typing import Any

from mmspec.app.errors import one_line

FETCH_TIMEOUT_S = 20.0
"""Seconds without data after which an address is given up."""
CHUNK_BYTES = 1 << 20


class FetchError(Exception):
    """An address cannot be read.

    Attributes:
        kind: short identifier of the cause.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def _check_public(connection: socket.socket) -> None:
    """Refuse the peer of an open connection if it is not on the public internet.

    Raises:
        FetchError: a private, local or reserved address.
    """
    address = str(connection.getpeername()[0]).partition("%")[0]
    if not ipaddress.ip_address(address).is_global:
        connection.close()
        raise FetchError("AddressNotAllowed", f"{address} is not a public address; --urls any permits it")


class _PublicHTTPConnection(http.client.HTTPConnection):
    def connect(self) -> None:
        super().connect()
        _check_public(self.sock)


class _PublicHTTPSConnection(http.client.HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        _check_public(self.sock)


class _PublicHTTPHandler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_PublicHTTPConnection, req)


class _PublicHTTPSHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_PublicHTTPSConnection, req)


def fetch(url: str, max_bytes: int, *, public_only: bool = True) -> bytes:
    """The body of `url`, at most `max_bytes + 1` bytes of it.

    Args:
        public_only: refuse private addresses. A proxy of the environment decides for itself and is not checked.

    Raises:
        FetchError: not an http(s) address, not allowed, not there, or no answer in `FETCH_TIMEOUT_S`.
    """
    if not url.lower().startswith(("http://", "https://")):
        raise FetchError("AddressNotAllowed", f"only http and https addresses are read, got {url[:80]!r}")
    checked = public_only and not urllib.request.getproxies()
    handlers = (_PublicHTTPHandler, _PublicHTTPSHandler) if checked else ()
    opener = urllib.request.OpenerDirector()
    standard = (
        urllib.request.ProxyHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPRedirectHandler,  # follows http and https only, for there are no other handlers
        urllib.request.HTTPErrorProcessor,
    )
    plain = () if checked else (urllib.request.HTTPHandler, urllib.request.HTTPSHandler)
    for handler in (*standard, *handlers, *plain):
        opener.add_handler(handler())
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "mmspec"})
        with opener.open(request, timeout=FETCH_TIMEOUT_S) as answer:
            return b"".join(iter(_limited(answer, max_bytes), b""))
    except FetchError:
        raise
    except urllib.error.HTTPError as error:
        raise FetchError("HttpError", f"{error.code} {error.reason}: {url[:200]}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        cause = getattr(error, "reason", error)
        if isinstance(cause, FetchError):
            raise cause from error
        text = one_line(cause) if isinstance(cause, BaseException) else str(cause)
        raise FetchError("HttpError", f"{text}: {url[:200]}") from error


def _limited(answer: Any, max_bytes: int) -> Any:
    """A function that returns the next chunk, and nothing after `max_bytes + 1` bytes."""
    left = max_bytes + 1

    def read() -> bytes:
        nonlocal left
        chunk: bytes = answer.read(min(CHUNK_BYTES, left)) if left else b""
        left -= len(chunk)
        return chunk

    return read


__all__ = ["FetchError", "fetch"]
