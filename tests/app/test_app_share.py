"""`mmspec demo --share`: off by default, a warning, a password that guards every route, and its own host name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("gradio")

import httpx

from mmspec.app.cli.main import main
from mmspec.app.errors import UsageError
from mmspec.app.ui import command
from mmspec.app.ui.middleware.password import check_password, generate_password
from mmspec.app.ui.model_store import ModelStore
from mmspec.app.ui.server import DemoServer, ShareError, serve

pytestmark = pytest.mark.pages

PASSWORD = "a-long-enough-password"
HOST = "abc123.gradio.live"


@pytest.fixture(scope="module")
def shared() -> Iterator[DemoServer]:
    """A shared app whose tunnel is a stand-in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradio.networking.setup_tunnel", lambda **_: f"http://{HOST}")
        with serve(ModelStore("tiny"), port=0, password=PASSWORD, share=True) as running:
            yield running


def get(server: DemoServer, path: str = "", password: str | None = PASSWORD, **headers: str) -> httpx.Response:
    auth = None if password is None else ("anyone", password)
    return httpx.get(f"{server.url}{path}", auth=auth, headers=headers, timeout=60)


def test_every_route_needs_the_password(shared: DemoServer) -> None:
    paths = ["", "config", "gradio_api/info", "gradio_api/file=/etc/passwd", "gradio_api/queue/data", "nothing"]
    uploads = shared.context.temp_storage.root / "uploads"
    stored = sorted(uploads.rglob("*"))
    for path in paths:
        for wrong in (None, "", PASSWORD + "x", PASSWORD[:-1]):
            answer = get(shared, path, wrong)
            assert answer.status_code == 401 and answer.headers["www-authenticate"].startswith("Basic ")
            assert PASSWORD not in answer.text and "config" not in answer.text
    upload = httpx.post(f"{shared.url}gradio_api/upload", files={"files": b"x"})
    assert upload.status_code == 401 and sorted(uploads.rglob("*")) == stored
    for header in ("Basic", "Basic !!!", "Bearer x", f"Basic {'QQ==' * 400}", "Basic QQ=="):
        assert get(shared, "", None, Authorization=header).status_code == 401
    assert get(shared).status_code == 200 and PASSWORD not in get(shared, "config").text


def test_the_shared_name_is_served_and_no_other(shared: DemoServer) -> None:
    assert shared.share_url == f"https://{HOST}"
    assert get(shared, Host=HOST).status_code == 200
    assert get(shared, Host=HOST, Origin=f"https://{HOST}").status_code == 200
    assert get(shared, Host="other.gradio.live").status_code == 400
    assert get(shared, Host=HOST, Origin="https://other.gradio.live").status_code == 403


def test_without_a_tunnel_it_ends(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def fail(**_: Any) -> str:
        raise ConnectionError

    monkeypatch.setattr("gradio.networking.setup_tunnel", fail)
    with pytest.raises(ShareError, match="no share link"), serve(ModelStore("tiny"), port=0, share=True):
        pass
    assert main(["demo", "--share", "--model", "tiny", "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert "can use this app from the internet" in said and "the password" in said and "no share link" in said


def test_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(command.PASSWORD_VARIABLE, raising=False)
    assert command.choose_password(False, False) is None and command.choose_password(True, True) is None
    first, second = command.choose_password(True, False), command.choose_password(True, False)
    assert first and second and first != second and len(generate_password()) >= 16
    monkeypatch.setenv(command.PASSWORD_VARIABLE, PASSWORD)
    assert command.choose_password(False, False) == PASSWORD
    monkeypatch.setenv(command.PASSWORD_VARIABLE, "short")
    with pytest.raises(UsageError, match="at least 12 characters, ASCII only; got 5"):
        command.choose_password(True, False)
    for wrong in ("short", "not \xe9 in ASCII, but long"):
        with pytest.raises(ValueError, match="at least 12 characters, ASCII only"):
            check_password(wrong)


def test_sharing_is_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradio.networking.setup_tunnel", lambda **_: pytest.fail("a tunnel"))
    monkeypatch.setenv("GRADIO_SHARE", "true")
    with serve(ModelStore("tiny"), port=0) as running:
        assert running.share_url is None and get(running, password=None).status_code == 200
