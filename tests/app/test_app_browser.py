"""The pages in a real browser (headless Chromium, driven by Playwright), and their endpoints through `gradio_client`.

Left out of `make test`; `make test-app` runs it. `--shots FOLDER` keeps a picture of every tab, at both widths and in
both themes, with the model that ships. With MMSPEC_BROWSER=1 a missing browser is a failure, no reason to skip.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

pytest.importorskip("gradio")

from mmspec.app.caption.config import DEFAULT_MODEL, VIDEO_PROMPT
from mmspec.app.modeling.synthetic_images import write_images
from mmspec.app.scenes.examples import list_example_files
from mmspec.app.ui import api as endpoints
from mmspec.app.ui import comparison_stream
from mmspec.app.ui.comparison import ComparisonRun
from mmspec.app.ui.limits import Limits
from mmspec.app.ui.model_store import ModelStore
from mmspec.app.ui.opening import OPENING_QUESTION
from mmspec.app.ui.server import DemoServer, serve
from mmspec.app.ui.streamer import TimingStreamer

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
RECORD_STATUS = """() => {
    window.statuses = [];
    const record = () => window.statuses.push(document.querySelector("#mm-status")?.innerText ?? "");
    new MutationObserver(record).observe(document.body, {subtree: true, childList: true, characterData: true});
}"""
PATIENCE = 60_000
"""Milliseconds: machines that run tests are slow."""
HOSTILE = "y<img src=x onerror='window.hacked=1'>.png"
NASTY = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script> **bold** ${1+1} {{value}}"


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest) -> Iterator[DemoServer]:
    model_store = (
        ModelStore("tiny") if request.config.getoption("--shots") is None else ModelStore()
    )  # pictures of what users see
    with serve(model_store, limits=Limits(max_file_mb=5)) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if os.environ.get("MMSPEC_BROWSER") != "1":
        pytest.importorskip("playwright")
        if CHROMIUM is None:
            pytest.skip("no chromium here")
    import playwright.sync_api as api

    camera = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", *camera])
        yield running
        running.close()


@pytest.fixture
def open_page(site: DemoServer, browser: Any) -> Iterator[Callable[..., Any]]:
    """Open the app; a page whose script fails fails the test."""
    opened, wrong = [], []

    def open_one(width: int = 1280, query: str = "") -> Any:
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(site.url + query)
        page.wait_for_selector("#mm-ask")
        opened.append(page)
        return page

    yield open_one
    for page in opened:
        page.close()
    assert wrong == []


@pytest.fixture
def page(open_page: Callable[..., Any]) -> Any:
    return open_page()


def upload(page: Any, path: Path) -> None:
    page.locator("#mm-picture input[type=file]").set_input_files(str(path))
    page.wait_for_selector("#mm-picture img")


def settings(page: Any, name: str = "compare", tokens: int | None = None, **chosen: str) -> None:
    """Choose in the settings: {label: option}, and the number of tokens."""
    area = page.locator(f"#{name}-settings")
    area.get_by_role("button", name="Settings").click()
    for label, option in chosen.items():
        area.get_by_label(label.replace("_", " ")).first.click()
        page.get_by_role("option", name=option, exact=True).click()
    if tokens is not None:
        type_number(area, "Max new tokens", tokens)


def type_number(area: Any, label: str, number: int) -> None:
    """Type a number beside a slider, until its handle follows: what comes in its first milliseconds is only shown."""
    handle = area.get_by_label(f"range slider for {label}")
    for _ in range(20):
        box = area.get_by_label(f"number input for {label}")
        box.fill(str(number))
        box.press("Tab")
        box.page.wait_for_timeout(50)
        if handle.input_value() == str(number):
            return
    raise AssertionError(f"the slider {label!r} stays at {handle.input_value()}, not at {number}")


def ask(page: Any, question: str | None = None) -> None:
    if question is not None:
        page.locator("#mm-question textarea").fill(question)
    page.locator("#mm-ask").click()


def finish(page: Any) -> None:
    page.wait_for_selector("#mm-ask:not([disabled])")
    page.wait_for_selector("#mm-replay:not([disabled])")
    page.wait_for_selector(".mm-settled")  # the race has been played


def text(page: Any, selector: str) -> str:
    return page.locator(selector).inner_text()


def started(page: Any) -> None:
    """Wait until the plain side has begun to answer."""
    page.wait_for_function("document.querySelector('#mm-plain .mm-now')?.innerText.length > 0")


@pytest.fixture
def slow_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 200 tokens per second, so that the page is seen in between on any machine."""
    record = TimingStreamer.record

    def record_slowly(streamer: TimingStreamer, token_ids: list[int]) -> None:
        time.sleep(0.005 * len(token_ids))
        record(streamer, token_ids)

    monkeypatch.setattr(TimingStreamer, "record", record_slowly)


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch) -> list[ComparisonRun]:
    """All races from now on."""
    created: list[ComparisonRun] = []

    class Kept(ComparisonRun):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            created.append(self)

    for module in (comparison_stream, endpoints):
        monkeypatch.setattr(module, "ComparisonRun", Kept)
    return created


def free(site: DemoServer) -> None:
    """Wait until the device has nothing to do."""
    site.context.worker.submit(lambda: True).result(timeout=60)


