"""ASGI middleware around Gradio: every request passes here before Gradio reads it, and every response on its way out.

Refuses requests with a foreign host or origin, for a route that no page needs, or with a body beyond the limits; each
with one line to the client and one in the log. Errors that Gradio raises over a request become such a line too; the
stack trace is logged at DEBUG.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from mmspec.app.ui.middleware.bodies import (
    STORAGE_CHECK_BYTES,
    BodyReader,
    Message,
    PartCounter,
    Receive,
    RefusedError,
    RequestLimits,
    UploadFolder,
    body_too_large,
    parse_json_object,
)
from mmspec.app.ui.middleware.events import MAX_ID_CHARS, EventPolicy, find_heartbeat, get_query_value
from mmspec.app.ui.middleware.hosts import ErrorResponse, HostPolicy, RequestInfo
from mmspec.app.ui.middleware.password import PasswordGate
from mmspec.app.ui.middleware.response import FilteredResponse, Scope, Send
from mmspec.app.ui.middleware.routes import API_PREFIX, Route, find_route
from mmspec.app.ui.middleware.sessions import SessionCleaner

Headers = Mapping[str, list[str]]
DROPPED_HEADERS = re.compile(rb"origin|authorization|x-gradio-.*|x-ip-token", re.IGNORECASE)
"""Request headers that are removed: Gradio reflects origins, takes its own address from `X-Gradio-*`, and needs no
password."""
MULTIPART_BOUNDARY = re.compile(
    r'multipart/form-data\s*;(?:.*;)?\s*boundary=("[^"\r\n]{1,200}"|[^\s;",]{1,200})\s*(?:;.*)?', re.I
)
UPLOAD_PROGRESS_PATH = f"{API_PREFIX}/upload_progress"
MAX_IGNORED_BODY_BYTES = 65_536
"""Body of a request whose route takes none."""
STORAGE_FULL = ErrorResponse(413, "The app holds as many uploads as it may; try again later.")


class RequestFilter:
    """An ASGI app that wraps another."""

    def __init__(
        self,
        app: Any,
        host_policy: HostPolicy,
        request_limits: RequestLimits,
        uploads: UploadFolder,
        sessions: SessionCleaner,
        gate: PasswordGate | None = None,
    ) -> None:
        """Wrap an app.

        Args:
            app: Gradio's, with all of its middleware.
            host_policy: decides by host and origin.
            request_limits: of headers and bodies.
            uploads: Gradio's upload folder.
            sessions: of the `gr.Blocks` that the app serves; cleaned up while it is served.
            gate: asks for a password; None for none.
        """
        self.app = app
        self.host_policy = host_policy
        self.request_limits = request_limits
        self.uploads = uploads
        self.sessions = sessions
        self.gate = gate
        self.events = EventPolicy(sessions.blocks)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. See ASGI; websockets are closed."""
        if scope["type"] == "lifespan":
            cleanup = asyncio.create_task(self.sessions.run())
            try:
                await self.app(scope, receive, send)
            finally:
                cleanup.cancel()
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = FilteredResponse(scope, send)
        try:
            headers = _decode_headers(scope)
            route = self._admit(scope, headers, response)
            if route is None:
                await response.send_preflight()
                return
            if route.body == "files":
                await self._upload(scope, headers, receive, response)
            elif route.body == "json":
                await self.app(scope, await self._read_json(scope, headers, receive), response.send)
            else:
                _content_length(headers, MAX_IGNORED_BODY_BYTES)
                if scope["path"] == UPLOAD_PROGRESS_PATH:
                    _check_upload_id(scope)
                with self._connect_session(scope):
                    await self.app(scope, receive, response.send)
            await response.finish()
        except RefusedError as error:
            await response.refuse(error.response)
        except Exception as error:
            await response.fail(error)

    def _admit(self, scope: Scope, headers: Headers, response: FilteredResponse) -> Route | None:
        """The route of an admitted request; None for an admitted CORS preflight. Removes `DROPPED_HEADERS`.

        Raises:
            RefusedError: host, origin, route, method or size of the headers is not admitted.
        """
        server = tuple(scope.get("server") or ("", 0))
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        max_bytes = self.request_limits.max_header_bytes
        if size + len(scope.get("raw_path") or b"") + len(scope["query_string"]) > max_bytes:
            raise RefusedError(ErrorResponse(431, f"The headers have more than {max_bytes} bytes."))
        method, path = scope["method"], scope["path"]
        refusal = self.host_policy.check(headers, server, RequestInfo(method, path, scope.get("scheme", "http")))
        if refusal is None and self.gate is not None:
            refusal = self.gate.check(headers, path)
        if refusal is not None:
            raise RefusedError(refusal)
        response.origin = next(iter(headers.get("origin", [])), None)
        route = find_route(path)
        if route is None:
            raise RefusedError(ErrorResponse(404, "There is nothing here."))
        if method == "OPTIONS" and response.origin and "access-control-request-method" in headers:
            return None
        if method not in route.methods:
            raise RefusedError(ErrorResponse(405, f"Only {', '.join(sorted(route.methods))} here."))
        forwarded = headers.get("x-forwarded-host", [])
        keeps_forwarded = all(self.host_policy.allows_forwarded(value, server) for value in forwarded)
        scope["headers"] = [
            (name, value)
            for name, value in scope["headers"]
            if not DROPPED_HEADERS.fullmatch(name) and (keeps_forwarded or name.lower() != b"x-forwarded-host")
        ]
        return route

    def _connect_session(self, scope: Scope) -> ExitStack:
        """Context in which the request counts as a connection of the session that it names, if it names one."""
        stack = ExitStack()
        stream, heartbeat = self.events.find_event_stream(scope), find_heartbeat(scope)
        session = heartbeat if stream is None else stream
        if session is not None:
            stack.enter_context(self.sessions.connection(session, is_event_stream=stream is not None))
        return stack

    async def _read_json(self, scope: Scope, headers: Headers, receive: Receive) -> Receive:
        """Read and validate the body of a JSON request; returns the `receive` that replays it to Gradio.

        Raises:
            RefusedError: it is too large, too slow, or not what the route takes.
        """
        content_type = headers.get("content-type", [""])[0].partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise RefusedError(ErrorResponse(415, "The body must be application/json."))
        max_bytes = self.request_limits.max_json_bytes
        body = await BodyReader(receive, self.request_limits, max_bytes, _content_length(headers, max_bytes)).read_all()
        self.events.check_event(scope["path"], parse_json_object(body))
        is_replayed = False

        async def replay() -> Message:
            nonlocal is_replayed
            if is_replayed:
                return await receive()
            is_replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        return replay

    async def _upload(self, scope: Scope, headers: Headers, receive: Receive, response: FilteredResponse) -> None:
        """Pass an upload on to Gradio, which writes files as they arrive and removes them on `MultiPartException`."""
        from starlette.formparsers import MultiPartException

        match = MULTIPART_BOUNDARY.fullmatch(headers.get("content-type", [""])[0])
        if match is None:
            raise RefusedError(ErrorResponse(415, "The body must be multipart/form-data with a boundary."))
        _check_upload_id(scope)
        max_bytes = self.request_limits.max_request_bytes
        free_bytes = self.uploads.free_bytes()
        content_length = _content_length(headers, max_bytes)
        if (content_length or 0) > free_bytes or free_bytes <= 0:
            raise RefusedError(STORAGE_FULL)
        body = BodyReader(receive, self.request_limits, max_bytes, content_length)
        parts = PartCounter(match[1].strip('"').encode("latin-1", "replace"), self.uploads.max_files)
        checked_size = 0

        async def receive_checked() -> Message:
            nonlocal checked_size
            if body.complete:
                return await receive()
            try:
                chunk = await body.read_chunk()
                parts.feed(chunk)
                if body.size - checked_size > STORAGE_CHECK_BYTES:
                    checked_size = body.size
                    if self.uploads.free_bytes() <= 0:
                        raise RefusedError(STORAGE_FULL)
            except RefusedError as error:
                response.error = error.response
                raise MultiPartException(error.response.text) from None
            return {"type": "http.request", "body": chunk, "more_body": not body.complete}

        self.uploads.begin()
        try:
            await self.app(scope, receive_checked, response.send)
        finally:
            self.uploads.end()


def _decode_headers(scope: Scope) -> dict[str, list[str]]:
    """{name in lower case: values in order}."""
    headers: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    return headers


def _content_length(headers: Headers, max_bytes: int) -> int | None:
    """`Content-Length`; None if absent.

    Raises:
        RefusedError: it is not a number, or exceeds the limit.
    """
    values = headers.get("content-length", [])
    if not values:
        return None
    if not values[0].isdecimal() or len(values[0]) > 18:
        raise RefusedError(ErrorResponse(400, "Content-Length is not a number."))
    if int(values[0]) > max_bytes:
        raise RefusedError(body_too_large(max_bytes))
    return int(values[0])


def _check_upload_id(scope: Scope) -> None:
    """Refuse a long `upload_id`, which Gradio stores."""
    if len(get_query_value(scope, "upload_id")) > MAX_ID_CHARS:
        raise RefusedError(ErrorResponse(422, f"upload_id must have at most {MAX_ID_CHARS} characters."))
