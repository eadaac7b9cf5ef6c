"""The demo served: who may use it, at which paths, with what bodies; every attack is refused. See `make test-app`."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio")

import httpx

from mmspec.app.cli.main import main
from mmspec.app.errors import UsageError
from mmspec.app.scenes.examples import list_example_files
from mmspec.app.ui.guard import Guard, host_of
from mmspec.app.ui.limits import Limits
from mmspec.app.ui.model import DemoModel
from mmspec.app.ui.server import serve

pytestmark = [pytest.mark.pages, pytest.mark.timeout(200)]
OWN = ("", "page/chat.js", "page/style.css", "examples/cart_rainbow.png", "state")
GRADIO = (
    *("config", "monitoring", "monitoring/summary", "theme.css", "svelte/x", "assets/index.js", "static/img/logo.svg"),
    *("docs", "openapi.json", "manifest.json", "pwa_icon/3", "gradio_api", "gradio_api/", "gradio_api/info"),
    *("gradio_api/queue/join", "gradio_api/queue/data?session_hash=x", "gradio_api/queue/status", "gradio_api/upload"),
    *("gradio_api/deep_link?session_hash=x", "gradio_api/component_server", "gradio_api/call/x", "gradio_api/run/x"),
    *("gradio_api/file=/etc/passwd", "gradio_api/file=../../etc/passwd", "gradio_api/proxy=http://127.0.0.1:1/"),
    *("gradio_api/heartbeat/x", "gradio_api/reset", "gradio_api/cancel", "gradio_api/dev/reload", "gradio_api/token"),
    *("page/../server.py", "page/%2e%2e%2fserver.py", "examples/..%2f..%2fx", "report/..%2f..%2fx", "//x/y", "%00"),
)


class Address:
    """A running demo, seen from outside."""

    def __init__(self, url: str) -> None:
        self.url, self.client = url, httpx.Client(base_url=url, timeout=60)

    def ask(self, **sent: Any) -> list[dict[str, Any]]:
        """All events of a question."""
        body = {"question": "what is it?", "file": "cart_rainbow.png", "max_new_tokens": 12} | sent
        with self.client.stream("POST", "ask", json=body) as response:
            return [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]


@pytest.fixture(scope="module")
def demo() -> Iterator[Any]:
    with serve(DemoModel("tiny"), limits=Limits(max_file_mb=2), port=0) as running:
        while running.model.phase != "ready":
            time.sleep(0.1)
        yield running


@pytest.fixture
def site(demo: Any) -> Iterator[Address]:
    found = Address(demo.url)
    yield found
    found.client.close()


@pytest.mark.parametrize(
    ("authority", "host"),
    [
        *(("a.b:80", "a.b"), ("[::1]:7860", "::1"), ("LOCALHOST", "localhost"), ("a:b", ""), ("a/b", ""), ("", "")),
        *(("user@localhost", ""), ("localhost:99999", ""), ("localhost#x", ""), ("[::1", ""), ("a b", "a b")),
    ],
)
def test_hosts(authority: str, host: str) -> None:
    assert host_of(authority) == host


def test_other_names_and_sites_are_refused(site: Address, demo: Any) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil", "", "a" * 300, "0x7f.1", "@localhost"):
        for path in (*OWN, "file", "ask", "compare"):
            assert site.client.get(path, headers={"Host": host}).status_code == 400, (host, path)
    for origin in ("http://evil.example", "null", "http://localhost:1", "file://", "https://127.0.0.1.evil"):
        for method in ("GET", "POST", "OPTIONS"):
            got = site.client.request(method, "ask", headers={"Origin": origin}, json={})
            assert got.status_code == 403 and "access-control-allow-origin" not in got.headers, origin
        assert site.client.post("file", content=b"x", headers={"Origin": origin}).status_code == 403
    assert not list(demo.uploads.folder.iterdir())
    assert site.client.get("state", headers={"Origin": demo.url.rstrip("/")}).status_code == 200


def test_the_paths_are_the_pages_own(site: Address) -> None:
    for path in OWN:
        got = site.client.get(path)
        assert got.status_code == 200 and got.headers["x-frame-options"] == "DENY", path
        assert "frame-ancestors 'none'" in got.headers["content-security-policy"]
    for path in GRADIO:
        for method in ("GET", "POST", "PUT", "DELETE"):
            got = site.client.request(method, site.url + path, json={"data": [], "session_hash": "x"})
            assert got.status_code in (404, 405) and len(got.content) < 100, (method, path, got.status_code)
    evil = {"X-Forwarded-Host": "evil.example", "X-Gradio-Server": "http://evil.example"}
    assert all(b"evil" not in site.client.get(path, headers=evil).content for path in OWN)


def test_a_question_is_streamed_and_kept(site: Address, demo: Any) -> None:
    events = site.ask(page="me")
    reports = [event["report"] for event in events if "report" in event]
    assert reports and reports[-1]["identical"] and not [event for event in events if "error" in event]
    found = site.client.get(f"report/{reports[-1]['id']}").json()
    assert found == json.loads(json.dumps(reports[-1])) and str(demo.uploads.folder) not in json.dumps(found)
    code = site.client.get(f"report/{found['id']}.py")
    assert "mmspec.patch" in code.text and "attachment" in code.headers["content-disposition"]
    later = [event["report"] for event in site.ask(page="me", after=found["id"], file=None) if "report" in event][-1]
    assert later["after"] == found["id"] and later["turns"][0]["question"] == "what is it?"
    for name in ("nothing", "x" * 300, "..%2f..", f"{found['id']}.json"):
        assert site.client.get(f"report/{name}").status_code == 404


def test_uploads(site: Address, demo: Any) -> None:
    def upload(content: Any, name: str = "a.png", **headers: str) -> httpx.Response:
        return site.client.post("file", content=content, headers={"x-file-name": name, **headers})

    picture = list_example_files()[0].read_bytes()
    sent = upload(picture, "..%2F..%2Fevil%1B%5B31m.png")
    file = sent.json()["id"]
    assert sent.status_code == 200 and str(demo.uploads.folder) not in sent.text
    report = [event["report"] for event in site.ask(file=file) if "report" in event][-1]
    assert report["file_name"] == "evil[31m.png" and report["identical"]
    before = set(demo.uploads.folder.iterdir())
    assert upload(b"x" * 3_000_000).status_code == 413, "refused by its announced length"
    assert upload(iter([b"x" * 100_000] * 50)).status_code == 413, "no length"
    with socket.create_connection(("127.0.0.1", httpx.URL(site.url).port)) as line:
        line.sendall(b"POST /file HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999\r\n\r\n" + b"x" * 999)
        time.sleep(0.3)
    time.sleep(0.5)
    assert set(demo.uploads.folder.iterdir()) == before, "nothing of them is left"
    bad = upload(b"\x89PNG\r\n\x1a\nnothing", "photo (1).png").json()["id"]
    assert site.ask(file=bad)[-1] == {
        "error": "photo (1).png cannot be used: it is damaged or incomplete; save the picture again."
    }


@pytest.mark.parametrize("path", ["ask", "compare"])
def test_bodies_that_are_no_question(site: Address, path: str) -> None:
    kind = {"content-type": "application/json"}
    for body in (b"", b"\xff", b"[" * 90_000, b"[]", b"null", b'{"question": 1e999}', b"{" * 200_000):
        got = site.client.post(path, content=body, headers=kind)
        assert got.status_code == 422 and len(got.json()["error"]) < 200, body[:20]
    for kind_of in ("text/plain", "application/x-www-form-urlencoded"):
        body = b'{"question": "a", "file": "cart_rainbow.png"}'
        assert site.client.post(path, content=body, headers={"content-type": kind_of}).status_code == 422
    for file in ("http://192.0.2.1/a.png", "/etc/passwd", {"path": "http://192.0.2.1/", "meta": {}}, [1], 3):
        got = site.client.post(path, json={"question": "what?", "file": file})
        assert got.status_code == 422 and "choose a picture" in got.json()["error"]


@pytest.mark.parametrize("path", ["ask", "compare"])
def test_a_client_that_leaves_ends_its_run(site: Address, demo: Any, path: str) -> None:
    body = {"question": "what is it?", "file": "cart_rainbow.png", "max_new_tokens": 1024, "page": "gone"}
    with site.client.stream("POST", path, json=body) as response:
        next(response.iter_lines())
    began = time.monotonic()
    site.ask(page="other", max_new_tokens=2)
    assert time.monotonic() - began < 5 and not demo.worker.is_busy


def test_random_requests_are_answered(site: Address, caplog: pytest.LogCaptureFixture) -> None:
    """Methods, paths and bodies at random, the same ones in each run: none is answered 500, none leaves a trace."""
    chance = random.Random(5)
    port = httpx.URL(site.url).port
    pieces = (
        "/",
        "ask",
        "compare",
        "file",
        "report/",
        "state",
        "..",
        "%2e%2e",
        "%00",
        "?a=b",
        "//",
        "gradio_api",
        "\\",
        "é",
    )
    for _ in range(400):
        method = chance.choice(("GET", "HEAD", "POST", "PUT", "OPTIONS", "TRACE", "PROPFIND"))
        path = "/" + "".join(chance.choices(pieces, k=chance.randint(0, 4)))
        body = chance.choice((b"", b"{}", b'{"question":"x","file":[]}', bytes(chance.randbytes(40))))
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
        kind = chance.choice(("", "Content-Type: application/json\r\n", "Origin: null\r\n", "X-File-Name: %ff%00\r\n"))
        with socket.create_connection(("127.0.0.1", port), timeout=20) as line:
            line.sendall((head + kind + "\r\n").encode() + body)
            status = line.recv(100).split(b" ", 2)[1:2]
        assert status != [b"500"], (method, path, body, kind)
    assert not [record for record in caplog.records if record.exc_info]


def test_a_password_is_asked_of_everything_private() -> None:
    with ExitStack() as stack:
        running = stack.enter_context(serve(DemoModel("tiny"), port=0, auth=("me", "a long password")))
        client = stack.enter_context(httpx.Client(base_url=running.url, timeout=60))
        for one in ("GET state", "POST file", "POST ask", "POST compare", "GET report/x"):
            method, path = one.split()
            assert client.request(method, path, json={}).status_code == 401
        assert client.post("login", data={"username": "me", "password": "wrong"}).status_code == 400
        assert client.post("login", data={"username": "me", "password": "a long password"}).status_code == 200
        cookies = "; ".join(f"{one.name}={one.value}" for one in client.cookies.jar)
        assert client.get("state", headers={"cookie": cookies}).status_code == 200


def test_a_proxy_and_a_tunnel_may_use_their_names() -> None:
    with serve(DemoModel("tiny"), port=0, root_path="https://example.org/demo") as running:
        names = {"Host": "example.org", "Origin": "https://example.org"}
        assert httpx.get(f"{running.url}state", headers=names).status_code == 200
        assert httpx.get(f"{running.url}state", headers={"Host": "example.org.evil"}).status_code == 400


def test_without_a_tunnel_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    import gradio.networking

    monkeypatch.setattr(gradio.networking, "setup_tunnel", lambda *args, **kwargs: 1 / 0)
    monkeypatch.setenv("GRADIO_SHARE", "1")
    with pytest.raises(UsageError), serve(DemoModel("tiny"), port=0, share=True):
        pass


def test_the_guard_is_what_refuses(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guard, "_check", lambda self, scope: (0, ""))
    rebound = {"Host": "evil.example", "Origin": "http://evil.example"}
    assert httpx.get(f"{demo.url}state", headers=rebound).status_code == 200
    assert httpx.get(f"{demo.url}config").status_code == 200


def test_the_command_ends_within_two_seconds_with_a_stream_open(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mmspec", "demo", "--model", "tiny", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as running:
        assert running.stdout is not None
        url = running.stdout.readline().split()[2]
        while httpx.get(f"{url}state").json()["phase"] != "ready":
            time.sleep(0.2)
        body = {"question": "what?", "file": "cart_rainbow.png", "max_new_tokens": 1024}
        with httpx.stream("POST", f"{url}ask", json=body, timeout=30) as response:
            next(response.iter_lines())
            began = time.monotonic()
            os.kill(running.pid, signal.SIGINT)
            _, error = running.communicate(timeout=30)
        assert running.returncode == 0 and time.monotonic() - began < 2.5, error
        assert "Traceback" not in error


def test_a_model_that_fails_later_ends_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    assert main(["demo", "--model", str(tmp_path), "--port", "0"]) == 1
    told = capsys.readouterr()
    assert "cannot load the processor" in told.err and told.err.count("mmspec: error") == 1
