"""ASGI middleware around Gradio: every request passes here before Gradio reads it, and every response on its way out.

Refuses requests with a foreign host or origin, for a route that no page needs, or with a body beyond the limits; each
with one line to the client and one in the log. Errors that Gradio raises over a request become such a line too; the
stack trace is logged at DEBUG.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import parse_qs

from mmspec.app.errors import one_line
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
    has_remote_path,
    parse_json_object,
)
from mmspec.app.ui.middleware.hosts import ErrorResponse, HostPolicy, RequestInfo
from mmspec.app.ui.middleware.routes import API_PREFIX, READ_METHODS, Route, find_route

logger = logging.getLogger("mmspec")

Send = Callable[[Message], Awaitable[None]]
Scope = dict[str, Any]
Headers = Mapping[str, list[str]]
RESPONSE_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"SAMEORIGIN"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
DROPPED_HEADERS = re.compile(rb"origin|x-gradio-.*|x-ip-token", re.IGNORECASE)
"""Request headers that are removed: Gradio reflects origins, and takes its own address from `X-Gradio-*`."""
MULTIPART_BOUNDARY = re.compile(
    r'multipart/form-data\s*;(?:.*;)?\s*boundary=("[^"\r\n]{1,200}"|[^\s;",]{1,200})\s*(?:;.*)?', re.I
)
RUN_PATH = re.compile(rf"{API_PREFIX}/(run|api)/")
MAX_SESSION_CHARS = 128
MAX_IGNORED_BODY_BYTES = 65_536
"""Body of a request whose route takes none."""
STORAGE_FULL = ErrorResponse(413, "The app holds as many uploads as it may; try again later.")


class RequestFilter:
    """An ASGI app that wraps another."""

    def __init__(
        self, app: Any, host_policy: HostPolicy, request_limits: RequestLimits, uploads: UploadFolder, blocks: Any
    ) -> None:
        """Wrap an app.

        Args:
            app: Gradio's, with all of its middleware.
            host_policy: decides by host and origin.
            request_limits: of headers and bodies.
            uploads: Gradio's upload folder.
            blocks: the `gr.Blocks`, for its events and queue.
        """
        self.app = app
        self.host_policy = host_policy
        self.request_limits = request_limits
        self.uploads = uploads
        self.blocks = blocks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. See ASGI; websockets are closed."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
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
                self._check_session(scope)
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

    def _check_session(self, scope: Scope) -> None:
        """Refuse event streams of sessions and calls that Gradio's queue does not know.

        Raises:
            RefusedError: the session has started no event, or the call does not exist.
        """
        queue = self.blocks._queue
        if scope["path"] == f"{API_PREFIX}/queue/data" and scope["method"] in READ_METHODS:
            session = _query_value(scope, "session_hash")
            if session not in queue.pending_messages_per_session:
                raise RefusedError(ErrorResponse(404, "This session has started no event."))
        match = re.fullmatch(rf"{API_PREFIX}/call/(?:v2/)?[^/]+/([^/]+)", scope["path"])
        if match and match[1] not in queue.event_ids_to_events:
            is_pending = any(match[1] in ids for ids in queue.pending_event_ids_session.values())
            if not is_pending and match[1] not in queue.pending_messages_per_session:
                raise RefusedError(ErrorResponse(404, "There is no such call."))

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
        self._check_event(scope["path"], parse_json_object(body))
        is_replayed = False

        async def replay() -> Message:
            nonlocal is_replayed
            if is_replayed:
                return await receive()
            is_replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        return replay

    def _check_event(self, path: str, body: dict[str, Any]) -> None:
        """Validate the arguments of an event.

        Raises:
            RefusedError: invalid session, event number, endpoint or inputs.
        """
        session, index, data = body.get("session_hash"), body.get("fn_index"), body.get("data")
        if session is not None and not (isinstance(session, str) and 0 < len(session) <= MAX_SESSION_CHARS):
            message = f"session_hash must be a string of at most {MAX_SESSION_CHARS} characters."
            raise RefusedError(ErrorResponse(422, message))
        if body.get("batched") or body.get("simple_format"):
            raise RefusedError(ErrorResponse(422, "batched and simple_format are not served."))
        if path.startswith(f"{API_PREFIX}/queue/join") or (index is not None and RUN_PATH.match(path)):
            is_event = isinstance(index, int) and not isinstance(index, bool) and index in self.blocks.fns
            if not is_event:
                raise RefusedError(ErrorResponse(422, "fn_index must be the number of an event of this app."))
            _check_inputs(self.blocks.fns[index], data)
        elif match := re.fullmatch(rf"{API_PREFIX}/(?:run|api|call|call/v2)/([^/]+)/?", path):
            fns = self.blocks.fns.values()
            fn = next((fn for fn in fns if fn.api_name == match[1] and fn.api_visibility != "private"), None)
            if fn is None:
                raise RefusedError(ErrorResponse(404, "There is no such endpoint."))
            if "/v2/" not in path:
                _check_inputs(fn, data)

    async def _upload(self, scope: Scope, headers: Headers, receive: Receive, response: FilteredResponse) -> None:
        """Pass an upload on to Gradio, which writes files as they arrive and removes them on `MultiPartException`."""
        from starlette.formparsers import MultiPartException

        match = MULTIPART_BOUNDARY.fullmatch(headers.get("content-type", [""])[0])
        if match is None:
            raise RefusedError(ErrorResponse(415, "The body must be multipart/form-data with a boundary."))
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


class FilteredResponse:
    """The response to one request: Gradio's with other headers, or an `ErrorResponse`.

    Attributes:
        origin: trusted `Origin` of the request, which may read the response.
        error: refusal decided while Gradio was reading the body; replaces its response.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self.scope = scope
        self._send = send
        self.origin: str | None = None
        self.error: ErrorResponse | None = None
        self._has_started = False
        self._withheld = list[Message]()

    async def send(self, message: Message) -> None:
        """Pass a message of Gradio on. A status 500 is withheld until its cause is known."""
        if self.error is not None and not self._has_started:
            return
        if message["type"] == "http.response.start":
            if message["status"] == 500:
                self._withheld.append(message)
                return
            self._has_started = True
            headers = [(name, value) for name, value in message.get("headers", []) if not _is_cors_header(name)]
            message = {**message, "headers": [*headers, *RESPONSE_HEADERS, *self._cors_headers()]}
        elif self._withheld:
            self._withheld.append(message)
            return
        await self._send(message)

    def _cors_headers(self) -> list[tuple[bytes, bytes]]:
        """Lets a trusted origin read the response."""
        vary = [(b"vary", b"Origin")]
        return [(b"access-control-allow-origin", self.origin.encode("latin-1")), *vary] if self.origin else vary

    async def send_preflight(self) -> None:
        """Answer the CORS preflight of a trusted origin."""
        headers = [
            *self._cors_headers(),
            (b"access-control-allow-methods", b"GET, HEAD, POST"),
            (b"access-control-allow-headers", b"content-type"),
        ]
        self._has_started = True
        await self._send({"type": "http.response.start", "status": 204, "headers": headers})
        await self._send({"type": "http.response.body", "body": b""})

    async def finish(self) -> None:
        """Complete the response after Gradio returned."""
        if self.error is not None and not self._has_started:
            await self.refuse(self.error)
        elif self._withheld:  # a page handler failed on its inputs, and has logged why
            await self.refuse(ErrorResponse(422, "The inputs of this request cannot be processed."))

    async def refuse(self, error: ErrorResponse) -> None:
        """Send and log a refusal."""
        client = (self.scope.get("client") or ("?",))[0]
        path = ascii(self.scope["path"])[:100]
        logger.info("mmspec: refused (%d) %s %s %s: %s", error.status, client, self.scope["method"], path, error.text)
        await self._send_error(error)

    async def fail(self, error: Exception) -> None:
        """Send and log that Gradio raised an error, nearly always because of the request."""
        if self.error is not None:
            await self.refuse(self.error)
            return
        path = ascii(self.scope["path"])[:100]
        reason = ascii(one_line(error, 200))
        logger.warning("mmspec: failed: %s %s: %s: %s", self.scope["method"], path, type(error).__name__, reason)
        logger.debug("mmspec: stack trace", exc_info=error)
        is_server_error = isinstance(error, OSError | MemoryError)
        status, text = (500, "Storage error.") if is_server_error else (400, "The request cannot be processed.")
        await self._send_error(ErrorResponse(status, text))

    async def _send_error(self, error: ErrorResponse) -> None:
        if self._has_started:
            return
        self._has_started = True
        body = (error.text + "\n").encode("utf-8", "replace")
        headers = [
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", b"%d" % len(body)),
            *RESPONSE_HEADERS,
            (b"connection", b"close"),  # the unread rest of the body would be parsed as the next request
        ]
        await self._send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": b"" if self.scope["method"] == "HEAD" else body})


def _check_inputs(fn: Any, data: Any) -> None:
    """Refuse a wrong number of inputs, and files that were not uploaded."""
    if not isinstance(data, list) or len(data) != len(fn.inputs):
        raise RefusedError(ErrorResponse(422, f"data must be a list of {len(fn.inputs)} inputs."))
    if has_remote_path(data):
        raise RefusedError(ErrorResponse(422, "Files must be uploaded; the app fetches nothing from other addresses."))


def _is_cors_header(name: bytes) -> bool:
    return name.lower().startswith(b"access-control-")


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


def _query_value(scope: Scope, name: str) -> str:
    values = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=100)
    return values.get(name, [""])[0]


__all__ = ["RequestFilter"]
