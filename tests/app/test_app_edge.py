"""The edge of `mmspec demo`: who may use it, at which routes, with what bodies; and a corpus of hostile requests."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("gradio")

import corpus_http
import edge_server
from corpus_http import API, FORM, JSON, Got, Sent, form, request, send
from edge_server import ServerProcess
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.responses import PlainTextResponse

from mmspec.app.cli.main import main
from mmspec.app.errors import UsageError
from mmspec.app.scenes.examples import list_example_files
from mmspec.app.ui.comparison_stream import Conversation, stream_comparison
from mmspec.app.ui.context import Context, get_client
from mmspec.app.ui.middleware.bodies import RequestLimits, UploadFolder
from mmspec.app.ui.middleware.hosts import KnownHosts, SameOrigin
from mmspec.app.ui.middleware.names import ServedNames
from mmspec.app.ui.middleware.requests import check_json, is_served
from mmspec.app.ui.model_store import ModelStore
from mmspec.app.ui.report import TempStorage
from mmspec.app.ui.server import build_app
from mmspec.app.ui.tabs.batch import stream_batch as batch_steps
from mmspec.app.ui.worker import MAX_QUEUED_RUNS, CancelSignal, Client, LeftQueueError, Worker

pytestmark = pytest.mark.pages

HAMMER_S = float(os.environ.get("MMSPEC_HAMMER_S", "300"))
"""Seconds of the slow test with two clients."""
SITE = ("127.0.0.1", 7860)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with edge_server.run_server(tmp_path_factory.mktemp("edge") / "log.txt") as running:
        yield running


@pytest.fixture
def context() -> Iterator[Context]:
    context = Context(ModelStore("tiny"), TempStorage())
    yield context
    context.worker.close()
    context.temp_storage.close()


def get(
    server: ServerProcess, path: str, *headers: tuple[str, str], method: str = "GET", host: str | None = None
) -> Got:
    return send(server.port, Sent(path, request(method, path, server.host if host is None else host, headers)), 500_000)


def post(server: ServerProcess, path: str, body: bytes, *headers: tuple[str, str]) -> Got:
    return send(server.port, Sent(path, request("POST", path, server.host, headers, body)))


def one_line(got: Got, status: int) -> bool:
    return got.status == status and got.body.count(b"\n") <= 1 and len(got.body) < 300


def file_part(content: bytes, name: str = "a.png") -> tuple[str, bytes]:
    return f'form-data; name="files"; filename="{name}"', content


def no_trace(server: ServerProcess) -> None:
    log = server.log.read_text(errors="replace")
    assert "Traceback" not in log and "Exception in ASGI" not in log, log[log.find("Traceback") - 500 :][:3000]


# hosts and origins


def answer(layer: Any, headers: dict[str, list[str]], server: tuple[str, int] = SITE) -> int:
    """Status of a request that passes one layer in front of an app that answers 200."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("x")(scope, receive, send)

    statuses = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    pairs = [(name.encode(), value.encode()) for name, values in headers.items() for value in values]
    scope = {"type": "http", "method": "GET", "path": "/", "headers": pairs, "server": server, "query_string": b""}
    asyncio.run(ExceptionMiddleware(layer(app))(scope, None, send))  # type: ignore[arg-type]
    return int(statuses[0])


