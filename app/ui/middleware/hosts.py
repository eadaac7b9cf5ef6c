"""Host names that the server answers to, and origins it trusts: no other site may use the app through a browser.

A page of another site can resolve its own name to 127.0.0.1 (DNS rebinding) and then reads the app as its own origin;
its requests still carry that name in `Host`. Without rebinding the browser sends `Origin` and `Sec-Fetch-Site`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

LOOPBACK_HOSTS = frozenset(("localhost", "127.0.0.1", "::1"))
WILDCARD_ADDRESSES = frozenset(("", "0.0.0.0", "::"))
DEFAULT_PORTS = {"http": 80, "https": 443}
AUTHORITY_PATTERN = re.compile(
    r"(?:\[(?P<v6>[0-9a-f:.]{2,45})\]|(?P<name>[a-z0-9_.-]{1,253}))(?::(?P<port>[0-9]{1,5}))?"
)


@dataclass(frozen=True)
class ErrorResponse:
    """A refusal: HTTP status, a body of one line, and headers besides the usual ones."""

    status: int
    text: str
    headers: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(frozen=True)
class Authority:
    """Host name or address in lower case, without brackets, and the port if one is given."""

    name: str
    port: int | None = None


def parse_authority(text: str) -> Authority | None:
    """Parse `name`, `name:port` or `[address]:port`, as in `Host`; None if it is none of them."""
    match = AUTHORITY_PATTERN.fullmatch(text.strip().lower())
    if match is None:
        return None
    port = None if match["port"] is None else int(match["port"])
    if port is not None and port > 65535:
        return None
    return Authority((match["v6"] or match["name"]).rstrip("."), port)


def parse_origin(text: str) -> Authority | None:
    """Parse `Origin`, with the default port of its scheme; None for `null` and anything but http and https."""
    scheme, _, rest = text.strip().lower().partition("://")
    authority = parse_authority(rest) if scheme in DEFAULT_PORTS else None
    return None if authority is None else Authority(authority.name, authority.port or DEFAULT_PORTS[scheme])


def parse_allowed_host(text: str) -> Authority:
    """Parse an argument of `--allowed-host`.

    Raises:
        ValueError: it is not a host name or address, with or without a port.
    """
    authority = parse_authority(text)
    if authority is None or not authority.name or "://" in text:
        raise ValueError(f"must be a host name or address, or one with :PORT, such as demo.example.org; got {text!r}")
    return authority


class HostPolicy:
    """Decides by `Host`, `Origin` and `Sec-Fetch-*` whether a request is served."""

    def __init__(self, bind_address: str = "127.0.0.1", allowed: Iterable[str] = ()) -> None:
        """Create the policy.

        Args:
            bind_address: the address that the server listens on.
            allowed: further host names, each with or without a port.

        Raises:
            ValueError: an allowed host is not a host name.
        """
        self.allowed = tuple(parse_allowed_host(name) for name in allowed)
        self.own_names = LOOPBACK_HOSTS | ({bind_address.strip("[]").lower()} - WILDCARD_ADDRESSES)

    def allow(self, name: str) -> None:
        """Answer to one more host name.

        Raises:
            ValueError: it is not a host name.
        """
        self.allowed = (*self.allowed, parse_allowed_host(name))

    def is_served(self, authority: Authority | None, server: tuple[str, int], scheme: str = "http") -> bool:
        """Whether an authority names this server.

        Args:
            authority: from `Host` or `Origin`; None is never served.
            server: local address and port of the connection.
            scheme: gives the port where the authority has none.
        """
        if authority is None:
            return False
        port = authority.port or DEFAULT_PORTS.get(scheme, 80)
        if any(authority.name == other.name and other.port in (None, port) for other in self.allowed):
            return True
        return port == server[1] and (authority.name in self.own_names or _is_same_address(authority.name, server[0]))

    def check(
        self, headers: Mapping[str, list[str]], server: tuple[str, int], request: RequestInfo
    ) -> ErrorResponse | None:
        """The refusal of a request for its host or origin; None if it is served."""
        hosts = headers.get("host", [])
        if len(hosts) != 1 or not self.is_served(parse_authority(hosts[0]), server, request.scheme):
            received = ascii(hosts[0])[:80] if hosts else "none"
            return ErrorResponse(421, f"Host {received} is not served here; --allowed-host adds a name.")
        origins = headers.get("origin", [])
        is_trusted = len(origins) == 1 and self.is_served(parse_origin(origins[0]), server, "http")
        if origins and not is_trusted:
            return ErrorResponse(403, f"Origin {ascii(origins[0])[:80]} may not use this app.")
        sites = headers.get("sec-fetch-site", [])
        is_cross_site = any(site.strip().lower() not in ("same-origin", "none") for site in sites)
        if is_cross_site and not is_trusted and not request.is_page_navigation(headers):
            return ErrorResponse(403, "Requests of other sites are refused.")
        return None

    def allows_forwarded(self, value: str, server: tuple[str, int]) -> bool:
        """Whether an `X-Forwarded-Host` names served hosts only."""
        return all(self.is_served(parse_authority(host), server, "http") for host in value.split(","))


@dataclass(frozen=True)
class RequestInfo:
    """Properties of a request that decide whether another site may send it."""

    method: str
    path: str
    scheme: str = "http"

    def is_page_navigation(self, headers: Mapping[str, list[str]]) -> bool:
        """Whether a user follows a link to the page itself; frames, pictures and scripts are not navigations."""
        fetch = {name: headers.get(name, [""])[0] for name in ("sec-fetch-mode", "sec-fetch-dest")}
        is_navigation = fetch == {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
        return is_navigation and self.method in ("GET", "HEAD") and self.path == "/"


def _is_same_address(name: str, local: str) -> bool:
    """Whether `name` is an IP address equal to the local one. A name that resolves to it is not."""
    try:
        return ipaddress.ip_address(name) == ipaddress.ip_address(local)
    except ValueError:
        return False
