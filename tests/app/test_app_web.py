"""Reading addresses: which are connected to, through which proxies, for how long, how often, and in which spelling.

Every server here is on the loopback interface; which name resolves to what is set by the test.
"""

from __future__ import annotations

import http.server
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from input_table import line

from mmspec.app.io import web, web_connection
from mmspec.app.io.web_connection import is_public
from mmspec.vision.images import ImageError

pytestmark = pytest.mark.pages

Handler = http.server.BaseHTTPRequestHandler
Answer = Callable[[Handler], None]


class _Server:
    """Servers of one test, each with its answer; closed at the end."""

    def __init__(self) -> None:
        self._running: list[http.server.ThreadingHTTPServer] = []
        self.seen: list[tuple[str, str]] = []

    def __call__(self, answer: Answer, context: ssl.SSLContext | None = None) -> str:
        seen = self.seen

        class Quiet(Handler):
            def do_GET(self) -> None:
                seen.append((self.path, self.headers.get("Host", "")))
                answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
        running.daemon_threads = True
        if context is not None:
            running.socket = context.wrap_socket(running.socket, server_side=True)
        threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        self._running.append(running)
        return f"http{'s' if context else ''}://127.0.0.1:{running.server_address[1]}"

    def close(self) -> None:
        for running in self._running:
            running.shutdown()
            running.server_close()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Server]:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(web, "RETRY_WAITS_S", (0.0, 0.0))
    servers = _Server()
    yield servers
    servers.close()


def send(handler: Handler, body: bytes = b"ok", code: int = 200, **headers: str) -> None:
    handler.send_response(code)
    headers.setdefault("Content_Length", str(len(body)))
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def failure(url: str, *, public_only: bool = False, max_bytes: int = 1 << 20) -> str:
    with pytest.raises(ImageError) as failed:
        web.fetch(url, max_bytes, public_only=public_only)
    assert len(str(failed.value)) <= 300
    return failed.value.kind


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"NO_PROXY": "localhost"},
        {"no_proxy": "*"},
        {"FTP_PROXY": "http://127.0.0.1:9"},
        {"ALL_PROXY": "http://127.0.0.1:9"},
        {"HTTPS_PROXY": "http://127.0.0.1:9"},
        {"X_PROXY": "http://127.0.0.1:9"},
        {"HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"},
        {"HTTP_PROXY": ""},
    ],
    ids=str,
)
def test_no_variable_about_proxies_opens_this_machine(
    environ: dict[str, str], serve: _Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = serve(send)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert failure(f"{url}/a.png", public_only=True) == "AddressNotAllowed"
    assert not serve.seen, "nothing was asked of the private server"


def test_what_goes_to_a_proxy_is_not_checked_and_the_next_address_is(
    serve: _Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = serve(lambda handler: send(handler, b"secret"))
    proxy = serve(
        lambda handler: send(handler, code=302, Location=f"{private}/x") if "move" in handler.path else send(handler)
    )
    monkeypatch.setenv("HTTP_PROXY", proxy)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert web.fetch("http://pictures.example/a.png", 100) == b"ok"
    assert serve.seen == [("http://pictures.example/a.png", "pictures.example")]
    assert failure("http://pictures.example/move", public_only=True) == "AddressNotAllowed"


@line("a private address in another spelling (`fec0::1`, 6to4, NAT64, ISATAP)")
@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True), ("2606:2800:220:1::1", True), ("64:ff9b::5db8:d822", True), ("127.0.0.1", False),
        ("10.1.2.3", False), ("169.254.169.254", False), ("100.64.0.1", False), ("0.0.0.0", False), ("::1", False),
        ("224.0.0.1", False), ("255.255.255.255", False), ("fe80::1%eth0", False), ("fc00::1", False),
        ("::ffff:127.0.0.1", False), ("64:ff9b::7f00:1", False), ("2002:7f00:1::", False), ("ff02::1", False),
        ("::7f00:1", False), ("fec0::1", False), ("fec0::7f00:1", False), ("feff::1", False), ("3fff::1", False),
        ("5f00::1", False), ("4000::1", False), ("100::1", False), ("64:ff9b:1::a00:1", False), ("0.1.2.3", False),
        ("2001::f5ff:ffef", False), ("2001:db8::1", False), ("240.0.0.1", False), ("2002:5db8:d822::1", True),
        ("2606:2800:220:1:0:5efe:a00:1", False), ("2606:2800:220:1:0:5efe:5db8:d822", True), ("192.0.0.1", False),
        ("198.18.0.1", False), ("64:ff9b::a9fe:a9fe", False), ("192.88.99.1", False), ("::ffff:0:7f00:1", False),
        ("2002:a00:1::1", False), ("2001:0:5db8:d822::a247:27dd", False), ("2001:0:5db8:d822::80ff:fffe", False),
    ],
)  # fmt: skip
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public