def num_streamed(comparison: ComparisonRun) -> int:
    """Tokens of both sides."""
    return len(comparison.plain.streamer.token_ids) + len(comparison.mmspec.streamer.token_ids)


def dismiss(page: Any) -> None:
    """Close the message; it fades."""
    page.locator(".toast-close").click()
    page.wait_for_selector(".toast-body", state="detached")


def toast(page: Any) -> str:
    page.wait_for_selector(".toast-body")
    return text(page, ".toast-body")


# compare


@pytest.mark.usefixtures("slow_decoding")
def test_an_uploaded_picture_is_asked_about_on_both_sides(page: Any, tmp_path: Path) -> None:
    upload(page, write_images(tmp_path, 1)[0])
    settings(page, tokens=200, Tree_size="8")
    ask(page, "what is in the image?")
    started(page)
    early = text(page, "#mm-mmspec .mm-now")
    finish(page)
    assert len(early) < len(text(page, "#mm-mmspec .mm-now"))  # one after the other, both as they grow
    assert text(page, "#mm-plain .mm-now") == text(page, "#mm-mmspec .mm-now")
    assert "identical, token for token (200 tokens)" in text(page, ".mm-badge")
    assert page.locator("#mm-results .mm-chart svg").count() == 3
    assert page.locator("#mm-mmspec .mm-corrected").count() > 0 and page.locator("#mm-plain .mm-corrected").count() == 0

    page.locator("#mm-share-box").get_by_role("button", name="Share").first.click()
    with page.expect_download() as download:
        page.locator("#mm-download").click()
    run = json.loads(Path(download.value.path()).read_text(encoding="utf-8"))
    assert run["identical"] and run["mmspec"]["n_tokens"] == 200
    results_text = text(page, "#mm-results")
    assert f"{run['tau']:.2f}" in results_text and f"{run['speedup_e2e']:.2f}x" in results_text
    assert f"{run['stats']['tokens_per_s']:.0f} tokens/s" == text(page, "#mm-mmspec .mm-rate b"), "a number stands once"
    assert f"{run['speedup_decode']:.1f}x" == text(page, ".mm-ratio") and "tokens/s" not in results_text

    ask(page, " ")
    assert "write a question" in toast(page) and text(page, "#mm-results") == results_text, "and stays"
    page.wait_for_function("document.querySelector('#mm-status .mm-error')?.innerText.includes('write a question')")


def test_the_replay_plays_both_sides_together(page: Any) -> None:
    page.locator("#mm-examples button").first.click()
    page.wait_for_selector("#mm-picture img")
    settings(page, tokens=300)
    ask(page)
    finish(page)
    page.get_by_label("Replay speed").click()
    page.get_by_role("option", name="16 times slower").click()
    page.locator("#mm-replay").click()
    page.wait_for_function(
        """['#mm-plain', '#mm-mmspec'].every((side) => {
            const count = (what) => document.querySelectorAll(side + what).length;
            return count(' .mm-hidden') > 0 && count(' .mm-hidden') < count(' [data-t]');
        })"""
    )
    page.get_by_label("Replay speed").click()
    page.get_by_role("option", name="real time").click()
    page.locator("#mm-replay").click()
    page.wait_for_function("document.querySelectorAll('.mm-done').length == 2")
    assert page.locator(".mm-hidden").count() == 0


def test_a_conversation_goes_on_until_the_picture_changes(page: Any) -> None:
    page.locator("#mm-examples button").first.click()
    page.wait_for_selector("#mm-picture img")
    settings(page, tokens=12)
    for question in ("what is it?", "how many?"):
        ask(page, question)
        page.wait_for_function(f"document.querySelector('#mm-race').innerText.includes('{question}')")
        finish(page)
        # The rates of this race, not of the one before, whose elements Gradio may reuse.
        for side in ("plain", "mmspec"):
            recorded = float(page.locator(f"#mm-{side}").get_attribute("data-rate"))
            assert float(text(page, f"#mm-{side} .mm-rate b").split()[0]) == pytest.approx(recorded, abs=1)
    assert page.locator("#mm-race .mm-turn-question").all_inner_texts() == ["what is it?", "how many?"]
    page.locator("#mm-examples button").nth(1).click()
    page.wait_for_function("document.querySelectorAll('.mm-turn-question').length == 0")
    assert page.locator("#mm-replay").is_disabled()
    # The question was cleared after its answer; a new conversation begins with the default one.
    assert page.locator("#mm-turns").inner_text() == ""
    page.wait_for_function(f"document.querySelector('#mm-question textarea').value == '{OPENING_QUESTION}'")


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_a_clip(
    open_page: Callable[..., Any],
    comparisons: list[ComparisonRun],
    request: pytest.FixtureRequest,
    width: int,
    theme: str,
) -> None:
    page = open_page(width, f"?__theme={theme}")
    page.get_by_role("tab", name="Clip").click()
    page.wait_for_function(f"document.querySelector('#mm-question textarea').value == '{VIDEO_PROMPT}'")
    page.locator("#mm-clip-examples button, #mm-clip-examples video, #mm-clip-examples td").first.click()
    page.wait_for_selector("#mm-clip video")
    ask(page)
    finish(page)
    clip = next(path for path in list_example_files() if path.suffix == ".mp4" and path != list_example_files()[-1])
    page.locator("#mm-fresh").click()
    page.locator("#mm-clip").get_by_label("Clear").click()
    page.locator("#mm-clip input[type=file]").set_input_files(str(clip))
    page.wait_for_selector("#mm-clip video")
    ask(page, "What happens in the clip?")
    started(page)
    finish(page)
    assert [comparison.question for comparison in comparisons] == [VIDEO_PROMPT, "What happens in the clip?"]
    assert all(comparison.prompt_tokens > 16 * 4 for comparison in comparisons), "its frames"
    assert "identical" in text(page, ".mm-badge")
    page.locator("#mm-replay").click()
    page.wait_for_function("document.querySelectorAll('.mm-done').length == 2")
    keep(page, request, "clip", width, "" if theme == "light" else "-dark")


