"""Which names the server answers to, and from which origins: no other site may use the app through a visitor's browser.

A page of another site can resolve its own name to 127.0.0.1 (DNS rebinding) and then reads the app as its own origin;
its requests still carry its name in `Host`. Without rebinding the browser sends `Origin` and `Sec-Fetch-Site`.
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
    """An answer of one line instead of the page."""

    status: int
    text: str


@dataclass(frozen=True)
class Authority:
    """A host name or address in lower case, without brackets, and its port if one is given."""

    name: str
    port: int | None = None


def parse_authority(text: str) -> Authority | None:
    """What `Host` names: `name`, `name:port`, `[address]:port`; None if it is nothing of the kind."""
    found = AUTHORITY_PATTERN.fullmatch(text.strip().lower())
    if found is None:
        return None
    port = None if found["port"] is None else int(found["port"])
    if port is not None and port > 65535:
        return None
    return Authority((found["v6"] or found["name"]).rstrip("."), port)


def parse_origin(text: str) -> Authority | None:
    """What `Origin` names, with the port that its scheme implies; None for `null` and all that is no web origin."""
    scheme, _, rest = text.strip().lower().partition("://")
    found = parse_authority(rest) if scheme in DEFAULT_PORTS else None
    return None if found is None else Authority(found.name, found.port or DEFAULT_PORTS[scheme])


def parse_allowed_host(text: str) -> Authority:
    """An entry of `--allowed-host`.

    Raises:
        ValueError: no name, address, or one of them with a port.
    """
    found = parse_authority(text)
    if found is None or not found.name or "://" in text:
        raise ValueError(f"must be a host name or address, or one with :PORT, such as demo.example.org; got {text!r}")
    return found


class HostPolicy:
    """The names that the server answers to."""

    def __init__(self, bind_address: str = "127.0.0.1", allowed: Iterable[str] = ()) -> None:
        """bound: the address that the server listens on. allowed: more names, each with or without a port."""
        self.allowed = tuple(parse_allowed_host(name) for name in allowed)
        name = bind_address.strip("[]").lower()
        self.own_names = LOOPBACK_HOSTS | ({name} - WILDCARD_ADDRESSES)

    def is_served(self, found: Authority | None, server: tuple[str, int], scheme: str = "http") -> bool:
        """Whether a name is the server's. server: the local address and port of the connection."""
        if found is None:
            return False
        port = found.port or DEFAULT_PORTS.get(scheme, 80)
        if any(found.name == one.name and one.port in (None, port) for one in self.allowed):
            return True
        return port == server[1] and (found.name in self.own_names or _same_address(found.name, server[0]))

    def check(
        self, headers: Mapping[str, list[str]], server: tuple[str, int], request: RequestInfo
    ) -> ErrorResponse | None:
        """Why a request is refused for where it goes or comes from; None if it is not."""
        names = headers.get("host", [])
        if len(names) != 1 or not self.is_served(parse_authority(names[0]), server, request.scheme):
            told = ascii(names[0])[:80] if names else "none"
            return ErrorResponse(421, f"Host {told} is not served here; name it with --allowed-host if it should be.")
        origins = headers.get("origin", [])
        trusted = len(origins) == 1 and self.is_served(parse_origin(origins[0]), server, "http")
        if origins and not trusted:
            return ErrorResponse(403, f"Origin {ascii(origins[0])[:80]} may not use this app.")
        sites = headers.get("sec-fetch-site", [])
        foreign = any(site.strip().lower() not in ("same-origin", "none") for site in sites)
        if foreign and not trusted and not request.is_page_navigation(headers):
            return ErrorResponse(403, "Requests of other sites are refused.")
        return None

    def allows_forwarded(self, value: str, server: tuple[str, int]) -> bool:
        """Whether an `X-Forwarded-Host` names listed hosts only."""
        return all(self.is_served(parse_authority(one), server, "http") for one in value.split(","))


@dataclass(frozen=True)
class RequestInfo:
    """What of a request decides whether it may come from another site."""

    method: str
    path: str
    scheme: str = "http"

    def is_page_navigation(self, headers: Mapping[str, list[str]]) -> bool:
        """Whether it is a link to the page itself that a person follows, not a frame, picture or script."""
        first = {name: headers.get(name, [""])[0] for name in ("sec-fetch-mode", "sec-fetch-dest")}
        link = first == {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
        return link and self.method in ("GET", "HEAD") and self.path == "/"


def _same_address(name: str, local: str) -> bool:
    """Whether `name` is the address, not a name that resolves to it, of this end of the connection."""
    try:
        return ipaddress.ip_address(name) == ipaddress.ip_address(local)
    except ValueError:
        return False


__all__ = [
    "Authority",
    "ErrorResponse",
    "HostPolicy",
    "RequestInfo",
    "parse_allowed_host",
    "parse_authority",
    "parse_origin",
]