def test_a_name_with_one_private_address_is_refused_and_resolved_once(
    serve: _Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, asked = serve(send), []

    def resolve(host: str, port: int, *args: Any, **options: Any) -> list[Any]:
        asked.append(host)
        numbers = ["93.184.216.34", "127.0.0.1"] if host == "mixed.example" else ["127.0.0.1"]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (number, port)) for number in numbers]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    port = url.rpartition(":")[2]
    assert failure(f"http://mixed.example:{port}/a", public_only=True) == "AddressNotAllowed"
    assert web.fetch(f"http://private.example:{port}/a", 10, public_only=False) == b"ok"
    assert asked == ["mixed.example", "private.example"], "a second answer could be another one"


@pytest.mark.parametrize("where", ["header", "body", "chunks", "redirect", "nothing"])
def test_a_server_that_drips_ends_the_fetch(where: str, serve: _Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "FETCH_TIMEOUT_S", 0.3)
    ended = threading.Event()

    def drip(handler: Handler) -> None:
        if where == "header":
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
        elif where == "redirect":
            handler.wfile.write(b"HTTP/1.1 302 Found\r\nLocation: /x\r\n\r\n")
        elif where == "chunks":
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        elif where == "body":
            handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while not ended.wait(0.02):
                handler.wfile.write(b"1\r\nx\r\n" if where == "chunks" else b"" if where == "nothing" else b"x")
        except OSError:
            pass

    url, start = serve(drip), time.monotonic()
    assert failure(url) == "TooSlow"
    ended.set()
    assert time.monotonic() - start < 20, "two orders of magnitude above the limit, for a busy machine"


