"""The edge of the app: every request passes here before Gradio sees it, and every answer on its way out.

Refuses what comes by a wrong name, from another site, at a route that no page needs, or with a body that is too much;
each with one line to the client and one in the log. An error of Gradio over a request becomes such a line too: the
stack trace is logged at DEBUG.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import parse_qs

from mmspec.app.errors import one_line
from mmspec.app.ui.middleware.bodies import STORAGE_CHECK_BYTES as LOOK
from mmspec.app.ui.middleware.bodies import (
    BodyReader,
    Message,
    PartCounter,
    Receive,
    RefusedError,
    RequestLimits,
    UploadFolder,
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
"""Headers of requests that Gradio would act upon: it reflects origins, and lets `X-Gradio-*` name its own address."""
MULTIPART_BOUNDARY = re.compile(
    r'multipart/form-data\s*;(?:.*;)?\s*boundary=("[^"\r\n]{1,200}"|[^\s;",]{1,200})\s*(?:;.*)?', re.I
)
RUN_PATH = re.compile(rf"{API_PREFIX}/(run|api)/")
MAX_SESSION_CHARS = 128


class RequestFilter:
    """An ASGI app around another."""

    def __init__(self, app: Any, hosts: HostPolicy, bounds: RequestLimits, uploads: UploadFolder, blocks: Any) -> None:
        """app: Gradio's, all of its middleware included. blocks: the pages."""
        self.app, self.host_policy, self.request_limits, self.uploads, self.blocks = app, hosts, bounds, uploads, blocks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = FilteredResponse(scope, send)
        try:
            door, headers = self._admit(scope, answer)
            if headers is None or door is None:
                await answer.send_preflight()
                return
            if door.body == "files":
                await self._upload(scope, headers, receive, answer)
            elif door.body == "json":
                await self.app(scope, await self._read_json(scope, headers, receive), answer.send)
            else:
                _content_length(headers, 65_536)
                self._check_session(scope)
                await self.app(scope, receive, answer.send)
            await answer.finish()
        except RefusedError as error:
            await answer.refuse(error.response)
        except Exception as error:
            await answer.fail(error)

    def _admit(self, scope: Scope, answer: FilteredResponse) -> tuple[Route | None, Headers | None]:
        """The door of a request that may enter, and its headers. None, None: it asks whether it may, and it may.

        Raises:
            RefusedError: it may not.
        """
        headers = _decode_headers(scope)
        server = tuple(scope.get("server") or ("", 0))
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if size + len(scope.get("raw_path") or b"") + len(scope["query_string"]) > self.request_limits.max_header_bytes:
            raise RefusedError(
                ErrorResponse(431, f"The headers have more than {self.request_limits.max_header_bytes} bytes.")
            )
        method, path = scope["method"], scope["path"]
        refusal = self.host_policy.check(headers, server, RequestInfo(method, path, scope.get("scheme", "http")))
        if refusal is not None:
            raise RefusedError(refusal)
        answer.origin = next(iter(headers.get("origin", [])), None)
        door = find_route(path)
        if door is None:
            raise RefusedError(ErrorResponse(404, "There is nothing here."))
        if method == "OPTIONS" and answer.origin and "access-control-request-method" in headers:
            return None, None
        if method not in door.methods:
            raise RefusedError(ErrorResponse(405, f"Only {', '.join(sorted(door.methods))} here."))
        forwarded = all(self.host_policy.allows_forwarded(one, server) for one in headers.get("x-forwarded-host", []))
        scope["headers"] = [
            (name, value)
            for name, value in scope["headers"]
            if not DROPPED_HEADERS.fullmatch(name) and (forwarded or name.lower() != b"x-forwarded-host")
        ]
        return door, headers

    def _check_session(self, scope: Scope) -> None:
        """A stream of answers is for a session that has asked something.

        Raises:
            RefusedError: it has not.
        """
        if scope["path"] == f"{API_PREFIX}/queue/data" and scope["method"] in READ_METHODS:
            session = _query_value(scope, "session_hash")
            if session not in self.blocks._queue.pending_messages_per_session:
                raise RefusedError(ErrorResponse(404, "This session has asked nothing."))
        found = re.fullmatch(rf"{API_PREFIX}/call/(?:v2/)?[^/]+/([^/]+)", scope["path"])
        queue = self.blocks._queue
        if found and found[1] not in queue.event_ids_to_events:
            waiting = any(found[1] in ids for ids in queue.pending_event_ids_session.values())
            if not waiting and found[1] not in queue.pending_messages_per_session:
                raise RefusedError(ErrorResponse(404, "There is no such call."))

    async def _read_json(self, scope: Scope, headers: Headers, receive: Receive) -> Receive:
        """The body of a JSON request, read and judged, as Gradio will receive it.

        Raises:
            RefusedError: it is too large, too slow, or not what the route takes.
        """
        kind = headers.get("content-type", [""])[0].partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RefusedError(ErrorResponse(415, "The body must be application/json."))
        body = BodyReader(
            receive,
            self.request_limits,
            self.request_limits.max_json_bytes,
            _content_length(headers, self.request_limits.max_json_bytes),
        )
        whole = await body.read_all()
        self._check_event(scope["path"], parse_json_object(whole))
        given = False

        async def again() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": whole, "more_body": False}

        return again

    def _check_event(self, path: str, body: dict[str, Any]) -> None:
        """What an event is called with.

        Raises:
            RefusedError: its session, number or inputs cannot be.
        """
        session, index, data = body.get("session_hash"), body.get("fn_index"), body.get("data")
        if session is not None and not (isinstance(session, str) and 0 < len(session) <= MAX_SESSION_CHARS):
            raise RefusedError(
                ErrorResponse(422, f"session_hash must be a text of at most {MAX_SESSION_CHARS} characters.")
            )
        if body.get("batched") or body.get("simple_format"):
            raise RefusedError(ErrorResponse(422, "batched and simple_format are not served."))
        if path.startswith(f"{API_PREFIX}/queue/join") or (index is not None and RUN_PATH.match(path)):
            known = isinstance(index, int) and not isinstance(index, bool) and index in self.blocks.fns
            if not known:
                raise RefusedError(ErrorResponse(422, "fn_index must be the number of an event of this app."))
            self._check_inputs(self.blocks.fns[index], data)
        elif match := re.fullmatch(rf"{API_PREFIX}/(?:run|api|call|call/v2)/([^/]+)/?", path):
            fns = self.blocks.fns.values()
            fn = next((one for one in fns if one.api_name == match[1] and one.api_visibility != "private"), None)
            if fn is None:
                raise RefusedError(ErrorResponse(404, "There is no such endpoint."))
            if "/v2/" not in path:
                self._check_inputs(fn, data)

    def _check_inputs(self, fn: Any, data: Any) -> None:
        if not isinstance(data, list) or len(data) != len(fn.inputs):
            raise RefusedError(ErrorResponse(422, f"data must be a list of {len(fn.inputs)} inputs."))
        if has_remote_path(data):
            raise RefusedError(
                ErrorResponse(422, "Files must be uploaded; the app fetches nothing from other addresses.")
            )

    async def _upload(self, scope: Scope, headers: Headers, receive: Receive, answer: FilteredResponse) -> None:
        """Files; Gradio writes them as they arrive, and removes them if `MultiPartException` ends the body."""
        from starlette.formparsers import MultiPartException

        found = MULTIPART_BOUNDARY.fullmatch(headers.get("content-type", [""])[0])
        if found is None:
            raise RefusedError(ErrorResponse(415, "The body must be multipart/form-data with a boundary."))
        room = self.uploads.free_bytes()
        told = _content_length(headers, self.request_limits.max_request_bytes)
        if (told or 0) > room or room <= 0:
            raise RefusedError(ErrorResponse(413, "The app holds as many uploads as it may; try again later."))
        body = BodyReader(receive, self.request_limits, self.request_limits.max_request_bytes, told)
        parts = PartCounter(found[1].strip('"').encode("latin-1", "replace"), self.uploads.max_files)
        looked = 0

        async def passing() -> Message:
            nonlocal looked
            if body.complete:
                return await receive()
            try:
                part = await body.read_chunk()
                parts.feed(part)
                if body.size - looked > LOOK:
                    looked = body.size
                    if self.uploads.free_bytes() <= 0:
                        raise RefusedError(
                            ErrorResponse(413, "The app holds as many uploads as it may; try again later.")
                        )
            except RefusedError as error:
                answer.error = error.response
                raise MultiPartException(error.response.text) from None
            return {"type": "http.request", "body": part, "more_body": not body.complete}

        self.uploads.begin()
        try:
            await self.app(scope, passing, answer.send)
        finally:
            self.uploads.end()


