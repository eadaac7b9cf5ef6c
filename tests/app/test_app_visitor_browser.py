"""What a first visitor of `mmspec demo` sees: the first screen, honest headlines, refusals that stay, turns, lanes.

At the width of a desk and of a phone, in both themes. Left out of `make test`; `make test-app` runs it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio")

from test_app_browser import (  # noqa: F401  (fixtures)
    CONTRASTS,
    PATIENCE,
    ask,
    browser,
    finish,
    settings,
    site,
    slow_decoding,
    started,
    text,
    until,
    upload,
)

from mmspec.app.scenes.examples import list_example_files
from mmspec.app.ui.server import DemoServer
from mmspec.patching import patch_state

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
LOUD = ("error", "warning")
OF_GRADIO = "Method not implemented."
"""Its client says so in the console when the stream of a refused run is closed."""
SCREENS = [(1280, 800, "light"), (1280, 800, "dark"), (390, 844, "light"), (390, 844, "dark")]


@pytest.fixture
def visit(site: DemoServer, browser: Any) -> Any:  # noqa: F811
    """Open the page on a screen; a page whose script fails, or warns in the console, fails the test."""
    opened, wrong = [], []

    def open_one(width: int, height: int, theme: str) -> Any:
        page = browser.new_page(viewport={"width": width, "height": height})
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "console", lambda said: wrong.append(said.text) if said.type in LOUD and said.text != OF_GRADIO else None
        )
        page.goto(f"{site.url}?__theme={theme}")
        page.wait_for_selector("#mm-ask")
        opened.append(page)
        return page

    yield open_one
    for page in opened:
        if not page.is_closed():
            page.close()
    assert wrong == []


def choose_example(page: Any, number: int = 0) -> None:
    page.locator("#mm-examples button").nth(number).click()
    names = [path.name for path in list_example_files() if path.suffix == ".png"]
    page.wait_for_selector(f"#mm-picture img[src*='{names[number]}']")  # another picture is there from the start


def assert_in_view(page: Any, *names: str) -> None:
    screen = page.viewport_size
    for name in names:
        box = page.locator(name).first.bounding_box()
        assert box["y"] >= 0 and box["y"] + box["height"] <= screen["height"], f"{name} is in view"
        assert box["x"] >= 0 and box["x"] + box["width"] <= screen["width"], f"{name} is in view"


def assert_legible(page: Any) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    assert [pair for pair in page.evaluate(CONTRASTS) if pair[1] < 4.5] == [], "too faint to be read"


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.usefixtures("slow_decoding")
def test_the_first_screen_and_a_recording(visit: Callable[..., Any], screen: tuple[int, int, str]) -> None:
    page = visit(*screen)
    assert_in_view(page, "#mm-question textarea", "#mm-ask", "#mm-stop", "#mm-fresh")
    choose_example(page)
    settings(page, tokens=400)
    page.locator("#compare-settings").get_by_role("button", name="Settings").click()
    page.evaluate("scrollTo(0, 0)")
    ask(page, "what is it?")
    page.wait_for_function(
        """document.querySelector('#mm-plain .mm-recording')?.innerText == 'recording 1 of 2' &&
            document.querySelector('#mm-mmspec .mm-recording')?.innerText == 'next: 2 of 2'"""
    )
    started(page)
    assert_in_view(page, "#mm-stop", "#mm-plain .mm-recording", "#mm-mmspec .mm-recording")
    assert len(text(page, "#mm-plain .mm-now")) < 80, "its last words; the whole answer is shown once, by the race"
    page.wait_for_function("document.querySelector('#mm-mmspec .mm-recording')?.innerText == 'recording 2 of 2'")
    finish(page)
    assert page.locator(".mm-race").count() == 1 and page.locator(".mm-recording").count() == 0
    assert_legible(page)


@pytest.mark.parametrize("screen", SCREENS)
def test_the_headline_says_what_the_drafts_did(visit: Callable[..., Any], screen: tuple[int, int, str]) -> None:
    page = visit(*screen)
    choose_example(page)
    settings(page, tokens=24, Drafter="none")
    ask(page, "what is it?")
    finish(page)
    assert "Nothing was drafted (0 of 23 rounds" in text(page, ".mm-credit")
    assert "over those of plain generate, the baseline (the settings offer mmspec without drafts)" in text(
        page, ".mm-score small"
    )
    page.locator("#compare-settings").get_by_label("Drafter").first.click()
    page.get_by_role("option", name="recycling", exact=True).click()
    page.locator("#compare-settings").get_by_label("Tree size").first.click()
    page.get_by_role("option", name="8", exact=True).click()
    ask(page, "how many?")
    page.wait_for_function("document.querySelector('.mm-credit')?.innerText.includes('own loop \u00d7')")
    finish(page)
    total, loop, drafts = page.evaluate(
        """[document.querySelector('.mm-ratio').dataset.ratio,
            ...document.querySelector('.mm-credit').innerText.match(/[0-9.]+(?=x)/g)].map(Number)"""
    )
    assert loop * drafts == pytest.approx(total, rel=0.03)
    page.locator("#compare-baseline").get_by_label("mmspec without drafts").check()
    ask(page, "which?")
    page.wait_for_function("document.querySelector('#mm-plain header')?.innerText.includes('without drafts')")
    finish(page)
    assert "over those of mmspec without drafts" in text(page, ".mm-score small")
    assert_legible(page)


@pytest.mark.parametrize("screen", SCREENS)
def test_a_refusal_stays_and_its_preview_goes(
    visit: Callable[..., Any], screen: tuple[int, int, str], tmp_path: Path
) -> None:
    page = visit(*screen)
    choose_example(page)
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing at all")
    page.locator("#mm-picture").get_by_label("Remove Image").click()
    page.wait_for_selector("#mm-picture img", state="detached")
    upload(page, tmp_path / "broken.png")
    ask(page, "what is it?")
    said = "broken.png cannot be used: it is damaged or incomplete; save the picture again."
    page.wait_for_function(f"document.querySelector('#mm-status .mm-error')?.innerText == '{said}'")
    page.wait_for_selector("#mm-picture img", state="detached")
    assert_in_view(page, "#mm-status .mm-error")
    assert page.locator("#mm-race .mm-caret").count() == 0, "no lane is left running"
    assert_legible(page)
    choose_example(page)
    page.wait_for_timeout(500)
    assert text(page, "#mm-status") == said, "until the next run"
    settings(page, tokens=8)
    ask(page, "what is it?")
    finish(page)
    assert text(page, "#mm-status") == "Done." and page.locator(".mm-error").count() == 0


@pytest.mark.parametrize("screen", SCREENS)
def test_a_second_question(visit: Callable[..., Any], site: DemoServer, screen: tuple[int, int, str]) -> None:  # noqa: F811
    """The picture and the turn before are reused, which is said apart from the headline, and freed with the page."""
    page = visit(*screen)
    choose_example(page)
    settings(page, tokens=12)
    ask(page, "what is it?")
    finish(page)
    speedup = text(page, ".mm-ratio")
    assert page.locator(".mm-reused").count() == 0
    box = page.locator("#mm-question")
    assert box.locator("textarea").input_value() == "" and "Follow-up question" in box.inner_text()
    assert "Start over forgets that; the picture stays" in text(page, "#mm-turns")
    ask(page, "how many?")
    page.wait_for_function("document.querySelector('#mm-race').innerText.includes('how many?')")
    finish(page)
    assert text(page, ".mm-kept") == speedup and page.locator("#mm-race .mm-asking img").count() == 1
    assert re.search(
        r"Picture reused: \d+ of \d+ prompt tokens .*; plain generate computes all", text(page, ".mm-reused")
    )
    first = page.locator("#mm-race .mm-asking").first
    assert first.locator("img").count() == 1 and "what is it?" in first.inner_text(), "the picture stays where it was"
    assert_legible(page)
    page.locator("#mm-fresh").click()
    page.wait_for_function("document.querySelector('#mm-turns').innerText == ''")
    page.wait_for_function("document.querySelector('#mm-question').innerText.startsWith('Question')")
    assert page.locator("#mm-picture img").count() == 1
    store = site.context.model_store
    loaded = store.get(store.model_names[0])
    page.close()
    until(lambda: not patch_state(loaded.model).prefixes.rows and not loaded.kept_media._kept)


@pytest.mark.parametrize("screen", SCREENS)
def test_several_lanes(visit: Callable[..., Any], screen: tuple[int, int, str]) -> None:
    page = visit(*screen)
    choose_example(page)
    settings(page, tokens=24, Drafter="recycling")
    page.locator("#compare-lanes").get_by_label("lookup").check()
    ask(page, "what is it?")
    finish(page)
    ratios = [float(one.rstrip("x")) for one in page.locator("#mm-race .mm-lane-ratio").all_inner_texts() if one]
    assert float(text(page, ".mm-ratio").rstrip("x")) == max(ratios) and len(ratios) == 2
    best = page.locator(".mm-ratio").get_attribute("data-lane")
    name = page.locator(f"#{best}").get_attribute("aria-label")
    assert f"of the fastest lane, {name}" in text(page, ".mm-score small")
    page.wait_for_selector("#mm-results .mm-chart svg")
    assert_legible(page)


def test_a_bad_file_of_a_batch_is_one_row(visit: Callable[..., Any], tmp_path: Path) -> None:
    from mmspec.app.modeling.synthetic_images import write_images

    page = visit(*SCREENS[0])
    files = write_images(tmp_path, 2)
    for name in ("broken.png", "list.csv"):
        (tmp_path / name).write_bytes(b"\xff\xfe\x00{" * 9)
    page.get_by_role("tab", name="Batch").click()
    page.locator("#mm-files input[type=file]").set_input_files([*map(str, files), *map(str, tmp_path.glob("[bl]*.*"))])
    page.wait_for_function("document.querySelector('#mm-files').innerText.includes('list')")
    page.locator("#mm-start").click()
    page.wait_for_function("document.querySelector('#mm-batch-status').innerText.includes('4 of 4 done, 2 failed')")
    assert "it is not a picture" in text(page, "#mm-captions") and "Traceback" not in text(page, "#mm-captions")


def test_two_visitors_and_a_closed_tab(visit: Callable[..., Any], site: DemoServer) -> None:  # noqa: F811
    gate = threading.Event()
    site.context.worker.submit(lambda: gate.wait(120))
    first, second = visit(*SCREENS[0]), visit(*SCREENS[2])
    for page in (first, second):
        choose_example(page)
        ask(page, "what is it?")
        page.wait_for_function("document.querySelector('#mm-status').innerText.includes('Queued')")
    first.close()
    gate.set()
    finish(second)
    assert "identical" in text(second, ".mm-badge")
    assert site.context.worker.submit(lambda: True).result(timeout=60), "freed within a minute"
