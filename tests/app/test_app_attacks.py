"""Each layer in front of Gradio has an attack: refused with the layer, and done without it."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio")

import gradio.route_utils
import httpx
from gradio.route_utils import GradioMultiPartParser

from mmspec.app.ui.middleware import hosts, requests
from mmspec.app.ui.middleware.bodies import RequestLimits, UploadFolder
from mmspec.app.ui.middleware.password import PasswordGate
from mmspec.app.ui.middleware.responses import Outermost
from mmspec.app.ui.middleware.sessions import SessionCleaner, SessionLimits
from mmspec.app.ui.model_store import ModelStore
from mmspec.app.ui.server import DemoServer, serve

pytestmark = pytest.mark.pages

API = "gradio_api"
PASSWORD = "a-long-enough-password"
LIMITS = RequestLimits(max_stored_bytes=3_000_000, min_free_bytes=0, idle_timeout_s=0.3)
REMOTE = {"path": "http://192.0.2.1/a.png", "meta": {"_type": "gradio.FileData"}}


@pytest.fixture(scope="module")
def server() -> Iterator[DemoServer]:
    sessions = SessionLimits(unread_timeout_s=0.5, cleanup_interval_s=0.1)
    options: dict[str, Any] = {"request_limits": LIMITS, "session_limits": sessions, "password": PASSWORD}
    with serve(ModelStore("tiny"), port=0, **options) as running:
        yield running


@pytest.fixture
def client(server: DemoServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, auth=("me", PASSWORD), timeout=60) as client:
        yield client


@pytest.fixture
def uploads(server: DemoServer) -> Path:
    return Path(server.context.temp_storage.root) / "uploads"


def remove(monkeypatch: pytest.MonkeyPatch, layer: Any) -> None:
    """Make a layer pass everything on."""

    async def pass_on(self: Any, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)

    monkeypatch.setattr(layer, "__call__", pass_on)


def wait_until(condition: Any, timeout_s: float = 10.0) -> bool:
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(condition())


def test_a_rebound_name_reads_the_app(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    rebound = {"Host": "evil.example:7860", "Origin": "http://evil.example:7860"}
    assert client.get("config", headers=rebound).status_code == 400
    remove(monkeypatch, hosts.KnownHosts)
    assert "components" in client.get("config", headers=rebound).json()


def test_another_site_uploads(client: httpx.Client, uploads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A form needs no preflight; nor is what it stores ever asked for."""
    for origin in ("http://localhost:3000", "http://evil.example", "null"):
        sent = client.post(f"{API}/upload", files={"files": ("a.html", b"x")}, headers={"Origin": origin})
        assert sent.status_code == 403
    remove(monkeypatch, hosts.SameOrigin)
    origin = "http://localhost:3000"
    sent = client.post(f"{API}/upload", files={"files": ("evil.html", b"x")}, headers={"Origin": origin})
    assert sent.status_code == 200 and list(uploads.rglob("evil.html"))
    assert sent.headers["access-control-allow-origin"] == origin, "and reads the answer"