class FilteredResponse:
    """What goes back: Gradio's answer, or a line that refuses."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.scope, self._send = scope, send
        self.origin: str | None = None
        self.error: ErrorResponse | None = None
        self._has_started, self._withheld = False, list[Message]()

    async def send(self, message: Message) -> None:
        """What Gradio sends. Its 500 waits until it is known where it comes from."""
        if self.error is not None and not self._has_started:
            return
        if message["type"] == "http.response.start":
            if message["status"] == 500:
                self._withheld.append(message)
                return
            self._has_started = True
            kept = [(name, value) for name, value in message.get("headers", []) if not _is_cors_header(name)]
            message = {**message, "headers": [*kept, *RESPONSE_HEADERS, *self._cors_headers()]}
        elif self._withheld:
            self._withheld.append(message)
            return
        await self._send(message)

    def _cors_headers(self) -> list[tuple[bytes, bytes]]:
        """Answers to a trusted origin can be read there."""
        vary = [(b"vary", b"Origin")]
        return [(b"access-control-allow-origin", self.origin.encode("latin-1")), *vary] if self.origin else vary

    async def send_preflight(self) -> None:
        """A trusted origin may send what it asked to."""
        more = [
            (b"access-control-allow-methods", b"GET, HEAD, POST"),
            (b"access-control-allow-headers", b"content-type"),
        ]
        self._has_started = True
        await self._send({"type": "http.response.start", "status": 204, "headers": [*self._cors_headers(), *more]})
        await self._send({"type": "http.response.body", "body": b""})

    async def finish(self) -> None:
        """The app has answered."""
        if self.error is not None and not self._has_started:
            await self.refuse(self.error)
        elif self._withheld:  # a function of a page failed on what it was given, and has logged why
            await self.refuse(ErrorResponse(422, "This cannot be done with what was sent."))

    async def refuse(self, refusal: ErrorResponse) -> None:
        """One line to the client and one to the log."""
        scope = self.scope
        client = (scope.get("client") or ("?",))[0]
        told = (refusal.status, client, scope["method"], ascii(scope["path"])[:100], refusal.text)
        logger.info("mmspec: refused (%d) %s %s %s: %s", *told)
        await self._send_error(refusal)

    async def fail(self, error: Exception) -> None:
        """Gradio could not answer, nearly always because of what was sent."""
        if self.error is not None:
            await self.refuse(self.error)
            return
        scope, ours = self.scope, isinstance(error, OSError | MemoryError)
        told = (scope["method"], ascii(scope["path"])[:100], type(error).__name__, ascii(one_line(error, 200)))
        logger.warning("mmspec: not answered: %s %s: %s: %s", *told)
        logger.debug("mmspec: the stack trace", exc_info=error)
        status, text = (500, "The app could not store this.") if ours else (400, "The request cannot be answered.")
        await self._send_error(ErrorResponse(status, text))

    async def _send_error(self, refusal: ErrorResponse) -> None:
        if self._has_started:
            return
        self._has_started = True
        body = (refusal.text + "\n").encode("utf-8", "replace")
        headers = [
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", b"%d" % len(body)),
            *RESPONSE_HEADERS,
        ]
        # What was not read of a body cannot be told from the next request.
        closing = [(b"connection", b"close")]
        start = {"type": "http.response.start", "status": refusal.status, "headers": [*headers, *closing]}
        await self._send(start)
        shown = b"" if self.scope["method"] == "HEAD" else body
        await self._send({"type": "http.response.body", "body": shown})


def _is_cors_header(name: bytes) -> bool:
    return name.lower().startswith(b"access-control-")


def _decode_headers(scope: Scope) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        found.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    return found


def _content_length(headers: Headers, limit: int) -> int | None:
    """`Content-Length`, if it is within the limit.

    Raises:
        RefusedError: it is not, or is no number.
    """
    told = headers.get("content-length", [])
    if not told:
        return None
    if not told[0].isdecimal() or len(told[0]) > 18:
        raise RefusedError(ErrorResponse(400, "Content-Length is no number."))
    if int(told[0]) > limit:
        raise RefusedError(ErrorResponse(413, f"The body has more than {limit} bytes, which is the limit."))
    return int(told[0])


def _query_value(scope: Scope, name: str) -> str:
    found = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=100)
    return found.get(name, [""])[0]


__all__ = ["RequestFilter"]
