"""The names that a server answers to, as text: `Host`, `Origin` and `--allowed-host` are compared with them."""

from __future__ import annotations

import re
from collections.abc import Iterable

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")
WILDCARD_ADDRESSES = ("", "0.0.0.0", "::")
AUTHORITY_PATTERN = re.compile(r"(?P<host>\[[0-9a-f:.]{2,45}\]|[a-z0-9_.-]{1,253})(?::(?P<port>[0-9]{1,5}))?")


def parse_allowed_host(text: str) -> str:
    """Check an argument of `--allowed-host`; returns it in lower case.

    Raises:
        ValueError: it is not a host name or address, with or without a port.
    """
    match = AUTHORITY_PATTERN.fullmatch(text.lower())
    if match is None or int(match["port"] or 0) > 65535:
        raise ValueError(f"must be a host name or address, or one with :PORT, such as demo.example.org; got {text!r}")
    return match[0]


class ServedNames:
    """The names of one server.

    Attributes:
        hosts: names in `Host`, whatever the port: a browser names the port that it connects to.
        origins: `name` or `name:port` of trusted origins besides that of the page itself.
    """

    def __init__(self, bind_address: str = "127.0.0.1", allowed: Iterable[str] = ()) -> None:
        """Create the lists.

        Args:
            bind_address: the address that the server listens on.
            allowed: further host names, each with or without a port.

        Raises:
            ValueError: an allowed host is not a host name.
        """
        own = [bind_address.lower()] if bind_address not in WILDCARD_ADDRESSES else []
        self.hosts = [*LOOPBACK_HOSTS, *(f"[{name}]" if ":" in name and name[0] != "[" else name for name in own)]
        self.origins: list[str] = []
        for name in allowed:
            self.allow(name)

    def allow(self, name: str) -> None:
        """Answer to one more host name.

        Raises:
            ValueError: it is not a host name.
        """
        authority = parse_allowed_host(name)
        self.origins.append(authority)
        self.hosts.append(host_of(authority))


def host_of(authority: str) -> str:
    """The host of `name`, `name:port` or `[address]:port`; empty if it is none of them."""
    match = AUTHORITY_PATTERN.fullmatch(authority.lower())
    return match["host"] if match else ""