def test_a_photo_from_the_camera_and_a_picture_from_the_clipboard(page: Any, browser: Any, site: DemoServer) -> None:
    page.context.grant_permissions(["camera", "clipboard-read", "clipboard-write"], origin=site.url.rstrip("/"))
    area = page.locator("#mm-picture")
    area.get_by_label("Capture from camera").click()
    area.get_by_label("grant webcam access").or_(area.get_by_text("Click to Access Webcam")).first.click()
    page.wait_for_function("document.querySelector('#mm-picture video')?.videoWidth > 0")
    area.get_by_label("capture photo").click()
    page.wait_for_selector("#mm-picture img")
    settings(page, tokens=6)
    ask(page)
    finish(page)
    assert "identical" in text(page, ".mm-badge")
    page.evaluate(
        """async () => {
            const canvas = Object.assign(document.createElement('canvas'), { width: 40, height: 30 });
            canvas.getContext('2d').fillRect(5, 5, 10, 10);
            const blob = await new Promise((done) => canvas.toBlob(done, 'image/png'));
            await navigator.clipboard.write([new ClipboardItem({ 'image/png': blob })]);
        }"""
    )
    area.get_by_label("Remove Image").click()
    area.get_by_label("Paste from clipboard").click()
    page.wait_for_selector("#mm-picture img")
    ask(page)
    finish(page)
    assert "identical" in text(page, ".mm-badge")


def test_stop_stops(page: Any, site: DemoServer) -> None:
    page.locator("#mm-examples button").first.click()
    page.wait_for_selector("#mm-picture img")
    settings(page, tokens=1024)
    ask(page)
    page.wait_for_function(
        """document.querySelector('#mm-ask').disabled &&
            /^[0-9]+ tokens, first after [0-9.]+ s, [0-9.]+ s$/
            .test(document.querySelector('#mm-plain .mm-clock').innerText)"""
    )
    page.locator("#mm-stop").click()
    page.wait_for_function("document.querySelector('#mm-status').innerText.startsWith('Stopped')")
    page.wait_for_selector("#mm-ask:not([disabled])")
    assert site.context.worker.submit(lambda: True).result(timeout=5)
    assert page.locator("#mm-plain [data-t]").count() + page.locator("#mm-mmspec [data-t]").count() < 2048
    assert page.locator("#mm-stop").is_disabled()


def test_what_cannot_be_used_is_said_in_one_sentence(page: Any, tmp_path: Path) -> None:
    ask(page, " ")
    assert "write a question" in toast(page)
    dismiss(page)
    page.locator("#mm-picture").get_by_label("Remove Image").click()
    page.wait_for_selector("#mm-picture img", state="detached")
    ask(page, "what is it?")
    assert "choose a picture" in toast(page)
    dismiss(page)
    (tmp_path / "<b>broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing at all")
    page.locator("#mm-picture input[type=file]").set_input_files(str(tmp_path / "<b>broken.png"))
    page.wait_for_function("document.querySelector('#mm-picture img')?.src.includes('broken')")
    ask(page)
    message = toast(page)
    assert (
        "broken.png" in message
        and re.search("image|picture", message)
        and "Traceback" not in message
        and str(tmp_path) not in message
    )


def test_a_file_that_is_too_large(page: Any, tmp_path: Path) -> None:
    with (tmp_path / "large.png").open("wb") as file:
        file.truncate(6_000_000)
    page.locator("#mm-picture input[type=file]").set_input_files(str(tmp_path / "large.png"))
    assert "size" in toast(page).lower()


def test_nothing_that_is_written_becomes_html(page: Any) -> None:
    page.locator("#mm-examples button").first.click()
    page.wait_for_selector("#mm-picture img")
    settings(page, tokens=8)
    ask(page, NASTY)
    finish(page)
    assert page.locator("#mm-race .mm-turn-question").inner_text() == NASTY
    page.get_by_role("tab", name="Inside").click()
    page.wait_for_selector("#mm-inside svg")
    assert page.evaluate("window.hacked") is None


