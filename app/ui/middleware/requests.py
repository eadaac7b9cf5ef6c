"""Requests on their way in: the routes that the pages need, no addresses of other servers, whose stream one reads."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import ExitStack
from typing import Any
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmspec.app.ui.middleware.bodies import RequestLimits, UploadFolder, receive_in_time
from mmspec.app.ui.middleware.sessions import SessionCleaner

API_PREFIX = "/gradio_api"
UPLOAD_PATH = f"{API_PREFIX}/upload"
MAX_SESSION_CHARS = 128
NAME, HASH = r"[A-Za-z0-9_]{1,64}", rf"[^/\x00-\x1f]{{1,{MAX_SESSION_CHARS}}}"
ROUTES = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"/",
        r"/(assets|static)/[A-Za-z0-9_@.,+/-]{1,200}",
        r"/(config|config/|theme\.css|favicon\.ico|manifest\.json|robots\.txt)",
        rf"{API_PREFIX}/(info|info/|theme\.css|startup-events|app_id|queue/status|queue/data|upload|upload_progress)",
        rf"{API_PREFIX}/heartbeat/{HASH}",
        rf"{API_PREFIX}/file=.{{1,2000}}",
        rf"{API_PREFIX}/call/(v2/)?(?!v2/){NAME}/{HASH}",
        rf"{API_PREFIX}/(run|api|call|call/v2)/{NAME}/?",
        rf"{API_PREFIX}/(queue/join|cancel|reset|reset/)",
    )
)
"""What the pages and `gradio_client` need, of about a hundred routes. Not served: /gradio_api/deep_link (stores a file
at each request, without limit), /monitoring (lists the sessions of all visitors), /process_recording, /proxy=, /vibe-*,
/dev/reload, /stream, /component_server, /custom_component, logins, run history, profiling."""
HEARTBEAT_PATH = re.compile(rf"{API_PREFIX}/heartbeat/([^/]+)", re.DOTALL)
CALL_PATH = re.compile(rf"{API_PREFIX}/call/(?:v2/)?[^/]+/([^/]+)", re.DOTALL)
RUN_PATH = re.compile(rf"{API_PREFIX}/(run|api)/.*", re.DOTALL)
REMOTE_PATH = re.compile(r"\s*([a-z][a-z0-9+.-]*:|[/\\]{2})", re.IGNORECASE)
"""A path with a URL scheme, or a network path (`//host`)."""


class RequestFilter:
    """An ASGI app around Gradio's."""

    def __init__(self, app: ASGIApp, limits: RequestLimits, uploads: UploadFolder, sessions: SessionCleaner) -> None:
        """Wrap an app.

        Args:
            app: Gradio's, with all of its middleware.
            limits: of bodies.
            uploads: Gradio's upload folder.
            sessions: of the `gr.Blocks` that the app serves; cleaned up while it is served.
        """
        self.app = app
        self.limits = limits
        self.uploads = uploads
        self.sessions = sessions
        self._small = RequestBodyLimitMiddleware(self._serve, limits.max_json_bytes)
        self._large = RequestBodyLimitMiddleware(self._upload, limits.max_request_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI.

        Raises:
            HTTPException: the route is not served, or the body is refused.
        """
        if scope["type"] == "lifespan":
            cleanup = asyncio.create_task(self.sessions.run())
            try:
                await self.app(scope, receive, send)
            finally:
                cleanup.cancel()
            return
        if not is_served(scope["path"]):
            raise HTTPException(404, "There is nothing here.")
        inner = self._large if scope["path"] == UPLOAD_PATH else self._small
        await inner(scope, receive_in_time(receive, self.limits), send)

    async def _upload(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an upload on to Gradio, which writes files as they arrive."""
        announced = Headers(scope=scope).get("content-length", "0")
        with self.uploads.uploading(receive, int(announced) if announced.isdecimal() else 0) as receive_stored:
            await self.app(scope, receive_stored, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass anything else on, after the JSON of its body was checked."""
        if scope["method"] == "POST":
            body = await Request(scope, receive).body()
            check_json(body)
            receive = _replay(body, receive)
        with self._connect_session(scope):
            await self.app(scope, receive, _without_500(send) if RUN_PATH.fullmatch(scope["path"]) else send)

    def _connect_session(self, scope: Scope) -> ExitStack:
        """Context in which the request counts as a connection of the session that it names, if it names one."""
        stack = ExitStack()
        heartbeat = HEARTBEAT_PATH.fullmatch(scope["path"])
        stream = None if heartbeat else find_event_stream(scope, self.sessions.blocks._queue)
        session = heartbeat[1] if heartbeat else stream
        if session is not None:
            stack.enter_context(self.sessions.connection(session, is_event_stream=heartbeat is None))
        return stack


def is_served(path: str) -> bool:
    """Whether a decoded path is one of `ROUTES`."""
    return any(route.fullmatch(path) for route in ROUTES)


def check_json(body: bytes) -> None:
    """Refuse what Gradio would act on before it looks at it.

    Raises:
        HTTPException: not JSON, a long session name, or a file whose path is the address of another server.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise HTTPException(400, "The body is not JSON, or is nested too deeply.") from None
    session = value.get("session_hash") if isinstance(value, dict) else None
    if isinstance(session, str) and len(session) > MAX_SESSION_CHARS:  # Gradio stores the name
        raise HTTPException(422, f"session_hash must have at most {MAX_SESSION_CHARS} characters.")
    if has_remote_path(value):
        raise HTTPException(422, "Files must be uploaded; the app fetches nothing from other addresses.")


def has_remote_path(value: Any) -> bool:
    """Whether a file in the inputs has the address of another server as its path, which Gradio would fetch.

    Args:
        value: parsed JSON.
    """
    stack = [value]
    while stack:
        item = stack.pop()
        path = item.get("path") if isinstance(item, dict) else None
        if isinstance(path, str) and REMOTE_PATH.match(path):
            return True
        stack += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
    return False


def find_event_stream(scope: Scope, queue: Any) -> str | None:
    """The session whose events a request reads; None if it reads none.

    Raises:
        HTTPException: it has started none; Gradio would break the response off in its middle, with a stack trace.
    """
    match = CALL_PATH.fullmatch(scope["path"])
    if scope["method"] != "GET" or not (match or scope["path"] == f"{API_PREFIX}/queue/data"):
        return None
    if match is None:
        session = parse_qs(scope["query_string"].decode("latin-1")).get("session_hash", [""])[0]
    elif (event := queue.event_ids_to_events.get(match[1])) is not None:
        session = str(event.session_hash)
    else:  # Gradio forgets a finished event, but not its id before its result is delivered
        sessions = (name for name, event_ids in queue.pending_event_ids_session.items() if match[1] in event_ids)
        session = next(sessions, match[1])  # a call without a session has its id as its session
    if session not in queue.pending_messages_per_session:
        raise HTTPException(404, "This session has started no event.")
    return session


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that begins with a body that was read already."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again


def _without_500(send: Send) -> Send:
    """Gradio answers 500 to inputs of `/run` that a handler cannot use."""

    async def send_422(message: Message) -> None:
        await send({**message, "status": 422} if message.get("status") == 500 else message)

    return send_422