@pytest.mark.parametrize(
    ("host", "bound", "server", "good"),
    [
        ("127.0.0.1:7860", "127.0.0.1", SITE, True),
        ("LOCALHOST:7860", "127.0.0.1", SITE, True),
        ("[::1]:7860", "::1", ("::1", 7860), True),
        ("localhost", "127.0.0.1", ("127.0.0.1", 80), True),
        ("localhost:7861", "127.0.0.1", SITE, True),  # a forwarded port; no other site can have this name
        ("evil.example:7860", "127.0.0.1", SITE, False),
        ("evil.example:7860", "0.0.0.0", SITE, False),
        ("127.0.0.1.evil.example:7860", "0.0.0.0", SITE, False),
        ("localhost.evil.example", "0.0.0.0", SITE, False),
        ("192.0.2.7:7860", "0.0.0.0", ("192.0.2.7", 7860), True),  # this end of the connection
        ("[2001:db8::7]:7860", "::", ("2001:db8::7", 7860), True),
        ("192.0.2.8:7860", "0.0.0.0", ("192.0.2.7", 7860), False),
        ("box.lan:7860", "box.lan", ("192.0.2.7", 7860), True),
        ("[2001:db8::7]:7860", "2001:db8::7", ("::1", 7860), True),
        ("demo.example.org", "0.0.0.0", SITE, True),
        ("demo.example.org:443", "0.0.0.0", SITE, True),
        ("www.demo.example.org", "0.0.0.0", SITE, False),
        ("one.example.org:444", "0.0.0.0", SITE, True),
        ("user@localhost:7860", "127.0.0.1", SITE, False),
        ("localhost:7860/x", "127.0.0.1", SITE, False),
        ("0.0.0.0:7860", "0.0.0.0", SITE, False),
        ("", "0.0.0.0", SITE, False),
    ],
)
def test_names_that_are_served(host: str, bound: str, server: tuple[str, int], good: bool) -> None:
    names = ServedNames(bound, ["demo.example.org", "one.example.org:444"])
    layer = partial(KnownHosts, names=names)
    assert answer(layer, {"host": [host]}, server) == (200 if good else 400)
    assert answer(layer, {}) == 400


@pytest.mark.parametrize(
    ("origins", "good"),
    [
        ([], True),
        (["http://localhost:7860"], True),
        (["HTTP://LocalHost:7860"], True),
        (["https://localhost:7860"], True),  # TLS ends at a proxy
        (["https://demo.example.org"], True),
        (["https://one.example.org:444"], True),
        (["https://one.example.org:445"], False),
        (["http://127.0.0.1:7860"], False),
        (["http://localhost:3000"], False),
        (["http://localhost"], False),
        (["http://localhost:7860.evil.example"], False),
        (["http://evil.example"], False),
        (["http://localhost:7860", "http://evil.example"], False),
        (["null"], False),
        (["file://"], False),
        (["chrome-extension://localhost:7860"], False),
        ([""], False),
    ],
)
def test_origins_that_are_served(origins: list[str], good: bool) -> None:
    layer = partial(SameOrigin, names=ServedNames("127.0.0.1", ["demo.example.org", "one.example.org:444"]))
    assert answer(layer, {"host": ["localhost:7860"], "origin": origins}) == (200 if good else 403)


