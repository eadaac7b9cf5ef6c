"""Connections of one attempt to read an address: to public addresses only, and never slower than a minimum.

A time limit per read does not end a server that sends a byte a second, so the whole attempt has a pace (`Pace`), which
covers the connection, the TLS handshake, the header and the body.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Any

from mmspec.vision.images import ImageError
from mmspec.vision.video.deadline import Deadline
from mmspec.vision.video.worker_process import start_thread

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
    """Ends the connection of an attempt after `timeout_s`, plus the time that its bytes may take.

    Attributes:
        expired: the attempt was ended.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s, self.expired = timeout_s, False
        self._deadline, self._num_bytes = Deadline(timeout_s), 0
        self._done, self._lock = threading.Event(), threading.Lock()
        self._socket: socket.socket | None = None
        self._watcher = threading.Thread(target=self._watch, name="mmspec-fetch", daemon=True)

    def add(self, num_bytes: int) -> None:
        """Count bytes of the body."""
        self._num_bytes += num_bytes
        self._deadline.extend(num_bytes / MIN_BYTES_PER_S)

    def remaining(self) -> float:
        """Seconds until the attempt ends if nothing more comes."""
        return self._deadline.left_s

    @property
    def was_suspended(self) -> bool:
        """Whether this process did not run for a while, in which the other side may have given up."""
        return self._deadline.was_suspended

    def watch(self, connected: socket.socket) -> None:
        """Let `connected` end with the attempt, whatever wraps it later.

        Raises:
            TimeoutError: the attempt has ended.
        """
        copy = connected.dup()  # TLS takes the descriptor away from the object; a shutdown reaches all copies
        with self._lock:
            previous, self._socket = self._socket, copy
            if previous is not None:
                previous.close()
            if self.expired:
                raise TimeoutError(self.describe())

    def _watch(self) -> None:
        if self._deadline.wait(self._done):
            return
        with self._lock:
            self.expired = True
            if self._socket is not None:
                with suppress(OSError):  # closed by the other side
                    self._socket.shutdown(socket.SHUT_RDWR)

    def describe(self) -> str:
        """Why the attempt was ended."""
        seconds = f"no whole answer in {self.timeout_s:g} s"
        return f"{seconds} + 1 s per {MIN_BYTES_PER_S >> 10} KiB" if self._num_bytes else seconds

    def __enter__(self) -> Pace:
        start_thread(self._watcher)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None


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
            connection = socket.socket(family, kind, protocol)
            try:
                connection.settimeout(max(1e-3, min(self._pace.timeout_s, self._pace.remaining())))
                connection.connect(place)
                self._check(str(connection.getpeername()[0]))
                connection.settimeout(self._pace.timeout_s)
                self._pace.watch(connection)
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


class _Answer(http.client.HTTPResponse):
    """A response that is never read to an end that may not come."""

    def read(self, amt: int | None = None) -> bytes:
        """At most `amt` bytes; without a number, as urllib reads redirects, `MAX_REDIRECT_BYTES`."""
        return super().read(MAX_REDIRECT_BYTES if amt is None else amt)
