"""Allow-list of the routes that the pages and `gradio_client` need. Gradio registers about sixty more."""

from __future__ import annotations

import re
from dataclasses import dataclass

READ_METHODS = frozenset(("GET", "HEAD"))
POST = frozenset(("POST",))
NAME, HASH = r"[A-Za-z0-9_]{1,64}", r"[^/\x00-\x1f]{1,128}"


@dataclass(frozen=True)
class Route:
    """A served route.

    Attributes:
        pattern: matches the whole decoded path.
        methods: allowed HTTP methods.
        body: kind of request body: "none", "json" or "files".
    """

    pattern: re.Pattern[str]
    methods: frozenset[str]
    body: str = "none"


def _route(pattern: str, methods: frozenset[str] = READ_METHODS, body: str = "none") -> Route:
    return Route(re.compile(pattern, re.DOTALL), methods, body)


API_PREFIX = "/gradio_api"
ROUTES = (
    _route(r"/"),
    _route(r"/(assets|static)/[A-Za-z0-9_@.,+/-]{1,200}"),
    _route(r"/(config|config/|theme\.css|favicon\.ico|manifest\.json|robots\.txt)"),
    _route(rf"{API_PREFIX}/(info|info/|theme\.css|startup-events|app_id|queue/status|queue/data|upload_progress)"),
    _route(rf"{API_PREFIX}/heartbeat/{HASH}"),
    _route(rf"{API_PREFIX}/file=.{{1,2000}}"),
    _route(rf"{API_PREFIX}/call/(v2/)?(?!v2/){NAME}/{HASH}"),
    _route(rf"{API_PREFIX}/(run|api|call|call/v2)/{NAME}/?", POST, "json"),
    _route(rf"{API_PREFIX}/(queue/join|cancel|reset|reset/)", POST, "json"),
    _route(rf"{API_PREFIX}/upload", POST, "files"),
)
"""Not served: /monitoring (lists the session names of all visitors), /proxy=, /vibe-*, /dev/reload, /stream,
/component_server, /custom_component, /process_recording, deep links, logins, run history, profiling."""


def find_route(path: str) -> Route | None:
    """The served route of a decoded path; None if there is none."""
    return next((route for route in ROUTES if route.pattern.fullmatch(path)), None)
