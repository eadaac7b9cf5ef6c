"""Gradio's events as requests name them: whether an event may start with these inputs, and whose stream one reads."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qs

from mmspec.app.ui.middleware.bodies import RefusedError, has_remote_path
from mmspec.app.ui.middleware.hosts import ErrorResponse
from mmspec.app.ui.middleware.response import Scope
from mmspec.app.ui.middleware.routes import API_PREFIX, READ_METHODS

MAX_ID_CHARS = 128
"""Characters of the ids that clients choose: of a session, and of an upload."""
HEARTBEAT_PATH = re.compile(rf"{API_PREFIX}/heartbeat/([^/]+)", re.DOTALL)
CALL_PATH = re.compile(rf"{API_PREFIX}/call/(?:v2/)?[^/]+/([^/]+)", re.DOTALL)
RUN_PATH = re.compile(rf"{API_PREFIX}/(run|api)/")
ENDPOINT_PATH = re.compile(rf"{API_PREFIX}/(?:run|api|call|call/v2)/([^/]+)/?")


class EventPolicy:
    """Decides by the events and sessions of one `gr.Blocks`."""

    def __init__(self, blocks: Any) -> None:
        self.blocks = blocks

    def check_event(self, path: str, body: dict[str, Any]) -> None:
        """Validate the arguments of an event.

        Raises:
            RefusedError: invalid session, event number, endpoint or inputs.
        """
        session, index, data = body.get("session_hash"), body.get("fn_index"), body.get("data")
        if session is not None and not (isinstance(session, str) and 0 < len(session) <= MAX_ID_CHARS):
            message = f"session_hash must be a string of at most {MAX_ID_CHARS} characters."
            raise RefusedError(ErrorResponse(422, message))
        if body.get("batched") or body.get("simple_format"):
            raise RefusedError(ErrorResponse(422, "batched and simple_format are not served."))
        if path.startswith(f"{API_PREFIX}/queue/join") or (index is not None and RUN_PATH.match(path)):
            is_event = isinstance(index, int) and not isinstance(index, bool) and index in self.blocks.fns
            if not is_event:
                raise RefusedError(ErrorResponse(422, "fn_index must be the number of an event of this app."))
            _check_inputs(self.blocks.fns[index], data)
        elif match := ENDPOINT_PATH.fullmatch(path):
            fns = self.blocks.fns.values()
            fn = next((fn for fn in fns if fn.api_name == match[1] and fn.api_visibility != "private"), None)
            if fn is None:
                raise RefusedError(ErrorResponse(404, "There is no such endpoint."))
            if "/v2/" not in path:
                _check_inputs(fn, data)

    def find_event_stream(self, scope: Scope) -> str | None:
        """The session whose events a request reads; None if it reads none.

        Raises:
            RefusedError: the session has started no event, or the call does not exist.
        """
        if scope["method"] not in READ_METHODS:
            return None
        queue = self.blocks._queue
        if scope["path"] == f"{API_PREFIX}/queue/data":
            session = get_query_value(scope, "session_hash")
            if session not in queue.pending_messages_per_session:
                raise RefusedError(ErrorResponse(404, "This session has started no event."))
            return session
        match = CALL_PATH.fullmatch(scope["path"])
        return self._find_session(match[1]) if match else None

    def _find_session(self, event_id: str) -> str:
        """The session of an event. Gradio forgets a finished event, but not its id before its result is delivered."""
        queue = self.blocks._queue
        event = queue.event_ids_to_events.get(event_id)
        if event is not None:
            session: str = event.session_hash
            return session
        for session, event_ids in queue.pending_event_ids_session.items():
            if event_id in event_ids:
                return session
        if event_id not in queue.pending_messages_per_session:  # a call without a session has its id as its session
            raise RefusedError(ErrorResponse(404, "There is no such call."))
        return event_id


def find_heartbeat(scope: Scope) -> str | None:
    """The session that a request keeps open; None if it keeps none open."""
    match = HEARTBEAT_PATH.fullmatch(scope["path"])
    return match[1] if match else None


def get_query_value(scope: Scope, name: str) -> str:
    """First value of a query parameter; empty if absent.

    Raises:
        ValueError: more than 100 parameters.
    """
    values = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=100)
    return values.get(name, [""])[0]


def _check_inputs(fn: Any, data: Any) -> None:
    """Refuse a wrong number of inputs, and files that were not uploaded."""
    if not isinstance(data, list) or len(data) != len(fn.inputs):
        raise RefusedError(ErrorResponse(422, f"data must be a list of {len(fn.inputs)} inputs."))
    if has_remote_path(data):
        raise RefusedError(ErrorResponse(422, "Files must be uploaded; the app fetches nothing from other addresses."))
