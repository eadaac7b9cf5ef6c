"""`mmspec demo` behind a proxy that serves it under a path: addresses, event streams, host names."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("gradio")

import httpx
from buffering_proxy import serve_proxy

from mmspec.app.scenes.examples import list_example_files
from mmspec.app.ui.command import root_path
from mmspec.app.ui.model_store import ModelStore
from mmspec.app.ui.server import serve

pytestmark = pytest.mark.pages


@pytest.fixture(scope="module")
def proxied() -> Iterator[str]:
    """The address at the proxy; the app answers to its name because that was allowed."""
    store = ModelStore("tiny")
    with serve(store, port=0, root_path="/demo", allowed=["127.0.0.1"]) as app, serve_proxy(app.url) as url:
        yield url


def test_the_page_names_addresses_under_the_path(proxied: str) -> None:
    page = httpx.get(proxied, timeout=60)
    config = httpx.get(f"{proxied}config", timeout=60).json()
    assert page.status_code == 200 and config["root"].rstrip("/") == proxied.rstrip("/")
    assert httpx.get(proxied.replace("/demo/", "/"), timeout=60).status_code == 404
    assert httpx.get(f"{proxied}theme.css", timeout=60).status_code == 200


def test_an_event_stream_passes_a_proxy_that_buffers(proxied: str) -> None:
    """The first message arrives while the stream is open: a heartbeat never ends."""
    with httpx.stream("GET", f"{proxied}gradio_api/heartbeat/someone", timeout=20) as beats:
        assert beats.headers["x-accel-buffering"] == "no"
        assert next(beats.iter_raw())
    page = httpx.get(proxied, timeout=60)
    assert "x-accel-buffering" not in page.headers, "anything else may be buffered"


def test_an_answer_comes_through_the_proxy(proxied: str) -> None:
    file = list_example_files()[0]
    with file.open("rb") as stream:
        sent = httpx.post(f"{proxied}gradio_api/upload", files={"files": (file.name, stream)}, timeout=60).json()
    data = [{"path": sent[0], "meta": {"_type": "gradio.FileData"}}, "what?", "tiny", "auto", "none", 0, 0, 8]
    call = f"{proxied}gradio_api/call/compare"
    event = httpx.post(call, json={"data": data}, timeout=60).json()["event_id"]
    with httpx.stream("GET", f"{call}/{event}", timeout=120) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: [{")]
    assert json.loads(lines[-1].removeprefix("data: "))[0]["identical"]


@pytest.mark.browser
@pytest.mark.timeout(300)
@pytest.mark.parametrize("width", [1280, 390])
def test_a_race_is_run_through_the_proxy(proxied: str, width: int) -> None:
    from test_app_browser import CHROMIUM

    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no chromium here")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 844})
        outside: list[str] = []
        base = urlsplit(proxied)
        page.on(
            "request",
            lambda request: (
                outside.append(request.url)
                if request.url.startswith("http") and not request.url.startswith(proxied)
                else None
            ),
        )
        page.goto(proxied)
        page.wait_for_selector("#mm-ask", timeout=60_000)
        page.locator("#mm-ask").click()
        page.wait_for_selector(".mm-settled", timeout=120_000)
        assert "identical" in page.locator(".mm-badge").inner_text()
        assert [url for url in outside if urlsplit(url).netloc == base.netloc] == [], "all under the path"
        browser.close()


def test_paths_of_a_proxy() -> None:
    assert root_path("/demo") == root_path("/demo/") == "/demo" and root_path("/a/b-c_d.e") == "/a/b-c_d.e"
    assert root_path("/") == root_path("") == ""
    for wrong in ("demo", "//evil.example", "/a//b", "/../x", "/a b", "http://x/demo", "/a?b", "/a\n"):
        with pytest.raises(argparse.ArgumentTypeError, match="must begin with a slash"):
            root_path(wrong)


def test_the_documented_block_names_what_the_app_needs() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "quickstart.md").read_text(encoding="utf-8")
    block = text.partition("location /demo/")[2].partition("```")[0]
    for line in ("proxy_pass http://127.0.0.1:7860/;", "proxy_set_header Host $http_host;", "X-Forwarded-Proto"):
        assert line in block