@pytest.mark.parametrize("name", ["X-Forwarded-Host", "X-Gradio-Server"])
def test_a_header_moves_the_page(client: httpx.Client, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A cache between would pass the page on to others."""
    value = {"X-Forwarded-Host": "evil.example", "X-Gradio-Server": "http://evil.example"}[name]
    assert "evil.example" not in client.get("config", headers={name: value}).text
    monkeypatch.setattr(hosts, "ADDRESS_HEADERS", hosts.re.compile(rb"nothing"))
    assert "evil.example" in client.get("config", headers={name: value}).text


def test_no_password_is_asked(server: DemoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = ("", "config", f"{API}/info", f"{API}/queue/status")
    assert all(httpx.get(server.url + path).status_code == 401 for path in paths)
    remove(monkeypatch, PasswordGate)
    assert all(httpx.get(server.url + path).status_code == 200 for path in paths)


def test_a_route_that_no_page_needs_fills_the_disk(
    client: httpx.Client, uploads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = client.get("config").json()["dependencies"]
    first = next(one["id"] for one in functions if one["backend_fn"] and not one["inputs"])
    body = {"data": [], "fn_index": first, "session_hash": "link"}
    client.post(f"{API}/queue/join", json=body)
    link = f"{API}/deep_link?session_hash=link"
    assert client.get(link).status_code == 404
    monkeypatch.setattr(requests, "is_served", lambda _: True)
    assert client.get(link).status_code == 200 and list(uploads.rglob("state.json"))


def test_a_body_that_never_comes_holds_its_files(
    server: DemoServer, uploads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_answered() -> bool:
        head = f"POST /{API}/upload HTTP/1.1\r\nHost: 127.0.0.1:{server.app.server_port}\r\nContent-Length: 99999\r\n"
        basic = httpx.BasicAuth("me", PASSWORD)._auth_header
        part = b'--b\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\n' + b"x" * 5000
        with socket.create_connection(("127.0.0.1", server.app.server_port), timeout=1.5) as line:
            head += f"Authorization: {basic}\r\nContent-Type: multipart/form-data; boundary=b\r\n\r\n"
            line.sendall(head.encode() + part)
            with suppress(TimeoutError):
                return line.recv(99).startswith(b"HTTP/1.1 408")
            return bool(not any(path.is_file() for path in uploads.iterdir()))

    assert is_answered()
    monkeypatch.setattr(requests, "receive_in_time", lambda receive, _: receive)
    assert not is_answered()


def test_uploads_fill_the_disk(client: httpx.Client, uploads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def upload(times: int) -> list[int]:
        files = [{"files": (f"{index}.png", bytes([index]) * 1_000_000)} for index in range(times)]
        return [client.post(f"{API}/upload", files=one).status_code for one in files]

    assert 413 in upload(6)
    monkeypatch.setattr(UploadFolder, "_refuse_if_full", lambda *_: None)
    assert upload(6) == [200] * 6
    assert sum(path.stat().st_size for path in uploads.rglob("*.png")) > LIMITS.max_stored_bytes
    for path in uploads.rglob("*.png"):
        path.unlink()


def test_a_part_that_is_no_file_is_held_in_memory(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    held = list[int]()

    class Spy(GradioMultiPartParser):
        async def parse(self) -> Any:
            form = await super().parse()
            held.extend(len(value) for _, value in form.multi_items() if isinstance(value, str))
            return form

    note = {"note": (None, b"x" * 2_000_000)}
    assert client.post(f"{API}/upload", files=note).status_code == 400
    many = [("files", (f"{index}", b"")) for index in range(201)]
    assert client.post(f"{API}/upload", files=many).status_code == 400
    monkeypatch.setattr(gradio.route_utils, "GradioMultiPartParser", Spy)
    assert client.post(f"{API}/upload", files=note).status_code == 200 and held == [2_000_000]
    assert client.post(f"{API}/upload", files=many).status_code == 200


def test_a_name_of_a_session_takes_memory(
    server: DemoServer, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "x" * 900_000
    body = {"data": [], "fn_index": 0, "session_hash": name}
    assert client.post(f"{API}/queue/join", json=body).status_code == 422
    monkeypatch.setattr(requests, "check_json", lambda _: None)
    assert client.post(f"{API}/queue/join", json=body).status_code == 200
    assert name in server.app._queue.pending_messages_per_session


def test_the_server_fetches_an_address(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = list[str]()

    async def fetch(url: str, cache_dir: str) -> str:
        fetched.append(url)
        raise OSError

    monkeypatch.setattr("gradio.processing_utils.async_ssrf_protected_download", fetch)
    body = {"data": [REMOTE, "what?", "tiny", "auto", "none", 0, 0, 8]}
    assert client.post(f"{API}/call/compare", json=body).status_code == 422
    monkeypatch.setattr(requests, "has_remote_path", lambda _: False)
    assert client.post(f"{API}/call/compare", json=body).status_code == 200
    assert wait_until(lambda: fetched == [REMOTE["path"]])


def test_a_stream_that_nobody_started_ends_in_a_stack_trace(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert client.get(f"{API}/queue/data?session_hash=nobody").status_code == 404
    assert not caplog.records
    monkeypatch.setattr(requests, "find_event_stream", lambda *_: None)
    with pytest.raises(httpx.RemoteProtocolError):
        client.get(f"{API}/queue/data?session_hash=nobody")
    assert wait_until(lambda: any(one.name == "uvicorn.error" for one in caplog.records))


def test_a_page_is_framed_and_the_terminal_is_filled(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = {"data": [], "fn_index": 999, "session_hash": "trace"}
    assert client.get("").headers["x-frame-options"] == "SAMEORIGIN"
    assert client.post(f"{API}/queue/join", json=wrong).status_code == 400
    traces = [one for one in caplog.records if one.levelno > logging.DEBUG and one.exc_info]
    assert not traces
    remove(monkeypatch, Outermost)
    assert "x-frame-options" not in client.get("").headers
    client.post(f"{API}/queue/join", json=wrong)
    assert wait_until(lambda: any(one.exc_info for one in caplog.records if one.name == "uvicorn.error"))


def test_sessions_that_nobody_reads_stay(
    server: DemoServer, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = server.app.state_holder.session_data

    def invent(prefix: str) -> list[str]:
        names = [f"{prefix} {number}" for number in range(5)]
        for name in names:
            client.post(f"{API}/queue/join", json={"data": [], "fn_index": 0, "session_hash": name})
        return names

    names = invent("freed")
    assert wait_until(lambda: not set(names) & set(sessions))

    async def nothing(_: Any) -> None:
        return None

    monkeypatch.setattr(SessionCleaner, "free_unused", nothing)
    names = invent("kept")
    time.sleep(1.5)
    assert set(names) <= set(sessions), "Gradio frees them above 1000"