@pytest.mark.parametrize(("late_s", "suspended"), [(0.5, False), (3600.0, True)])
def test_an_attempt_that_ended_long_ago_was_suspended(
    late_s: float, suspended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(web_connection, "time", SimpleNamespace(monotonic=lambda: now))
    pace = web_connection.Pace(20.0)
    pace.add(web_connection.MIN_BYTES_PER_S)  # one more second
    with socket.socket() as connected:
        pace.limit(connected)
        assert connected.gettimeout() == 21.0 and not pace.was_suspended
        now += 21.0 + late_s
        with pytest.raises(TimeoutError, match=r"no whole answer in 20 s \+ 1 s per 128 KiB"):
            pace.limit(connected)
    assert pace.was_suspended == suspended


def test_tls_handshake_that_never_ends(serve: _Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "FETCH_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert failure(f"https://127.0.0.1:{server.getsockname()[1]}/") == "TooSlow"


def test_https(serve: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    options = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *options], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    url = serve(send, context)
    assert failure(url) == "HttpError", "an unknown certificate"
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert web.fetch(url, 10, public_only=False) == b"ok"
    assert failure(url, public_only=True) == "AddressNotAllowed"


@line("an answer that ends early, or comes too slowly")
@pytest.mark.parametrize("kind", ["length", "chunks"])
def test_half_an_answer_is_asked_for_again_and_then_an_error(kind: str, serve: _Server) -> None:
    def cut(handler: Handler) -> None:
        handler.close_connection = True
        if handler.path == "/twice" and len(serve.seen) == 3:
            return send(handler, b"x" * 1000)
        if kind == "length":
            return send(handler, b"x" * 500, Content_Length="1000")
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3e8\r\n" + b"x" * 500)
        return None

    url = serve(cut)
    assert web.fetch(f"{url}/twice", 1 << 20, public_only=False) == b"x" * 1000
    serve.seen.clear()
    assert failure(f"{url}/never") == "Truncated" and len(serve.seen) == 3
    if kind == "length":
        assert len(web.fetch(url, 100, public_only=False)) == 101, "enough to refuse it, though the rest is missing"


@line("a busy server (429, 503), a lost connection")
@pytest.mark.parametrize("code", [429, 503])
@pytest.mark.parametrize("after", [None, "0", "date", "rubbish"])
def test_a_busy_server_is_asked_again(code: int, after: str | None, serve: _Server) -> None:
    date = format_datetime(datetime.now(UTC) - timedelta(seconds=5), usegmt=True)
    headers = {} if after is None else {"Retry_After": date if after == "date" else after}
    url = serve(lambda handler: send(handler, code=code, **headers) if len(serve.seen) < 3 else send(handler))
    assert web.fetch(url, 10, public_only=False) == b"ok" and len(serve.seen) == 3


def test_what_is_not_asked_again(serve: _Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for code, headers in ((404, {}), (403, {}), (500, {}), (429, {"Retry_After": "3600"})):
        serve.seen.clear()
        assert failure(serve(lambda handler, c=code, h=headers: send(handler, code=c, **h))) == "HttpError"  # type: ignore[misc]
        assert len(serve.seen) == 1, code
    waits: list[float] = []
    monkeypatch.setattr(web.time, "sleep", waits.append)
    serve.seen.clear()
    assert failure(serve(lambda handler: send(handler, code=429, Retry_After="7"))) == "HttpError"
    assert waits == [7.0, 7.0] and len(serve.seen) == 3


def test_a_connection_that_breaks_is_tried_twice_more(serve: _Server) -> None:
    def break_off(handler: Handler) -> None:
        if len(serve.seen) < 3:
            handler.connection.shutdown(socket.SHUT_RDWR)
            handler.close_connection = True
        else:
            send(handler)

    assert web.fetch(serve(break_off), 10, public_only=False) == b"ok"


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("/a b.png", "/a%20b.png"), ("/é.png", "/%C3%A9.png"), ("/a%20b.png", "/a%20b.png"),
        ("/a.png?q=ä b", "/a.png?q=%C3%A4%20b"), ("/a.png#part", "/a.png"), ("/100%.png", "/100%25.png"),
        ("/a\tb\n.png", "/ab.png"), ("", "/"), ("?q=1", "/?q=1"), ("/日本/絵.png", "/%E6%97%A5%E6%9C%AC/%E7%B5%B5.png"),
        ("/a.jpg?x=1&y=%2F+z", "/a.jpg?x=1&y=%2F+z"),
    ],
)  # fmt: skip
def test_spelling_of_paths(given: str, asked: str, serve: _Server) -> None:
    def answer(handler: Handler) -> None:
        if handler.path == "/moved":
            send(handler, code=302, Location=given or "/")
        else:
            send(handler, handler.path.encode())

    url = serve(answer)
    assert web.fetch(f"  {url}{given}\n", 1000, public_only=False).decode() == asked


def test_redirects_are_spelled_alike_and_bounded(serve: _Server) -> None:
    def answer(handler: Handler) -> None:
        if handler.path.startswith("/loop"):
            send(handler, code=302, Location=handler.path + "a")
        elif handler.path == "/ftp":
            send(handler, code=302, Location="ftp://127.0.0.1/x")
        elif handler.path == "/moved":
            send(handler, code=301, Location="/ä b.png".encode().decode("latin-1"))  # UTF-8 as it is
        else:
            send(handler, handler.path.encode())

    url = serve(answer)
    assert web.fetch(f"{url}/moved", 1000, public_only=False) == b"/%C3%A4%20b.png"
    assert failure(f"{url}/loop") == "HttpError"
    assert failure(f"{url}/ftp") in ("HttpError", "AddressNotAllowed")


def test_hosts(serve: _Server, monkeypatch: pytest.MonkeyPatch) -> None:
    url, asked = serve(send), []
    resolve = socket.getaddrinfo

    def record(host: str, port: int, *args: Any, **options: Any) -> Any:
        asked.append(host)
        return resolve("127.0.0.1", port, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", record)
    port = url.rpartition(":")[2]
    for host, name in (("münchen.example", "xn--mnchen-3ya.example"), ("A_b.example", "a_b.example")):
        assert web.fetch(f"HTTP://{host}:{port}/x", 10, public_only=False) == b"ok"
        assert asked.pop() == name and serve.seen.pop() == ("/x", f"{name}:{port}")


@pytest.mark.parametrize(
    "url",
    ["http://", "http://[", "http://127.0.0.1:99999/", "http://a b/x", "http://user:pw@127.0.0.1/x", "http:///x.png",
     "http://127.0.0.1/\ud83d.png", "http://.example/" + "x" * 10_000, "http://" + "ä" * 300 + "/x"],
)  # fmt: skip
def test_addresses_that_are_none(url: str) -> None:
    assert failure(url) == "BadAddress"


def test_user_agent(serve: _Server, monkeypatch: pytest.MonkeyPatch) -> None:
    agents: list[str | None] = []

    def answer(handler: Handler) -> None:
        agents.append(handler.headers["User-Agent"])
        send(handler)

    url = serve(answer)
    web.fetch(url, 10, public_only=False)
    monkeypatch.setenv(web.USER_AGENT_VARIABLE, "captions (me@example.org)")
    web.fetch(url, 10, public_only=False)
    assert agents[0] is not None and agents[0].startswith("mmspec/") and agents[1] == "captions (me@example.org)"


def test_the_body_of_a_redirect_takes_no_memory(serve: _Server) -> None:
    size = 8 << 20

    def answer(handler: Handler) -> None:
        if handler.path == "/x":
            return send(handler)
        with suppress(OSError):  # the client is gone
            send(handler, bytes(size), code=302, Location="/x")
        return None

    url, read = serve(answer), []
    original = web_connection._Answer.read

    def record(self: Any, amt: int | None = None) -> bytes:
        read.append(len(data := original(self, amt)))
        return data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(web_connection._Answer, "read", record)
        assert web.fetch(url, 10, public_only=False) == b"ok"
    assert max(read) <= web_connection.MAX_REDIRECT_BYTES
