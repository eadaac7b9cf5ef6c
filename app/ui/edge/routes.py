"""The routes that are served: a list of what the pages and `gradio_client` need. Gradio registers some sixty more."""

from __future__ import annotations

import re
from dataclasses import dataclass

READ = frozenset(("GET", "HEAD"))
POST = frozenset(("POST",))
NAME, HASH = r"[A-Za-z0-9_]{1,64}", r"[^/\x00-\x1f]{1,128}"


@dataclass(frozen=True)
class Door:
    """A route, its methods, and what its requests carry: "none", "json" or "files"."""

    pattern: re.Pattern[str]
    methods: frozenset[str]
    body: str = "none"


def _door(pattern: str, methods: frozenset[str] = READ, body: str = "none") -> Door:
    return Door(re.compile(pattern, re.DOTALL), methods, body)


API = "/gradio_api"
DOORS = (
    _door(r"/"),
    _door(r"/(assets|static)/[A-Za-z0-9_@.,+/-]{1,200}"),
    _door(r"/(config|config/|theme\.css|favicon\.ico|manifest\.json|robots\.txt)"),
    _door(rf"{API}/(info|info/|theme\.css|startup-events|app_id|queue/status|queue/data|upload_progress)"),
    _door(rf"{API}/heartbeat/{HASH}"),
    _door(rf"{API}/file=.{{1,2000}}"),
    _door(rf"{API}/call/(v2/)?(?!v2/){NAME}/{HASH}"),
    _door(rf"{API}/(run|api|call|call/v2)/{NAME}/?", POST, "json"),
    _door(rf"{API}/(queue/join|cancel|reset|reset/)", POST, "json"),
    _door(rf"{API}/upload", POST, "files"),
)
"""Not among them: /monitoring (shows the session names of all visitors), /proxy=, /vibe-*, /dev/reload, /stream,
/component_server, /custom_component, /process_recording, deep links, logins, run history, profiling."""


def door_of(path: str) -> Door | None:
    """The door at a decoded path; None if there is none."""
    return next((door for door in DOORS if door.pattern.fullmatch(path)), None)


__all__ = ["DOORS", "Door", "door_of"]
