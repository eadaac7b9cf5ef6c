"""Connections of one attempt to read an address: to public addresses only, and never slower than a minimum.

A time limit per read does not end a server that sends a byte a second, so the whole attempt has a pace (`Pace`), which
limits each wait: for the connection, the TLS handshake, the header and the body.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from typing import Any

from mmspec.vision.images import ImageError
from mmspec.vision.video.deadline import MAX_STEP_S

MIN_BYTES_PER_S = 128 << 10
"""Average rate of a body, below which an address is given up once the time for the answer has passed."""
CHUNK_BYTES = 1 << 20
MAX_REDIRECT_BYTES = 1 << 16
"""Read of the body of a redirect, which nobody needs."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_ALLOCATED = ipaddress.ip_network("2000::/3")
"""Of IPv6, what the IANA has allocated for global use: neither fec0::/10 nor whatever else no list has yet."""
_NOT_PUBLIC = tuple(map(ipaddress.ip_network, ("192.88.99.0/24", "3fff::/20")))
"""The old relays of 6to4, and documentation, which `ipaddress` takes for public."""
_ISATAP = (0x00005EFE, 0x02005EFE)
"""The upper half of the interface's identifier of an address whose lower half is one of IPv4 (RFC 5214)."""
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Pace:
    """Ends an attempt after `timeout_s`, plus the time that its bytes may take."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s, self._num_bytes = timeout_s, 0
        self._end = time.monotonic() + timeout_s

    def add(self, num_bytes: int) -> None:
        """Count bytes of the body."""
        self._num_bytes += num_bytes
        self._end += num_bytes / MIN_BYTES_PER_S

    def limit(self, connected: socket.socket) -> None:
        """Let the next wait of a socket end with the attempt.

        Raises:
            TimeoutError: the attempt has ended.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(self.describe())
        connected.settimeout(left)

    @property
    def was_suspended(self) -> bool:
        """Whether this process did not run when the attempt ended, and the other side may have given up."""
        return time.monotonic() - self._end > MAX_STEP_S

    def describe(self) -> str:
        """Why the attempt was ended."""
        seconds = f"no whole answer in {self.timeout_s:g} s"
        return f"{seconds} + 1 s per {MIN_BYTES_PER_S >> 10} KiB" if self._num_bytes else seconds


class _Paced(socket.socket):
    """A socket of an attempt."""

    pace: Pace

    def recv_into(self, *args: Any, **options: Any) -> int:
        self.pace.limit(self)
        return super().recv_into(*args, **options)


class _PacedTls(_Paced, ssl.SSLSocket):
    """The same with TLS."""


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet, and so is the IPv4 address that it may stand for."""
    found: _Address = ipaddress.ip_address(address.partition("%")[0])
    if any(found in network for network in _NOT_PUBLIC):
        return False
    if isinstance(found, ipaddress.IPv4Address):
        return found.is_global and not found.is_multicast and not found.is_reserved
    lower = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
    if found in _NAT64:
        return is_public(str(lower))
    inner = [found.sixtofour]  # Teredo is not global in any case
    if int(found) >> 32 & 0xFFFFFFFF in _ISATAP:
        inner.append(lower)
    return found in _ALLOCATED and found.is_global and all(is_public(str(one)) for one in inner if one is not None)


class PacedHTTPConnection(http.client.HTTPConnection):
    """A connection within a `Pace`; with `public_only` to public addresses."""

    def __init__(self, host: str, *, pace: Pace, public_only: bool, **options: Any) -> None:
        super().__init__(host, **options)
        self._pace, self._public_only = pace, public_only
        self._create_connection = self._connect_to
        self.response_class = _Answer

    def _connect_to(self, address: tuple[str, int], *_: object) -> socket.socket:
        """Connect to the first address of a host that answers.

        Raises:
            ImageError: one of its addresses is private, local or reserved.
            OSError: none answers.
        """
        failure = OSError("the name resolves to nothing")
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        for number in (str(one[4][0]) for one in found):
            self._check(number)
        for family, kind, protocol, _name, place in found:
            connection = _Paced(family, kind, protocol)
            connection.pace = self._pace
            try:
                self._pace.limit(connection)
                connection.connect(place)
                self._check(str(connection.getpeername()[0]))
                return connection
            except ImageError:
                connection.close()
                raise
            except OSError as error:
                connection.close()
                failure = error
        raise failure

    def _check(self, number: str) -> None:
        """Refuse an address that is not public, where only those are connected to.

        Raises:
            ImageError: it is not.
        """
        if self._public_only and not is_public(number):
            raise ImageError("AddressNotAllowed", f"{number} is not a public address; --urls any permits it")


class PacedHTTPSConnection(PacedHTTPConnection, http.client.HTTPSConnection):
    """The same with TLS."""

    def __init__(self, host: str, **options: Any) -> None:
        context = ssl.create_default_context()
        context.sslsocket_class = _PacedTls
        super().__init__(host, context=context, **options)

    def connect(self) -> None:
        """As of any connection."""
        super().connect()
        assert isinstance(self.sock, _PacedTls)
        self.sock.pace = self._pace


class _Answer(http.client.HTTPResponse):
    """A response that is never read to an end that may not come."""

    def read(self, amt: int | None = None) -> bytes:
        """At most `amt` bytes; without a number, as urllib reads redirects, `MAX_REDIRECT_BYTES`."""
        return super().read(MAX_REDIRECT_BYTES if amt is None else amt)