def test_a_second_user_waits_and_nothing_is_mixed(open_page: Callable[..., Any], site: DemoServer) -> None:
    first, second = open_page(), open_page()
    for number, one in enumerate((first, second)):
        one.locator("#mm-examples button").nth(number).click()
        one.wait_for_selector("#mm-picture img")
    settings(first, tokens=40)
    settings(second, tokens=17, Drafter="recycling")
    gate = threading.Event()
    site.context.worker.submit(lambda: gate.wait(120))  # the device is busy until both have asked
    ask(first)
    first.wait_for_function("document.querySelector('#mm-status').innerText.includes('Queued')")
    ask(second, "how many?")
    second.wait_for_function("/queue|[0-9]\\/[0-9]/.test(document.querySelector('#mm-status').innerText)")
    gate.set()
    finish(first)
    finish(second)
    assert "40 tokens" in text(first, ".mm-badge") and "17 tokens" in text(second, ".mm-badge")
    assert text(first, "#mm-race .mm-turn-question") != text(second, "#mm-race .mm-turn-question")


def test_closing_the_page_ends_the_run(
    open_page: Callable[..., Any], site: DemoServer, comparisons: list[ComparisonRun]
) -> None:
    gone = open_page()
    gone.locator("#mm-examples button").first.click()
    gone.wait_for_selector("#mm-picture img")
    settings(gone, tokens=1024)
    ask(gone)
    started(gone)
    gone.goto("about:blank")
    free(site)
    assert comparisons[0].cancelled and num_streamed(comparisons[0]) < 1024 + 1024
    other = open_page()
    other.locator("#mm-examples button").first.click()
    other.wait_for_selector("#mm-picture img")
    settings(other, tokens=8)
    ask(other)
    finish(other)
    assert "identical" in text(other, ".mm-badge")


def test_who_leaves_the_queue_is_not_waited_for(
    open_page: Callable[..., Any], site: DemoServer, comparisons: list[ComparisonRun]
) -> None:
    gate, gone = threading.Event(), open_page()
    site.context.worker.submit(lambda: gate.wait(120))
    gone.locator("#mm-examples button").first.click()
    gone.wait_for_selector("#mm-picture img")
    settings(gone, tokens=1024)
    ask(gone)
    gone.wait_for_function("document.querySelector('#mm-status').innerText.includes('Queued')")
    gone.goto("about:blank")
    until(lambda: comparisons[0].cancel_signal.should_stop)
    gate.set()
    free(site)
    assert num_streamed(comparisons[0]) == 0


@pytest.mark.parametrize("tab", ["Compare", "Batch"])
def test_a_queued_visitor_sees_his_place_and_leaves_at_once(
    open_page: Callable[..., Any], site: DemoServer, comparisons: list[ComparisonRun], tab: str
) -> None:
    gate, page = threading.Event(), open_page()
    site.context.worker.submit(lambda: gate.wait(120))
    if tab == "Compare":
        page.locator("#mm-examples button").first.click()
        page.wait_for_selector("#mm-picture img")
        ask(page)
        area, stop, start = "#mm-status", "#mm-stop", "#mm-ask"
    else:
        page.get_by_role("tab", name="Batch").click()
        page.locator("#mm-take-examples").click()
        page.wait_for_function("document.querySelector('#mm-files')?.innerText.includes('lion')")
        page.locator("#mm-start").click()
        area, stop, start = "#mm-batch-status", "#mm-cancel", "#mm-start"
    page.wait_for_function(f"document.querySelector('{area}').innerText.includes('1 run ahead of yours')")
    page.locator(stop).click()
    page.wait_for_function(f"/[Ss]topped|cancelled/.test(document.querySelector('{area}').innerText)", timeout=5000)
    page.wait_for_selector(f"{start}:not([disabled])", timeout=5000)
    gate.set()
    free(site)
    assert all(num_streamed(comparison) == 0 for comparison in comparisons)


