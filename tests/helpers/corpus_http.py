"""Hostile HTTP requests as bytes, the same ones for the same seed, and a client that sends them over a socket."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

PATIENCE_S = 60.0
API = "/gradio_api"
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "get", "G@T")
ROUTES = (
    "/", "/config", "/theme.css", "/monitoring", "/monitoring/summary", "/monitoring/x/dashboard", "/login", "/logout",
    "/static/img/logo.svg", "/assets/index.js", "/favicon.ico", "/manifest.json", "/svelte/x", "/pwa_icon/3", "/docs",
    "/openapi.json", *(API + path for path in (
        "/info", "/queue/data?session_hash=victim", "/queue/data", "/queue/status", "/queue/join", "/upload", "/cancel",
        "/reset", "/heartbeat/victim", "/heartbeat/", "/call/compare", "/call/compare/victim", "/call/v2/caption",
        "/run/predict", "/run/compare", "/api/compare", "/run/answer", "/dev/reload", "/vibe-edit", "/vibe-code",
        "/component_server", "/process_recording", "/deep_link", "/startup-events", "/upload_progress?upload_id=a",
        "/stream/victim/1/1/playlist.m3u8", "/custom_component/a/b/c/d", "/proxy=http://127.0.0.1:1/", "/token",
        "/runs",
        "/file=/etc/passwd", "/file=../../etc/passwd", "/file=http://127.0.0.1:1/", "/file=//x/y", "/file=\\\\x\\y",
        "/file=%2e%2e%2f%2e%2e%2fetc/passwd", "/file=C:/x", "/file=", "/file/etc/passwd", "/file=/proc/self/environ",
    )),
)  # fmt: skip
CLIMBS = (
    "../",
    "..%2f",
    "%2e%2e/",
    "..%5c",
    "%252e%252e%252f",
    "..;/",
    "%00",
    "%0d%0aX: y",
    "%ff%fe",
    "//",
    "/./",
    "~",
)
HOSTS = (
    "evil.example",
    "127.0.0.1.evil.example",
    "localhost:1",
    "[::1]:99999",
    "",
    "0x7f.1",
    "a" * 300,
    "::1",
    "@",
    "*",
)
ORIGINS = (
    "null",
    "http://evil.example",
    "http://localhost:1",
    "file://",
    "https://127.0.0.1",
    "x" * 500,
    "http://[",
    "",
)
ODD: tuple[tuple[str, str], ...] = (
    ("X-Forwarded-Host", "evil.example"), ("X-Gradio-Server", "http://evil.example"), ("X-Forwarded-Proto", "https, x"),
    ("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Site", "same-site"), ("Cookie", "a=" + "b" * 5000), ("Range",
    "bytes=9-1"),
    ("Transfer-Encoding", "gzip"), ("Content-Encoding", "br"), ("Expect", "100-continue"), ("Upgrade", "websocket"),
    ("X", "y" * 40_000), ("X", "\xff\xfe"), ("If-Modified-Since", "never"), ("Accept-Encoding", "br;q=x"),
    ("A" * 9000, "b"),
    ("Content-Length", "-1"), ("Content-Length", "1e9"), ("Content-Length", "99999999999999999999"), ("Connection",
    "Upgrade"),
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 2**70, 1e308, "", "x" * 5000, "<image>", "../../etc/passwd", [], {}, [[]],
    {"path": "/etc/passwd"},
    {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}, {"path": None, "meta": {"_type": "gradio.FileData"}},
    {"url": "http://127.0.0.1:1/", "meta": {"_type": "gradio.FileData"}}, {"__type__": "update"}, "\x00", "tiny",
    "auto",
)  # fmt: skip

EVENTS = dict(
    enumerate(
        [
            1,
            1,
            1,
            1,
            1,
            0,
            1,
            1,
            0,
            2,
            2,
            1,
            1,
            14,
            0,
            0,
            0,
            0,
            0,
            0,
            1,
            2,
            2,
            2,
            2,
            1,
            0,
            0,
            9,
            0,
            0,
            0,
            0,
            2,
            2,
            0,
            4,
            0,
            0,
            0,
            0,
            8,
            8,
            0,
        ]
    )
)
"""{event of the pages: number of its inputs}, as `edge_server` reports them; a test compares."""


@dataclass(frozen=True)
class Sent:
    """One request. whole: it is complete, so that the server can answer."""

    name: str
    data: bytes
    whole: bool = True


def requests(seed: int, count: int, host: str) -> Iterator[Sent]:
    """`count` requests. host: of the server, with its port."""
    rng = random.Random(seed)
    kinds = (_plain, _plain, _path, _headers, _json, _json, _event, _event, _upload, _upload, _broken)
    for number in range(count):
        kind = rng.choice(kinds)
        drawn = kind(rng, host)
        yield Sent(f"{seed}/{number} {kind.__name__[1:]}", drawn.data, drawn.whole)


def request(method: str, path: str, host: str, headers: Any = (), body: bytes | None = None) -> bytes:
    """The bytes of a request, right or wrong."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *(f"{name}: {value}" for name, value in headers)]
    if body is not None and not any(name.lower() in ("content-length", "transfer-encoding") for name, _ in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1", "replace") + (body or b"")


def form(parts: list[tuple[str, bytes]], boundary: str = "bound") -> bytes:
    """A multipart body. parts: the `Content-Disposition` and the content of each."""
    body = b"".join(
        f"--{boundary}\r\nContent-Disposition: {head}\r\n\r\n".encode("latin-1", "replace") + content + b"\r\n"
        for head, content in parts
    )
    return body + f"--{boundary}--\r\n".encode()


FORM = ("Content-Type", "multipart/form-data; boundary=bound")
JSON = ("Content-Type", "application/json")


def _plain(rng: random.Random, host: str) -> Sent:
    return Sent("", request(rng.choice(METHODS), rng.choice(ROUTES), host, body=rng.choice([None, b"{}"])))


def _path(rng: random.Random, host: str) -> Sent:
    path = rng.choice(ROUTES)
    for _ in range(rng.randint(1, 6)):
        spot = rng.randint(1, len(path))
        path = path[:spot] + rng.choice(CLIMBS) + path[spot:]
    return Sent("", request(rng.choice(METHODS[:3]), path * rng.choice([1, 1, 1, 50]), host))


def _headers(rng: random.Random, host: str) -> Sent:
    headers = rng.sample(ODD, rng.randint(0, 3))
    headers += [("Origin", rng.choice(ORIGINS))] * rng.randint(0, 2) + [("X-Y", "z")] * rng.choice([0, 0, 3000])
    names = rng.choice([host, *HOSTS])
    is_incomplete = any(name in ("Content-Length", "Transfer-Encoding", "Expect") for name, _ in headers)
    path = rng.choice(ROUTES)
    return Sent("", request(rng.choice(METHODS[:8]), path, names, headers), whole=not is_incomplete)


def _json(rng: random.Random, host: str) -> Sent:
    path = rng.choice([path for path in ROUTES if path.startswith(API)])
    bodies = (
        b"[" * rng.choice([10, 5000, 200_000]), b'{"data":' * 3000 + b"1" + b"}" * 3000, b"NaN", b"[]", b"null", b"",
        b'{"data": ["\\ud800"], "session_hash": "a", "fn_index": 1}', b'{"a": 1' + b"0" * 6000 + b"}", b"\xff\xfe{}",
        b'{"session_hash": "' + b"x" * 2_000_000 + b'"}', b'{"data": NaN, "data": []}',
        b"{" + b'"a":1,' * 50_000 + b'"b":2}',
        rng.randbytes(rng.randint(1, 3000)),
    )  # fmt: skip
    kind = rng.choice(
        [JSON, JSON, JSON, ("Content-Type", "text/plain"), ("Content-Type", "application/json; charset=x")]
    )
    return Sent("", request("POST", path, host, [kind], rng.choice(bodies)))


def _event(rng: random.Random, host: str) -> Sent:
    """An event, usually with the right number of inputs, so that it passes Gradio and reaches the pages."""
    index: Any = rng.choice(sorted(EVENTS))
    data: Any = [rng.choice(VALUES) for _ in range(EVENTS[index])]
    session: Any = f"s{rng.random()}"
    if rng.random() < 0.4:
        index = rng.choice([*range(30), -1, 10**9, "1", None])
        data = rng.choice([data[1:], [*data, 1], *VALUES])
    if rng.random() < 0.4:
        session = rng.choice(["victim", "a", "", None, 3, "x" * 400, "../x", "\x00"])
    body = {"data": data, "fn_index": index, "session_hash": session}
    more = {
        "event_id": "victim",
        "trigger_id": 1,
        "batched": True,
        "simple_format": True,
        "oauth_token": "x",
        "event_data": {},
    }
    body |= dict(rng.sample(sorted(more.items()), rng.choice([0, 0, 1, 2])))
    route = rng.choice(["/queue/join"] * 4 + ["/run/x", "/run/predict", "/cancel", "/call/compare", "/call/caption"])
    if "/call/" in route and rng.random() < 0.8:
        body["data"] = [rng.choice(VALUES) for _ in range(8)]
    return Sent("", request("POST", API + route, host, [JSON], json.dumps(body).encode()))


def _upload(rng: random.Random, host: str) -> Sent:
    names = (
        "a.png",
        "../../x.png",
        "/etc/x",
        "",
        "a\x00b.png",
        "x" * 3000,
        "..",
        "con",
        "\xe9.mp4",
        'q"x',
        "a;b=c",
        ".htaccess",
    )
    fields = ("files", "files", "files", "other", "", "files[]")
    contents = (
        b"",
        b"x",
        b"\x89PNG\r\n\x1a\n" + b"\0" * 99,
        b"#EXTM3U\n/etc/passwd",
        b"--bound\r\n",
        b"\r\n" * 999,
        b"z" * 2_500_000,
    )
    parts = [
        (f'form-data; name="{rng.choice(fields)}"; filename="{rng.choice(names)}"', rng.choice(contents))
        for _ in range(rng.choice([0, 1, 1, 2, 5]))
    ]
    parts += [
        (head, b"x")
        for head in rng.sample(["form-data", 'form-data; name="files"', "", "x" * 9000], rng.choice([0, 0, 1]))
    ]
    parts *= rng.choice([1, 1, 1, 1, 300]) if sum(len(content) for _, content in parts) < 10_000 else 1
    body = form(parts)
    if rng.random() < 0.3:
        body = body[: rng.randint(0, len(body))]  # ends before its final boundary
    kind = rng.choice([FORM, FORM, FORM, FORM, ("Content-Type", "multipart/form-data"), JSON])
    path = API + rng.choice(["/upload", "/upload?upload_id=u", "/upload?upload_id=" + "u" * 3000])
    return Sent("", request("POST", path, host, [kind], body))


def _broken(rng: random.Random, host: str) -> Sent:
    """Not HTTP, or a body that does not come as announced."""
    short = request("POST", f"{API}/upload", host, [FORM, ("Content-Length", "5000")], b"--bound\r\n")
    chunk = request(
        "POST", f"{API}/queue/join", host, [JSON, ("Transfer-Encoding", "chunked")], b"zz\r\n{}\r\n0\r\n\r\n"
    )
    twice = request("POST", f"{API}/cancel", host, [JSON, ("Content-Length", "2"), ("Content-Length", "9")], b"{}")
    noise = rng.randbytes(rng.randint(1, 4000)) + b"\r\n\r\n"
    good = request("GET", "/", host)
    cut = good[: rng.randint(1, len(good) - 1)]
    return Sent(
        "", rng.choice([short, chunk, twice, noise, cut, good.replace(b"1.1", b"9.9"), b"\x16\x03\x01" * 50]), False
    )


@dataclass(frozen=True)
class Got:
    """One response. status: None if the server closed the connection without an answer."""

    status: int | None
    seconds: float
    head: bytes = b""
    body: bytes = b""


def send(port: int, sent: Sent, max_bytes: int = 4000) -> Got:
    """Send a request, and read the head of the response and up to `max_bytes` of it.

    Raises:
        TimeoutError: no answer within a minute.
    """
    start_time, got = time.monotonic(), b""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as line:
        try:
            line.sendall(sent.data)
            if not sent.whole:
                line.shutdown(socket.SHUT_WR)
        except OSError:  # refused before all was sent
            pass
        try:
            while b"\r\n\r\n" not in got and len(got) < max_bytes and (part := line.recv(4096)):
                got += part
            line.settimeout(0.2 if b"event-stream" in got else 5)
            while len(got) < max_bytes and (part := line.recv(4096)):
                got += part
        except TimeoutError:
            if b"\r\n\r\n" not in got:
                raise
        except OSError:
            pass
    head, _, body = got.partition(b"\r\n\r\n")
    status_line = head.split(b" ", 2)
    status = int(status_line[1]) if len(status_line) > 1 and status_line[1].isdigit() else None
    return Got(status, time.monotonic() - start_time, head.lower(), body)