def test_allowed_hosts_are_names(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("http://x.example", "*", "*.example.org", "a b", "x.example/", "", "x:99999"):
        with pytest.raises(ValueError, match="must be a host name"):
            ServedNames("0.0.0.0", [wrong])
        with pytest.raises(SystemExit):
            main(["demo", "--allowed-host", wrong])
        assert "must be a host name" in capsys.readouterr().err


def test_another_name_is_not_answered(server: ServerProcess) -> None:
    assert get(server, "/").status == 200 and get(server, "/config").status == 200
    for path in ("/", "/config", f"{API}/info", f"{API}/queue/status", "/monitoring"):
        assert one_line(get(server, path, host=f"evil.example:{server.port}"), 400)
    assert get(server, "/config", host="demo.example.org").status == 200


def test_no_origin_is_reflected(server: ServerProcess) -> None:
    ours = f"http://127.0.0.1:{server.port}"
    wanted = b"access-control-allow-origin: "
    for origin in ("http://evil.example", "http://localhost:3000", "null"):
        for method in ("GET", "OPTIONS"):
            request_parts = ("Origin", origin), ("Access-Control-Request-Method", "POST")
            for host in (None, "demo.example.org"):
                got = get(server, "/config", *request_parts, method=method, host=host)
                assert one_line(got, 403) and b"access-control" not in got.head
        assert post(server, f"{API}/cancel", b"{}", JSON, ("Origin", origin)).status == 403
    got = get(server, "/config", ("Origin", ours))
    assert got.status == 200 and wanted + ours.encode() in got.head
    got = get(server, "/config", ("Origin", ours), ("Access-Control-Request-Method", "POST"), method="OPTIONS")
    assert got.status == 200 and wanted + ours.encode() in got.head
    assert b"access-control" not in get(server, "/config").head


def test_a_header_cannot_name_the_address_of_the_app(server: ServerProcess) -> None:
    for name, value in (("X-Forwarded-Host", "evil.example"), ("X-Gradio-Server", "http://evil.example")):
        got = get(server, "/config", (name, value))
        assert got.status == 200 and b"evil.example" not in got.body
    assert b"demo.example.org" in get(server, "/config", ("X-Forwarded-Host", "demo.example.org")).body


def test_a_form_of_another_site_is_no_json(server: ServerProcess) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        body = json.dumps({"session_hash": "a", "fn_index": 0, "data": [None]}).encode()
        assert one_line(post(server, f"{API}/queue/join", body, ("Content-Type", kind)), 422)
    assert post(server, f"{API}/queue/join", body).status == 422, "no type at all"


# routes

OPEN = {
    "/", "/config", "/config/", "/theme.css", "/favicon.ico", "/manifest.json", "/robots.txt",
    "/assets/{path:path}", "/static/{path:path}",
    *(API + path for path in (
        "/info", "/info/", "/theme.css", "/startup-events", "/app_id", "/queue/status", "/queue/data",
        "/upload_progress",
        "/heartbeat/{session_hash}", "/file={path_or_url:path}", "/call/{api_name}/{event_id}",
        "/call/v2/{api_name}/{event_id}", "/call/{api_name}", "/call/{api_name}/", "/call/v2/{api_name}",
        "/call/v2/{api_name}/", "/run/{api_name}", "/run/{api_name}/", "/api/{api_name}", "/api/{api_name}/",
        "/queue/join", "/cancel", "/reset", "/reset/", "/upload",
    )),
}  # fmt: skip


def registered(routes: Any) -> Iterator[tuple[str, str]]:
    """Method and path of all routes, those of included routers too."""
    for route in routes:
        inner = getattr(route, "original_router", None)
        if inner is not None:
            yield from registered(inner.routes)
        else:
            yield from ((method, route.path) for method in getattr(route, "methods", None) or ())


def test_every_route_of_gradio_is_listed_or_closed(server: ServerProcess, context: Context) -> None:
    from gradio.routes import App

    found = list(registered(App.create_app(build_app(context)).routes))
    assert len(found) > 60 and {path for _, path in found} >= OPEN
    for method, template in found:
        path = re.sub(r"\{[^}]*\}", "x", template)
        assert is_served(path) == (template in OPEN), template
        if template not in OPEN:
            assert one_line(get(server, path, method=method), 404) or method == "HEAD", template


def test_what_waits_in_line_is_not_run_past_it(server: ServerProcess) -> None:
    sent = post(server, f"{API}/upload", form([file_part(list_example_files()[0].read_bytes())]), FORM)
    file = {"path": json.loads(sent.body)[0], "meta": {"_type": "gradio.FileData"}}
    compare, answer = server.events["compare"], server.events["answer"]
    chosen = ["tiny", "auto", "none", 0, 0, 8]
    for data, index in (
        ([file, "what?", *chosen], None),
        ([file, "what?", *chosen], compare),
        ([file, None, "picture", "what?", None, *chosen, "automatic", [], "plain generate"], answer),
    ):
        for route in ("/run/compare", "/api/compare", "/run/predict"):
            body = {"data": data, "session_hash": "past"} | ({} if index is None else {"fn_index": index})
            got = post(server, API + route, json.dumps(body).encode(), JSON)
            assert got.status in (400, 404), (route, index, got)


def test_a_stream_is_for_who_has_asked(server: ServerProcess) -> None:
    for path in ("/queue/data?session_hash=nobody", "/queue/data", "/call/compare/nobody", "/call/v2/compare/nobody"):
        assert one_line(get(server, API + path), 404)
    no_trace(server)


# bodies


def raw(server: ServerProcess, head: str, body: Iterator[bytes], pause_s: float = 0.0) -> tuple[int | None, int]:
    """Send a body piece by piece until an answer comes: its status, and the bytes that were sent."""
    sent = 0
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as line:
        line.sendall(head.encode())
        line.setblocking(False)
        answer, end = b"", time.monotonic() + 60
        for part in body:
            while part and time.monotonic() < end:
                try:
                    number = line.send(part)
                    part, sent = part[number:], sent + number
                except BlockingIOError:
                    time.sleep(0.001)
                except OSError:
                    break
            time.sleep(pause_s)
            try:
                answer = line.recv(4096)
                break
            except BlockingIOError:
                pass
            except OSError:
                return None, sent
        line.settimeout(60)
        answer = answer or line.recv(4096)
    return (int(answer.split(b" ", 2)[1]) if answer else None), sent


def head_of(server: ServerProcess, *lines: str) -> str:
    fixed = ("POST /gradio_api/upload HTTP/1.1", f"Host: {server.host}", ": ".join(FORM), *lines)
    return "\r\n".join([*fixed, "", ""])


OPENING = b'--bound\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'


def endless(chunked: bool) -> Iterator[bytes]:
    """50 MB of one file."""
    for number in range(800):
        part = (b"" if number else OPENING) + b"z" * 65_536
        yield b"%x\r\n%s\r\n" % (len(part), part) if chunked else part


def test_the_upload_limit_is_the_servers_own(server: ServerProcess) -> None:
    good = post(server, f"{API}/upload", form([file_part(b"x" * 1_500_000)]), FORM)
    assert good.status == 200 and json.loads(good.body)[0].endswith("a.png")
    before = settled(server)
    status, sent = raw(server, head_of(server, "Content-Length: 50000000000"), endless(False), pause_s=0.02)
    assert status == 413 and sent < 2_000_000, "refused by its announced length"
    status, sent = raw(server, head_of(server, "Transfer-Encoding: chunked"), endless(True))
    assert status == 413 and sent < 12_000_000, "one file, no length"
    status, _ = raw(server, head_of(server, "Content-Length: 4900000"), endless(False))
    assert status == 413, "one file above its own limit, below that of a request"
    several = form([file_part(b"x" * 1_400_000, f"{number}.png") for number in range(5)])
    status, _ = raw(
        server, head_of(server, "Transfer-Encoding: chunked"), iter([b"%x\r\n%s\r\n" % (len(several), several)])
    )
    assert status == 413, "several files, together above the limit of a request"
    many = form([file_part(b"", f"{number}.png") for number in range(1000)])
    assert one_line(post(server, f"{API}/upload", many, FORM), 400)
    assert settled(server) == before, "nothing of them is left on the disk"
    no_trace(server)


def test_bodies_that_do_not_come(server: ServerProcess) -> None:
    before = settled(server)
    began = time.monotonic()
    status, _ = raw(server, head_of(server, "Content-Length: 100000"), iter([OPENING + b"x" * 500]))
    assert status == 408 and time.monotonic() - began < edge_server.IDLE_TIMEOUT_S + 5, "less than announced"
    drip = (OPENING[place : place + 1] for place in range(len(OPENING)))
    status, _ = raw(server, head_of(server, "Content-Length: 100000"), drip, pause_s=0.2)
    assert status == 408 and time.monotonic() - began < 30, "a byte now and then"
    with socket.create_connection(("127.0.0.1", server.port)) as line:
        line.sendall(head_of(server, "Content-Length: 1500000").encode() + OPENING + b"x" * 1_000_000)
        time.sleep(0.3)
    assert settled(server) == before, "the client left"
    for data in (
        form([('form-data; name="other"; filename="a.png"', b"x" * 9000)]),
        form([('form-data; name="files"', b"x")]),
    ):
        post(server, f"{API}/upload", data, FORM)
    assert settled(server) == before, "a field that nobody reads"
    no_trace(server)


def settled(server: ServerProcess) -> set[Path]:
    """The uploads, once the server has tidied up after a request."""
    time.sleep(0.5)
    return set(server.files())


def test_the_server_fetches_nothing(server: ServerProcess) -> None:
    meta = {"_type": "gradio.FileData"}
    for path in (
        "http://192.0.2.1/a.png",
        "HTTPS://x.example/a.png",
        " ftp://x.example/a",
        "//x.example/a",
        "\\\\x\\a",
    ):
        for file in ({"path": path, "meta": meta}, [{"a": [{"path": path, "url": path, "meta": meta}]}]):
            inputs = {"data": [file, "what?", "tiny", "auto", "none", 0, 0, 8]}
            for body in (inputs, inputs | {"event_data": file}, {"image": file, "question": "what?"}):
                for route in ("call/compare", "call/v2/compare", "queue/join", "run/predict"):
                    assert one_line(post(server, f"{API}/{route}", json.dumps(body).encode(), JSON), 422)


def test_headers_have_a_limit(server: ServerProcess) -> None:
    """That of the HTTP parser of uvicorn, once 64 KB are incomplete; a layer would come after it."""
    for headers in ([("X", "y" * 400_000)], [("X-Y", "z" * 100)] * 4000):
        assert get(server, "/", *headers).status in (400, 431)
    assert get(server, "/?" + "q" * 400_000).status in (400, 431)


def test_uploads_together_have_a_limit(server: ServerProcess, tmp_path: Path) -> None:
    folder = tmp_path / "uploads"
    uploads = UploadFolder(folder, RequestLimits(max_stored_bytes=10_000, min_free_bytes=0))
    assert uploads.free_bytes() == 10_000
    (folder / "sha").mkdir(parents=True)
    (folder / "sha" / "a.png").write_bytes(b"x" * 1001)
    (folder / "tmp1").write_bytes(b"x")
    assert 0 < uploads.free_bytes() < 1000, "empty files take space too"
    with uploads.uploading(lambda: None):  # type: ignore[arg-type,return-value]
        with uploads.uploading(lambda: None):  # type: ignore[arg-type,return-value]
            pass
        assert (folder / "tmp1").exists(), "another may still be writing it"
    assert not (folder / "tmp1").exists() and (folder / "sha" / "a.png").exists()
    (folder / "sha" / "b.png").write_bytes(b"x" * 5000)
    with pytest.raises(HTTPException, match="holds as many uploads"), uploads.uploading(lambda: None):  # type: ignore[arg-type,return-value]
        pass


def test_bodies_that_are_no_json() -> None:
    check_json(b'{"a": [1e400, "\xc3\xa9"]}')
    for wrong in (b"", b"\xff", b"[" * 10**6, b'{"a":' * 10**5):
        with pytest.raises(HTTPException):
            check_json(wrong)


# the line for the device


def test_who_waits_sees_his_place_and_leaves_at_once(context: Context) -> None:
    gate = threading.Event()
    for _ in range(2):
        context.worker.submit(lambda: gate.wait(60))
    chosen = ("tiny", "auto", "none", 0, 0, 8, "automatic")
    context.sessions.begin("me")
    run = stream_comparison(context, str(list_example_files()[0]), "what is it?", Conversation(), chosen, Client("me"))
    assert "2 runs ahead" in next(run)[0] and "2 runs ahead" in next(run)[0]
    context.sessions.begin("other")
    batch = batch_steps(context, [{"path": str(list_example_files()[0])}], "", chosen, Client("other"))
    assert next(batch)[0].num_ahead == 3
    began = time.monotonic()
    context.sessions.cancel("me")
    assert list(run) == [] and time.monotonic() - began < 2 and context.sessions.take_result("me") is None
    next(batch)
    assert next(batch)[0].num_ahead == 2, "one has left"
    context.sessions.cancel("other")
    last, busy = list(batch)[-1]
    assert last.cancelled and not busy and not last.input_folder.exists() and time.monotonic() - began < 4
    gate.set()


def test_the_line_has_an_end() -> None:
    worker, gate = Worker(), threading.Event()
    for _ in range(MAX_QUEUED_RUNS + 1):
        worker.submit(lambda: gate.wait(60))
    with pytest.raises(UsageError, match="20 runs are waiting"):
        next(worker.submit_and_poll(lambda: 1, CancelSignal()))
    gate.set()
    worker.close()


def test_one_session_has_at_most_three_queued_runs() -> None:
    worker, gate = Worker(), threading.Event()
    worker.submit(lambda: gate.wait(60))
    client = Client("one", "192.0.2.1")
    queued = [worker.submit_and_poll(lambda: 1, CancelSignal(), 0.01, client=client) for _ in range(3)]
    for run in queued:
        next(run)
    with pytest.raises(UsageError, match="3 runs of this session are waiting already"):
        next(worker.submit_and_poll(lambda: 1, CancelSignal(), 0.01, client=client))
    other = worker.submit_and_poll(lambda: 1, CancelSignal(), 0.01, client=Client("two", "192.0.2.1"))
    assert next(other) == 4, "another session still gets in"
    queued.pop().close()
    again = worker.submit_and_poll(lambda: 1, CancelSignal(), 0.01, client=client)
    assert next(again) == 4, "a run that left the queue does not count"
    gate.set()
    worker.close()


def test_one_address_cannot_fill_the_queue_with_new_sessions() -> None:
    worker, gate = Worker(), threading.Event()
    worker.submit(lambda: gate.wait(60))
    clients = [Client(f"session {number}", "192.0.2.1") for number in range(MAX_QUEUED_RUNS)]
    runs = [worker.submit_and_poll(lambda: 1, CancelSignal(), 0.01, client=client) for client in clients]
    for run in runs[:10]:
        next(run)
    with pytest.raises(UsageError, match="10 runs from your network address are waiting already"):
        next(runs[10])
    assert next(worker.submit_and_poll(lambda: 1, CancelSignal(), 0.01, client=Client("x", "192.0.2.2"))) == 11
    gate.set()
    worker.close()


def test_pages_submit_with_their_session(context: Context) -> None:
    gate = threading.Event()
    context.worker.submit(lambda: gate.wait(60))
    settings = ("tiny", "auto", "none", 0, 0, 8, "automatic")
    path = str(list_example_files()[0])
    client = Client("me", "192.0.2.1")
    runs = [stream_comparison(context, path, "what is it?", Conversation(), settings, client) for _ in range(3)]
    for run in runs:
        assert "ahead of yours" in next(run)[0]
    batch = batch_steps(context, [{"path": path}], "", settings, client)
    with pytest.raises(UsageError, match="3 runs of this session are waiting already"):
        next(batch)
    for run in runs:
        run.close()
    gate.set()


def test_a_request_names_its_client() -> None:
    request = SimpleNamespace(session_hash="abc", client=SimpleNamespace(host="192.0.2.1"))
    assert get_client(request) == Client("abc", "192.0.2.1")  # type: ignore[arg-type]
    assert get_client(None) == Client("api")


def test_leaving_is_told_from_ending() -> None:
    worker, gate, halt = Worker(), threading.Event(), CancelSignal()
    worker.submit(lambda: gate.wait(60))
    run = worker.submit_and_poll(lambda: 1, halt, interval_s=0.01)
    assert next(run) == 1
    halt.cancel()
    with pytest.raises(LeftQueueError):
        next(run)
    gate.set()
    worker.close()


# the corpus


def survive(server: ServerProcess, sent: Sent) -> Got:
    """Send one; it is answered in time, with no failure of the server."""
    got = send(server.port, sent)
    assert got.seconds < corpus_http.PATIENCE_S, sent.name
    assert got.status is not None or not sent.whole, (sent.name, sent.data[:300])
    full = got.status == 503 and b"ueue is full" in got.body
    assert got.status is None or got.status < 500 or full, (sent.name, got, sent.data[:600])
    return got


def corpus(server: ServerProcess, seed: int, count: int) -> None:
    statuses: dict[int | None, int] = {}
    for sent in corpus_http.requests(seed, count, server.host):
        got = survive(server, sent)
        statuses[got.status] = statuses.get(got.status, 0) + 1
    print(statuses, f"{server.peak_mb():.0f} MB")
    assert len(statuses) > 6, statuses
    assert get(server, "/config").status == 200
    no_trace(server)
    assert server.peak_mb() < 1000
    assert (
        sum(path.stat().st_size for path in server.files())
        <= edge_server.MAX_STORED_BYTES + 2 * edge_server.MAX_REQUEST_BYTES
    )


def test_the_corpus_knows_the_events_of_the_pages(server: ServerProcess) -> None:
    assert server.inputs == corpus_http.EVENTS


def test_hostile_requests_are_refused(server: ServerProcess) -> None:
    corpus(server, 1, 60)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thousands_of_hostile_requests_are_refused(server: ServerProcess) -> None:
    corpus(server, 2, 4000)


def visit(server: ServerProcess, number: int) -> None:
    """A valid visitor's question, from the upload to the answer."""
    body = form([file_part(list_example_files()[number % 3].read_bytes(), "a.png")])
    sent = post(server, f"{API}/upload", body, FORM)
    assert sent.status in (200, 413), sent
    if sent.status == 413:  # the app is full of the other's uploads
        return
    file = {"path": json.loads(sent.body)[0], "meta": {"_type": "gradio.FileData"}}
    data = [file, "what is it?", "tiny", "auto", "none", 0, 0, 8]
    request_parts = {"data": data, "fn_index": server.events["compare"], "session_hash": secrets.token_hex(8)}
    got = post(server, f"{API}/queue/join", json.dumps(request_parts).encode(), JSON)
    assert got.status in (200, 503), got
    if got.status == 200:
        answer = follow(server, f"{API}/queue/data?session_hash={request_parts['session_hash']}")
        assert '"success":true' in answer or "waiting already" in answer, answer[-500:]


def follow(server: ServerProcess, path: str) -> str:
    """An event stream until the run has ended; at most a minute."""
    got, end = b"", time.monotonic() + corpus_http.PATIENCE_S
    with socket.create_connection(("127.0.0.1", server.port), timeout=corpus_http.PATIENCE_S) as line:
        line.sendall(request("GET", path, server.host))
        while b"process_completed" not in got or b'"success"' not in got.partition(b"process_completed")[2]:
            part = line.recv(65_536)
            assert part and time.monotonic() < end, got[-500:]
            got += part
    return got.decode(errors="replace")


@pytest.mark.slow
@pytest.mark.timeout(HAMMER_S + 600)
def test_two_clients_hammer_and_everyone_is_answered(server: ServerProcess) -> None:
    end, wrong, counts = time.monotonic() + HAMMER_S, [], [0, 0]

    def client(seed: int) -> None:
        chance, batch = random.Random(seed), 0
        try:
            while time.monotonic() < end:
                visit(server, chance.randint(0, 99))
                batch += 1
                for sent in corpus_http.requests(seed * 100_000 + batch, 8, server.host):
                    survive(server, sent)
                counts[seed] += 9
        except BaseException as error:
            wrong.append(error)

    clients = [threading.Thread(target=client, args=(seed,)) for seed in (0, 1)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    if wrong:
        raise wrong[0]
    print(counts, f"{server.peak_mb():.0f} MB")
    no_trace(server)
    assert min(counts) >= 9 and server.peak_mb() < 1000
    visit(server, 0)