def until(there: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for something that comes by itself."""
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end
        time.sleep(0.05)


# inside, batch


def test_rounds_are_stepped_through(page: Any) -> None:
    page.get_by_role("tab", name="Inside").click()
    assert "Ask something" in text(page, "#mm-inside")
    page.get_by_role("tab", name="Compare").click()
    page.locator("#mm-examples button").first.click()
    page.wait_for_selector("#mm-picture img")
    settings(page, tokens=60, Tree_size="8", Drafter="recycling")
    ask(page)
    finish(page)
    page.get_by_role("tab", name="Inside").click()
    page.wait_for_selector("#mm-inside svg .mm-rejected")
    number = int(page.get_by_label("number input for Round").input_value())
    for button, wanted in (("#mm-forth", number + 1), ("#mm-back", number), ("#mm-back", number - 1)):
        page.locator(button).click()
        page.wait_for_function(f"document.querySelector('#mm-inside').innerText.includes('Round {wanted} of')")
    page.locator("#mm-next-tree").click()
    page.wait_for_function(f"!document.querySelector('#mm-inside').innerText.includes('Round {number - 1} of')")
    assert page.locator("#mm-inside svg rect").count() >= 3


def test_a_tree_is_zoomed_and_read_as_a_list(open_page: Callable[..., Any]) -> None:
    page = open_page(390)
    settings(page, tokens=40, Tree_size="16", Drafter="recycling")
    ask(page)
    finish(page)
    page.get_by_role("tab", name="Inside").click()
    page.wait_for_selector(".mm-canvas[data-scale]")
    scale = "Number(document.querySelector('.mm-canvas').dataset.scale)"
    fitting = page.evaluate(scale)
    assert 0.3 <= fitting <= 1
    canvas = "document.querySelector('.mm-canvas')"
    assert page.evaluate(f"{canvas}.scrollWidth <= {canvas}.clientWidth"), "the whole tree fits"
    page.get_by_label("Zoom in").click()
    assert page.evaluate(scale) > fitting
    page.locator(".mm-canvas").focus()
    page.keyboard.press("0")
    assert page.evaluate(scale) == fitting
    page.locator(".mm-canvas").hover()
    page.keyboard.down("Control")
    page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    page.wait_for_function(f"{scale} > {fitting}")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.locator(".mm-outline li:visible").count() == page.locator("#mm-inside svg rect").count()


@pytest.mark.usefixtures("slow_decoding")
def test_lanes_race_and_are_shared(page: Any, browser: Any, tmp_path: Path) -> None:
    settings(page, tokens=150)
    page.locator("#compare-lanes").get_by_label("lookup").check()
    page.locator("#compare-lanes").get_by_label("recycling").check()
    page.evaluate(RECORD_STATUS)
    ask(page)
    finish(page)
    assert any(re.search(r"\(. of 4\)", status) for status in page.evaluate("window.statuses")), "the lane in progress"
    answers = page.locator("#mm-race .mm-now").all_inner_texts()
    assert len(answers) == 4 and len(set(answers)) == 1
    assert "identical, token for token" in text(page, ".mm-badge") and text(page, ".mm-ratio").endswith("x")
    page.locator("#mm-share-box").get_by_role("button", name="Share").first.click()
    page.locator("#mm-make-gif").click()
    page.wait_for_selector("#mm-gif:not([disabled])")
    with page.expect_download() as download:
        page.locator("#mm-gif").click()
    with Image.open(download.value.path()) as gif:
        assert gif.format == "GIF" and gif.n_frames > 5
    with page.expect_download() as download:
        page.locator("#mm-share-page").click()
    shared = tmp_path / "race.html"
    download.value.save_as(shared)
    other = browser.new_page()
    requests: list[str] = []
    other.on("request", lambda request: requests.append(request.url))
    other.goto(shared.as_uri())
    other.wait_for_selector(".mm-settled")
    assert other.locator(".mm-lane").count() == 4 and [url for url in requests if not url.startswith("data:")] == [
        shared.as_uri()
    ]
    assert other.locator(".mm-lane .mm-now").all_inner_texts() == answers
    other.close()
    phone = browser.new_page(viewport={"width": 390, "height": 900}, color_scheme="dark")
    phone.goto(shared.as_uri())
    phone.wait_for_selector(".mm-settled")
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390
    contrasts = phone.evaluate(CONTRASTS)
    assert len(contrasts) > 5 and [pair for pair in contrasts if pair[1] < 4.5] == [], "too faint to be read"
    phone.close()
    page.get_by_text("Code that repeats this run").click()
    page.wait_for_function(
        "document.querySelector('#mm-code')?.innerText.includes('import mmspec')"
    )  # its first lines are drawn


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
def test_a_page_opens_with_a_race(browser: Any, width: int, theme: str) -> None:
    with serve(ModelStore("tiny"), port=0, record_opening=True) as site:
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.set_default_timeout(PATIENCE)
        page.goto(f"{site.url}?__theme={theme}")
        page.wait_for_selector("#mm-ask")
        assert page.locator("#mm-picture img").count() == 1 and page.locator("#mm-questions button").count() == 4
        page.wait_for_selector(".mm-settled")
        # What is compared and what came out, in the first screen; on a desk the button as well.
        in_view = ["#mm-sentence", ".mm-asked", ".mm-ratio", ".mm-badge", "#mm-plain header", "#mm-mmspec header"]
        for name in [*in_view, *(["#mm-ask"] if width > 600 else [])]:
            box = page.locator(name).bounding_box()
            assert box["y"] + box["height"] < 900 and box["x"] + box["width"] <= width, f"{name} is in view"
        plain, ours = (page.locator(f"#mm-{side}").bounding_box() for side in ("plain", "mmspec"))
        assert plain["y"] == ours["y"] and plain["x"] < ours["x"], "side by side"
        assert "Recorded on this machine" in text(page, "#mm-status") and "tiny" in text(page, "#mm-sentence")
        assert "identical, token for token" in text(page, ".mm-badge")
        page.locator("#mm-questions button").nth(1).click()
        page.wait_for_function("document.querySelector('#mm-question textarea').value == 'What do you see?'")
        page.close()


def test_a_batch_and_its_file(page: Any, tmp_path: Path) -> None:
    paths = write_images(tmp_path, 3)
    (tmp_path / "zz.png").write_bytes(b"no picture")
    (tmp_path / HOSTILE).write_bytes(b"no picture either")
    page.get_by_role("tab", name="Batch").click()
    wrong = [str(tmp_path / "zz.png"), str(tmp_path / HOSTILE)]
    page.locator("#mm-files input[type=file]").set_input_files([*map(str, paths), *wrong])
    page.wait_for_function("document.querySelector('#mm-files')?.innerText.includes('zz')")
    page.locator("#mm-start").click()
    page.wait_for_function("document.querySelector('#mm-batch-status').innerText.includes('5 of 5 done, 2 failed.')")
    assert page.locator("#mm-captions tbody tr").count() == 5 and page.evaluate("window.hacked") is None
    assert page.locator("#mm-captions img").count() == 3
    page.wait_for_selector("#mm-curve svg")
    with page.expect_download() as download:
        page.locator("#mm-rows").click()
    rows = [json.loads(line) for line in Path(download.value.path()).read_text(encoding="utf-8").splitlines()]
    names = [row["file_name"] for row in rows]
    assert names[:3] + names[-1:] == [*(path.name for path in paths), "zz.png"] and "hacked" in names[3]
    assert " ".join(rows[0]["caption"].split()) in " ".join(text(page, "#mm-captions").split())


def test_a_batch_can_be_cancelled(page: Any, tmp_path: Path) -> None:
    page.get_by_role("tab", name="Batch").click()
    page.locator("#mm-files input[type=file]").set_input_files([str(path) for path in write_images(tmp_path, 30)])
    page.wait_for_function("document.querySelector('#mm-files')?.innerText.includes('29_')")
    settings(page, "batch", tokens=600)
    page.locator("#mm-start").click()
    page.wait_for_function("document.querySelectorAll('#mm-captions tbody tr').length > 1")
    page.locator("#mm-cancel").click()
    page.wait_for_function("document.querySelector('#mm-batch-status').innerText.includes('cancelled')")
    page.wait_for_selector("#mm-start:not([disabled])")
    assert 1 < page.locator("#mm-captions tbody tr").count() < 30


# looks


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_every_tab_fits_and_every_part_has_a_name(
    open_page: Callable[..., Any], width: int, theme: str, request: pytest.FixtureRequest
) -> None:
    page = open_page(width, f"?__theme={theme}")
    end = "" if theme == "light" else "-dark"
    page.locator("#mm-examples button").first.click()
    page.wait_for_selector("#mm-picture img")
    if request.config.getoption("--shots") is None:
        # Of 18 numbers at an axis some must be hidden on a phone.
        settings(page, tokens=48 if width > 600 else 18, Tree_size="8", Drafter="recycling")
        page.locator("#compare-settings").get_by_role("button", name="Settings").click()
        ask(page)
    else:
        ask(page, "Describe this picture in detail.")
    finish(page)
    keep(page, request, "compare", width, end)
    page.get_by_role("tab", name="Inside").click()
    page.wait_for_selector("#mm-inside svg")
    keep(page, request, "inside", width, end)
    page.get_by_role("tab", name="Batch").click()
    page.locator("#mm-take-examples").click()
    page.wait_for_function("document.querySelector('#mm-files')?.innerText.includes('lion')")
    page.locator("#mm-start").click()
    page.wait_for_function("/9 of 9 done\\./.test(document.querySelector('#mm-batch-status').innerText)")
    page.wait_for_function(f"({AXIS_LABELS})('#mm-curve')?.at(-1)?.[0] == '8'")
    keep(page, request, "batch", width, end)
    page.get_by_role("tab", name="Learning").click()
    type_number(page, "Pictures", 4)
    page.wait_for_function("document.querySelector('#mm-learning-status').innerText.includes('describes 4 pictures')")
    page.locator("#mm-learn").click()
    page.wait_for_function("/^4 of 4 pictures/.test(document.querySelector('#mm-learning-status').innerText)")
    page.wait_for_function(f"({AXIS_LABELS})('#mm-learning-curve')?.length == 4")
    assert "4 of 4" in text(page, "#mm-learning-numbers")
    page.wait_for_selector("#mm-learn:not([disabled])")
    keep(page, request, "learning", width, end)


def keep(page: Any, request: pytest.FixtureRequest, name: str, width: int, end: str = "") -> None:
    """Check what can be checked of a tab, and keep a picture of it if that was asked for."""
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    unnamed = """[...document.querySelectorAll('button, input:not([type=file]), textarea')].filter((part) =>
        part.checkVisibility() &&
        !(part.innerText || part.ariaLabel || part.title || part.labels?.length || part.placeholder)
    ).map((part) => part.outerHTML)"""
    assert page.evaluate(unnamed) == []
    assert page.evaluate("[...document.querySelectorAll('img')].filter((one) => !one.alt).map((one) => one.src)") == []
    check_plots(page)
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 5 and [pair for pair in contrasts if pair[1] < 4.5] == [], "too faint to be read"
    folder = request.config.getoption("--shots")
    if folder is None:
        return
    page.wait_for_timeout(500)
    page.screenshot(path=f"{folder}/demo-{name}-{width}{end}.png", full_page=True)


def check_plots(page: Any) -> None:
    """The counts at the x axis of visible charts are whole numbers, each once; none is cut or touches another."""
    for name in [name for name in COUNTED_PLOTS if page.locator(f"{name} .mm-chart").first.is_visible()]:
        assert "okens per forward" in page.locator(f"{name} [role=img]").first.get_attribute("aria-label")
        labels = page.evaluate(AXIS_LABELS, name)
        assert labels and len({label for label, _, _ in labels}) == len(labels), (name, labels)
        assert all(re.fullmatch(r"[0-9]+", label) for label, _, _ in labels), (name, labels)
        assert all(one[2] + 2 < other[1] for one, other in itertools.pairwise(labels)), (name, "labels touch", labels)
        frame = page.locator(name).bounding_box()
        right = frame["x"] + frame["width"]
        assert frame["width"] >= 240 and all(frame["x"] <= left and end <= right for _, left, end in labels), (
            name,
            "cut",
        )


COUNTED_PLOTS = ("#mm-results", "#mm-curve", "#mm-learning-curve")
AXIS_LABELS = """(name) => [...(document.querySelector(`${name} .mm-chart`)?.querySelectorAll('.mm-x span') ?? [])]
    .map((one) => [one.textContent, one.getBoundingClientRect().left, one.getBoundingClientRect().right])
    .sort((one, other) => one[1] - other[1])"""
"""[text, left edge, right edge] of the labels of the x axis."""
CONTRASTS = """(() => {
    const parts = (text) => (text.match(/[0-9.]+/g) ?? []).map(Number);
    const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
        .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = (part) => {
        for (; part; part = part.parentElement) {
            const colour = parts(getComputedStyle(part).backgroundColor);
            if (colour.length == 3 || colour[3] > 0.99) return colour;
        }
        return [255, 255, 255];
    };
    return [...document.querySelectorAll('[class*=mm-], [class*=mm-] *')]
        .filter((part) => part.checkVisibility() && !part.closest('svg') && !/svelte/.test(part.className) &&
            [...part.childNodes].some((node) => node.nodeType == 3 && node.textContent.trim()))
        .map((part) => {
            const pair = [light(parts(getComputedStyle(part).color)), light(behind(part))].sort();
            return [part.className, (pair[1] + 0.05) / (pair[0] + 0.05)];
        });
})()"""
"""[class, contrast] of everything of ours with words in it, as WCAG 2 has it."""


def test_what_only_a_trained_drafter_shows(browser: Any, request: pytest.FixtureRequest) -> None:
    with serve(ModelStore(), port=0) as site:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(PATIENCE)
        page.goto(site.url)
        page.locator("#mm-examples button").first.click()
        page.wait_for_selector("#mm-picture img")
        ask(page, "Describe this picture in detail.")
        finish(page)
        accepted_marks = page.locator("#mm-mmspec .mm-accepted")
        assert accepted_marks.count() > 20 and page.locator("#mm-mmspec .mm-corrected").count() > 3
        assert accepted_marks.first.evaluate("one => getComputedStyle(one).backgroundColor") == "rgb(211, 240, 218)"
        comparison(page, request)
        page.get_by_role("tab", name="Inside").click()
        page.wait_for_selector(".mm-visible-tokens img")
        assert page.locator(".mm-visible-tokens img").count() == 1 and "144" in text(page, ".mm-visible-tokens")
        page.wait_for_selector("#mm-inside .mm-probability")
        assert "%" in page.locator("#mm-inside .mm-node.mm-node-accepted .mm-probability").first.text_content()
        page.close()


def comparison(page: Any, request: pytest.FixtureRequest) -> None:
    """Keep a picture of the race half-way."""
    folder = request.config.getoption("--shots")
    if folder is None:
        return
    page.get_by_label("Replay speed").click()
    page.get_by_role("option", name="4 times slower").click()
    page.locator("#mm-replay").click()
    page.wait_for_function(
        """document.querySelectorAll('#mm-mmspec .mm-hidden').length <
            document.querySelectorAll('#mm-mmspec [data-t]').length / 3"""
    )
    page.screenshot(path=f"{folder}/demo-race.png")


# programs


@pytest.fixture(scope="module")
def client(site: DemoServer) -> Any:
    from gradio_client import Client

    return Client(site.url, verbose=False)


def test_compare_through_the_client(client: Any, tmp_path: Path) -> None:
    from gradio_client import handle_file

    file = handle_file(str(write_images(tmp_path, 1)[0]))
    for more in ({}, {"temperature": 0.9, "seed": 7, "drafter": "recycling"}):
        run = client.predict(file, "what is it?", max_new_tokens=20, api_name="/compare", **more)
        assert run["identical"] and len(run["mmspec"]["tokens"]) == 20
        assert run["plain"]["answer"] == run["mmspec"]["answer"] and run["choice"]["seed"] == more.get("seed", 0)
    clip = next(str(path) for path in list_example_files() if path.suffix == ".mp4")
    run = client.predict(handle_file(clip), max_new_tokens=6, api_name="/compare")
    assert run["identical"] and run["question"] == VIDEO_PROMPT


def test_a_client_that_has_gone_is_not_worked_for(site: DemoServer, comparisons: list[ComparisonRun]) -> None:
    import httpx

    call = f"{site.url}gradio_api/call/compare"
    sent = httpx.post(f"{site.url}gradio_api/upload", files={"files": list_example_files()[0].open("rb")}).json()
    file = {"path": sent[0], "meta": {"_type": "gradio.FileData"}}
    data = [file, "what?", "tiny", "auto", "none", 0, 0, 1024]
    event = httpx.post(call, json={"data": data}).json()["event_id"]
    with httpx.stream("GET", f"{call}/{event}", timeout=60) as answer:
        next(answer.iter_lines())
        until(lambda: bool(comparisons) and num_streamed(comparisons[0]) > 0)
    free(site)
    assert comparisons[0].cancelled and num_streamed(comparisons[0]) < 1024 + 1024


def test_caption_through_the_client(client: Any, tmp_path: Path) -> None:
    from gradio_client import handle_file

    paths = write_images(tmp_path, 3)
    rows = client.predict([handle_file(str(path)) for path in paths], max_new_tokens=8, api_name="/caption")
    assert [row["file_name"] for row in rows] == [path.name for path in paths]
    assert all(row["n_new_tokens"] == 8 for row in rows)


def test_errors_reach_the_client_as_one_sentence(client: Any, tmp_path: Path) -> None:
    from gradio_client import handle_file
    from gradio_client.exceptions import AppError

    file = handle_file(str(write_images(tmp_path, 1)[0]))
    (tmp_path / "text.png").write_text("no picture")
    wide = tmp_path / "wide.png"
    Image.new("1", (10_000, 5_000)).save(wide)
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (file, {"question": " "}, "write a question"),
        (file, {"question": "what <image> is"}, "must not contain <image>"),
        (file, {"question": "x" * 10_000}, "4000 is the limit"),
        (file, {"model": "/etc"}, "There is no model"),
        (file, {"drafter": str(tmp_path)}, "There is no drafter"),
        (file, {"compressor": "pool:x"}, "pool"),
        (file, {"max_new_tokens": 10**6}, "from 1 to 1024"),
        (handle_file(str(tmp_path / "text.png")), {}, "not a picture"),
        (handle_file(str(wide)), {}, "40 megapixels is the limit"),
    ]
    for given, more, message in wrong:
        with pytest.raises(AppError, match=message) as caught:
            client.predict(given, api_name="/compare", **more)
        text_of_error = str(caught.value)
        for word in map(str, more.values()):
            text_of_error = text_of_error.replace(word[:60], "")  # the message may repeat the input, but no other path
        assert "Traceback" not in text_of_error and str(tmp_path) not in text_of_error


def test_no_file_outside_the_uploads_can_be_read(site: DemoServer) -> None:
    import httpx

    call = f"{site.url}gradio_api/call/compare"
    for path in ("/etc/passwd", str(Path(__file__).resolve()), "README.md", "../README.md"):
        assert httpx.get(f"{site.url}gradio_api/file={path}").status_code in (403, 404)
        # As a client that does not upload, but names a file of this machine.
        file = {"path": path, "meta": {"_type": "gradio.FileData"}}
        event = httpx.post(call, json={"data": [file, "what?", "tiny", "auto", "none", 0, 0, 8]}).json()["event_id"]
        message = httpx.get(f"{call}/{event}", timeout=60).text
        assert "event: error" in message and "answer" not in message
        # As a page that does.
        event_id = next(n for n, fn in site.app.fns.items() if getattr(fn.fn, "__name__", "") == "answer")
        data = [file, None, None, "what?", None, "tiny", "auto", "none", 0, 0, 8, "automatic", [], "plain generate"]
        event_request = {"data": data, "fn_index": event_id, "session_hash": f"thief {path}", "event_data": None}
        httpx.post(f"{site.url}gradio_api/queue/join", json=event_request | {"trigger_id": None}).raise_for_status()
        message = httpx.get(
            f"{site.url}gradio_api/queue/data", params={"session_hash": f"thief {path}"}, timeout=60
        ).text
        assert '"success":false' in message and '"success":true' not in message and "mm-badge" not in message


def test_only_two_endpoints_are_public(client: Any) -> None:
    assert set(client.view_api(return_format="dict")["named_endpoints"]) == {"/compare", "/caption"}


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    from gradio_client import Client, handle_file

    with serve(ModelStore("tiny"), port=0) as running:
        root = running.context.temp_storage.root
        assert root.exists() and running.url.startswith("http://127.0.0.1:")
        one = Client(running.url, verbose=False, download_files=str(tmp_path / "got"))
        paths = [handle_file(str(path)) for path in write_images(tmp_path / "p", 2)]
        one.predict(paths[0], "what?", max_new_tokens=4, api_name="/compare")
        one.predict(paths, max_new_tokens=4, api_name="/caption")
        names = {path.name for path in root.rglob("*.png")}
        assert names >= {path.name for path in (tmp_path / "p").iterdir()}, "uploads lie in the app's own folder"
    assert not root.exists()


def test_the_command_from_start_to_end(tmp_path: Path) -> None:
    from gradio_client import Client, handle_file

    place = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "mmspec", "demo", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=place) as running:
        try:
            assert running.stdout is not None
            url = running.stdout.readline().split()[2]
            assert not url.endswith(":0")
            one = Client(url, verbose=False, download_files=str(tmp_path / "got"))
            run = one.predict(handle_file(str(list_example_files()[0])), "What do you see?", api_name="/compare")
            assert run["identical"] and run["choice"]["model"] == DEFAULT_MODEL and run["tau"] > 1
            assert list(tmp_path.glob("mmspec-demo-*"))
        finally:
            running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=60) == 0
    assert not list(tmp_path.glob("mmspec-demo-*"))


def test_a_model_that_is_not_there_is_told_at_once(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with serve(ModelStore(str(tmp_path / "none")), port=0):
        until(lambda: any("cannot be used" in record.getMessage() for record in caplog.records))


def test_the_default_model_is_the_shipped_one() -> None:
    assert ModelStore().model_names[0] == DEFAULT_MODEL
