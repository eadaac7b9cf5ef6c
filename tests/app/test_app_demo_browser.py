"""The page in a real browser (headless Chromium, driven by Playwright), at the widths of a desk and of a phone.

What the page says is compared with the stored answer while answers stream and replays play. Left out of `make test`;
`make test-app` runs it. `--shots FOLDER` keeps pictures, with the model that ships. With MMSPEC_BROWSER=1 a missing
browser is a failure, no reason to skip.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio")

from mmspec.app.cli.arguments import DEFAULT_MODEL
from mmspec.app.scenes.examples import EXAMPLES_FOLDER
from mmspec.app.ui.demo import Demo
from mmspec.app.ui.drafter_table import DrafterTable
from mmspec.app.ui.limits import Limits
from mmspec.app.ui.model import DemoModel
from mmspec.app.ui.server import serve
from mmspec.app.ui.streamer import TimingStreamer
from research.synthetic_images import write_images

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
WIDTHS = pytest.mark.parametrize("width", [1280, 390])
PATIENCE_MS = 60_000
NASTY = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script> **bold** ${1+1} {{value}}"
TEXT_CONTRAST = """(() => {
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
    return [...document.querySelectorAll('body *')]
        .filter((part) => part.checkVisibility({visibilityProperty: true}) &&
            !['SCRIPT', 'STYLE', 'TITLE'].includes(part.tagName) &&
            [...part.childNodes].some((node) => node.nodeType == 3 && node.textContent.trim()))
        .map((part) => {
            const style = getComputedStyle(part);
            const ink = part.tagName == 'text' ? style.fill : style.color;
            const pair = [light(parts(ink)), light(behind(part))].sort();
            return [part.tagName + ' ' + part.textContent.slice(0, 40), (pair[1] + 0.05) / (pair[0] + 0.05)];
        });
})()"""
"""[text, contrast of WCAG 2] of everything with text in it."""
WRONG_FIGURES = """async () => {
    const say = (value) => `${value < 10 ? value.toFixed(value < 1 ? 2 : 1) : value.toFixed(0)} s`;
    const wrong = [];
    for (const turn of document.querySelectorAll('.turn[id]:not(.replaying)')) {
        const report = await (await fetch(`report/${turn.id.slice(5)}`)).json();
        const seen = turn.querySelector('.result').innerText;
        const check = (name, a, b) => { if (a !== b) wrong.push([turn.id, name, a, b]); };
        check('question', turn.querySelector('.question').textContent, report.question);
        report.lanes.forEach((lane, index) => {
            const part = turn.querySelectorAll('.lane')[index];
            const spans = [...part.querySelectorAll('.text span')];
            const [shown, sent] = [spans.map((one) => one.textContent), lane.tokens.map((one) => one[0])];
            check('text', shown.join('').trim(), sent.join('').trim());
            check('clock', part.querySelector('.clock').textContent, say(lane.seconds + report.encode_s));
            check('hidden', spans.filter((one) => one.classList.contains('later')).length, 0);
            if (!index) lane.tokens.forEach((token, at) => check('kind', spans[at].classList.contains(token[2]), true));
        });
        const numbers = [...turn.querySelectorAll('.numbers dd:not(.faint)')].map((one) => one.textContent);
        const lane = report.lanes[0];
        check('numbers', numbers.slice(0, 3).join(), [lane.drafter, lane.tau.toFixed(2), lane.num_rounds].join());
        const [ours, plain] = report.lanes.map((lane) => lane.seconds + report.encode_s);
        if (report.identical) for (const value of [ours, plain]) check('headline', seen.includes(say(value)), true);
        const rates = report.lanes.map((lane) => lane.tokens_per_s.toFixed(0));
        check('rate', seen.includes(`${rates[0]} instead of ${rates[1]} tokens`), report.lanes[0].tokens.length > 1);
        const drafts = /about ([0-9.]+)x from drafts/.exec(seen);
        check('split', drafts ? Number(drafts[1]) <= report.lanes[0].tau + 0.05 : true, true);
        check('split is that of the answer', drafts?.[1], report.split?.drafts.toFixed(1));
    }
    return wrong;
}"""
"""[turn, what, on the page, in the stored answer] of every figure of a finished turn that is not its own."""

CONTROLS = "button:enabled:visible, summary:visible, select:visible, .mmspec .text span:visible"


@pytest.fixture(scope="module")
def demo(request: pytest.FixtureRequest) -> Iterator[Demo]:
    name = "tiny" if request.config.getoption("--shots") is None else DEFAULT_MODEL
    with serve(DemoModel(name), limits=Limits(max_file_mb=2), port=0) as running:
        while running.model.phase != "ready":
            time.sleep(0.1)
        yield running


@pytest.fixture
def visit(demo: Demo, browser: Any) -> Iterator[Callable[..., Any]]:
    """Open the page; what its script says on the console fails the test."""
    opened, said = [], list[str]()

    def open_one(width: int = 1280, theme: Any = "light", query: str = "") -> Any:
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda one: said.append(one.text) if one.type in ("warning", "error") else None)
        page.goto(demo.url + query)
        page.locator(".sample:visible, .turn:visible").first.wait_for()
        opened.append(page)
        return page

    yield open_one
    for page in opened:
        page.close()
    assert said == []


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose answer takes seconds."""
    record = TimingStreamer.record

    def record_slowly(streamer: TimingStreamer, token_ids: list[int]) -> None:
        record(streamer, token_ids)
        time.sleep(0.02)

    monkeypatch.setattr(TimingStreamer, "record", record_slowly)


def until(page: Any, condition: Callable[[], object]) -> None:
    """The page's Content-Security-Policy forbids `wait_for_function`."""
    end = time.monotonic() + PATIENCE_MS / 1000
    while not condition():
        assert time.monotonic() < end
        page.wait_for_timeout(30)


def set_tokens(page: Any, count: int) -> None:
    """How long answers are, under Expert."""
    page.locator("#expert").evaluate("(one) => { one.open = true; }")
    page.locator("#max_new_tokens").fill(str(count))


def ask(page: Any, question: str, number: int, tokens: int = 60) -> Any:
    """Ask, and wait for the whole answer of turn `number`; returns the turn."""
    if page.locator("#max_new_tokens").input_value() != str(tokens):
        set_tokens(page, tokens)
    page.locator("#question").fill(question)
    page.locator("#question").press("Enter")
    return finished(page, number)


def finished(page: Any, number: int) -> Any:
    turn = page.locator(".turn").nth(number)
    turn.locator(".headline").wait_for()
    return turn


def sample(page: Any, number: int = 0) -> Any:
    """Ask a sample pair by one click."""
    page.locator(".sample").nth(number).click()
    return finished(page, 0)


def take(page: Any, file: Path) -> None:
    page.locator("#file").set_input_files(str(file))
    page.locator("#attached img").wait_for()


def measured(page: Any, demo: Demo, turn: Any) -> Any:
    """The stored answer of a turn, after its shares are measured."""
    name = turn.get_attribute("id").removeprefix("race-")
    until(page, lambda: not demo.worker.is_busy)
    page.wait_for_timeout(150)
    return demo.reports[name]


@WIDTHS
def test_the_first_screen(visit: Callable[..., Any], width: int) -> None:
    page = visit(width)
    top = page.inner_text("body")
    assert "the same answer, sooner" in top and "a small drafter guesses several words ahead" in top
    assert page.locator(".sample").count() == 4 and page.locator("#ask").is_visible()
    for word in ("tau", "R ", "rounds", "arbitrated"):
        assert word not in page.inner_text("main"), "only under Expert"
    assert "heic" in page.locator("#file").get_attribute("accept")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@WIDTHS
def test_the_toy_says_what_it_is_and_kernels_are_built_in_sight(
    browser: Any, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the model that ships, from the first moment on, and while a compiler works."""
    built = threading.Event()

    def build(model: DemoModel) -> None:
        model._set_phase("building")
        assert built.wait(60)
        model._set_phase("loading")
        model.drafters = ()  # enough: nothing is asked here

    monkeypatch.setattr(DemoModel, "_load", build)
    with serve(DemoModel(), port=0) as running:
        page = browser.new_page(viewport={"width": width, "height": 844})
        page.goto(running.url)
        page.locator(".sample").first.wait_for()
        words = page.locator("#model")
        assert "a toy that knows drawn scenes; other questions get nonsense" in words.inner_text()
        box = words.bounding_box()
        assert box["y"] + box["height"] < 200, "on the first screen, above the samples"
        until(page, lambda: "Building the C kernels, once (" in page.inner_text("#status"))
        page.locator(".sample").first.click()
        until(page, lambda: "Building the C kernels, once (" in page.locator(".turn .note").inner_text())
        page.locator("#stop").click()
        built.set()
        page.close()


@WIDTHS
def test_an_answer_streams_in_its_colours_and_plain_generate_follows(
    visit: Callable[..., Any], demo: Demo, width: int, slow: None
) -> None:
    page = visit(width)
    set_tokens(page, 100)
    page.locator(".sample").first.click()
    turn = page.locator(".turn")
    turn.locator(".mmspec .text span").nth(3).wait_for()
    assert not turn.locator(".headline").count(), "it is shown before plain generate has answered"
    kinds = {"drafted", "corrected", "own", "undrafted"}
    assert set(turn.locator(".mmspec .text span").evaluate_all("(all) => all.map((one) => one.className)")) <= kinds
    finished(page, 0)
    report = measured(page, demo, turn)
    assert report["identical"] and len(report["lanes"][0]["tokens"]) == 100
    assert page.evaluate(WRONG_FIGURES) == []
    assert page.locator("#ask").is_visible() and not page.locator("#stop").is_visible()


@WIDTHS
def test_a_question_while_a_replay_plays(visit: Callable[..., Any], demo: Demo, width: int) -> None:
    page = visit(width)
    first = sample(page)
    measured(page, demo, first)
    first.get_by_role("button", name="Replay").click()
    first.locator(".later").first.wait_for(state="attached")
    page.locator("#question").fill("and now?")
    page.locator("#ask").click()
    assert first.locator(".later").count() == 0, "a replay would disturb what is measured"
    second = finished(page, 1)
    assert page.evaluate(WRONG_FIGURES) == []
    assert second.get_attribute("id") != first.get_attribute("id")


@WIDTHS
def test_another_picture_while_an_answer_comes(
    visit: Callable[..., Any], demo: Demo, width: int, tmp_path: Path, slow: None
) -> None:
    page = visit(width)
    set_tokens(page, 1000)
    page.locator(".sample").first.click()
    page.locator(".mmspec .text span").nth(5).wait_for()
    take(page, write_images(tmp_path, 1)[0])
    second = ask(page, "what is this?", 1, 30)
    assert "Stopped." in page.locator(".turn").first.inner_text() and not page.locator(".turn").first.get_attribute(
        "id"
    )
    report = measured(page, demo, second)
    assert report["file_name"] == "0.png" or report["file_name"].endswith(".png")
    assert report["after"] is None and second.locator(".media img").count() == 1
    assert page.evaluate(WRONG_FIGURES) == []


@WIDTHS
def test_a_replay_is_six_seconds_at_most_and_ends_as_it_was(visit: Callable[..., Any], demo: Demo, width: int) -> None:
    page = visit(width)
    turn = sample(page)
    report = measured(page, demo, turn)
    page.mouse.move(0, 0)
    before = turn.inner_html()
    turn.get_by_role("button", name="Replay").click()
    assert turn.locator(".later").count() > 0
    began = time.monotonic()
    until(page, lambda: "replaying" not in turn.get_attribute("class"))
    longest = max(lane["seconds"] for lane in report["lanes"]) + report["encode_s"]
    assert time.monotonic() - began < min(6, longest) + 2
    page.mouse.move(0, 0)
    assert turn.inner_html() == before and page.evaluate(WRONG_FIGURES) == []
    turn.get_by_role("button", name="Replay").click()
    turn.get_by_role("button", name="Replay").click()
    until(page, lambda: "replaying" not in turn.get_attribute("class"))
    page.mouse.move(0, 0)
    assert turn.inner_html() == before, "twice"


@WIDTHS
def test_ties_slower_answers_and_noise_are_said(visit: Callable[..., Any], demo: Demo, width: int) -> None:
    """Stored answers with other figures, as a link opens them."""
    page = visit(width)
    report = measured(page, demo, sample(page))
    for ours, plain, words in (
        (1.0, 1.02, "as fast as plain generate"),
        (2.0, 1.0, "here slower"),
        (1.0, 3.0, "1.0 s instead of 3.0 s"),
    ):
        for split in (None, {"loop": 2.0, "drafts": 1.24}):
            lanes = [lane | {"seconds": s} for lane, s in zip(report["lanes"], (ours, plain), strict=True)]
            lanes[0] |= {"num_drafted": 3, "tau": 1.5}
            fake = report | {"id": "fake", "lanes": lanes, "encode_s": 0.0, "split": split}
            demo.reports["fake"] = fake
            text = visit(width, query="#race=fake").locator(".result").inner_text()
            assert words in text and ("About 2.0x from mmspec's own loop, about 1.2x from drafts" in text) == bool(
                split
            )
    demo.reports["fake"] = report | {"id": "fake", "identical": False, "num_equal": 11}
    assert "The answers differ from token 12 on" in visit(width, query="#race=fake").locator(".result").inner_text()


@WIDTHS
def test_a_token_shows_its_round(visit: Callable[..., Any], demo: Demo, width: int) -> None:
    page = visit(width)
    page.locator("#expert").evaluate("(one) => { one.open = true; }")
    page.locator("#drafter").select_option("recycling")
    turn = sample(page)
    report = measured(page, demo, turn)
    tokens = report["lanes"][0]["tokens"]
    at = next((index for index, token in enumerate(tokens) if len(report["rounds"][token[3]]["labels"]) > 1), 3)
    token = turn.locator(".mmspec .text span").nth(at)
    token.click() if width < 600 else token.hover()
    card, number = page.locator("#card"), tokens[at][3]
    one = report["rounds"][number]
    shown = page.evaluate("(ms) => ms.toFixed(1)", one["ms"])  # of 1.25 Python makes 1.2
    assert card.is_visible() and f"Round {number} of {len(report['rounds']) - 1}, {shown} ms" in card.inner_text()
    if len(one["labels"]) > 1:
        assert card.locator("svg .node").count() >= len(one["labels"])
    box = card.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= width and box["y"] + box["height"] <= 900
    page.keyboard.press("Escape")
    assert not card.is_visible()
    turn.locator(".mmspec .text").focus()
    page.keyboard.press("ArrowRight")
    assert card.is_visible()


@WIDTHS
def test_the_conversation_survives_a_reload_and_is_linked(visit: Callable[..., Any], demo: Demo, width: int) -> None:
    page = visit(width)
    sample(page)
    ask(page, f"{NASTY} and now?", 1)
    measured(page, demo, page.locator(".turn").nth(1))
    said = page.locator("#turns").inner_text()
    page.reload()
    finished(page, 1)
    assert page.locator("#turns").inner_text() == said and page.evaluate("window.hacked") is None
    third = ask(page, "once more", 2)
    assert len(measured(page, demo, third)["turns"]) == 2 and page.evaluate(WRONG_FIGURES) == []
    other = visit(width, query=f"#{page.locator('.turn').nth(1).get_attribute('id').replace('-', '=', 1)}")
    finished(other, 0)
    assert other.locator(".turn").count() == 1 and NASTY in other.locator(".question").inner_text()
    page.locator("#new").click()
    assert page.locator(".turn").count() == 0 and page.locator("#start").is_visible()


@WIDTHS
def test_retry_and_edit(visit: Callable[..., Any], demo: Demo, width: int) -> None:
    page = visit(width)
    sample(page)
    ask(page, "second", 1)
    page.locator(".turn").nth(1).get_by_role("button", name="Retry").click()
    page.wait_for_timeout(50)
    turn = finished(page, 1)
    assert measured(page, demo, turn)["question"] == "second" and page.locator(".turn").count() == 2
    page.locator(".turn").first.get_by_role("button", name="Edit").click()
    assert page.locator(".turn").count() == 0 and page.locator("#question").input_value().startswith("Describe")
    turn = ask(page, "edited", 0)
    report = measured(page, demo, turn)
    assert report["question"] == "edited" and report["turns"] == [] and page.evaluate(WRONG_FIGURES) == []


@WIDTHS
def test_after_five_questions_the_same_picture_drafts_as_before(
    visit: Callable[..., Any], demo: Demo, width: int
) -> None:
    page = visit(width)
    page.locator("#expert").evaluate("(one) => { one.open = true; }")
    page.locator("#drafter").select_option("hybrid")
    first = measured(page, demo, sample(page))["lanes"][0]
    for number in range(1, 6):
        ask(page, f"question {number}", number, 200)
    page.locator("#new").click()
    again = measured(page, demo, sample(page))["lanes"][0]
    assert [token[0] for token in again["tokens"]] == [token[0] for token in first["tokens"]]
    assert abs(again["num_drafted"] - first["num_drafted"]) <= max(3, first["num_drafted"] // 2)


def test_only_drafters_that_run_are_offered(visit: Callable[..., Any], demo: Demo) -> None:
    page = visit()
    offered = page.locator("#drafter option").all_text_contents()
    assert tuple(offered) == demo.model.drafters and not {"mtp", "assistant"} & set(offered)


@WIDTHS
def test_drafters_are_compared_on_request(
    visit: Callable[..., Any], demo: Demo, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = visit(width)
    turn = sample(page)
    turn.locator(".numbers summary").click()
    button = turn.get_by_role("button", name="Compare the drafters")
    measure = DrafterTable._measure

    def measure_slowly(*args: Any) -> Any:
        time.sleep(0.3)  # a visitor is slower than the tiny model
        return measure(*args)

    with monkeypatch.context() as patch:
        patch.setattr(DrafterTable, "_measure", measure_slowly)
        button.click()
        until(page, lambda: " calls …" in turn.locator(".drafters").inner_text())
        assert button.is_disabled()
        page.locator("#question").fill("something else")
        page.locator("#question").press("Enter")
        until(page, lambda: turn.locator(".drafters").inner_text() == "Stopped.")
    finished(page, 1)
    button.click()
    turn.locator(".drafters table").wait_for()
    names = [name.split(" (")[0] for name in turn.locator(".drafters td:first-child").all_text_contents()]
    assert len(set(names)) == len(names) > 2 and {"plain generate", "none"} <= set(names)
    marks = turn.locator(".drafters td:last-child").all_text_contents()
    said, tied = (
        turn.locator(".drafters p").inner_text(),
        [name for name, mark in zip(names, marks, strict=True) if mark],
    )
    assert all(name in said for name in tied) and ("no measurement tells them apart" in said) == (len(tied) > 1)
    assert page.evaluate("document.documentElement.scrollWidth") <= width and page.evaluate(WRONG_FIGURES) == []


def test_files_come_by_drop_and_paste_anywhere(visit: Callable[..., Any], tmp_path: Path) -> None:
    page = visit()
    give = """(kind) => {
        const data = new DataTransfer();
        const bytes = new Uint8Array([137, 80, 78, 71]);
        for (const name of ['one (1).png', 'two.png']) data.items.add(new File([bytes], name, {type: 'image/png'}));
        const event = kind === 'drop' ? new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true})
            : new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true});
        document.querySelector('h1').dispatchEvent(event);
    }"""
    for kind in ("drop", "paste"):
        page.evaluate(give, kind)
        until(page, lambda: "one (1).png" in page.inner_text("#attached"))
        assert "mmspec caption FOLDER" in page.inner_text("#status"), "several files: the command"
        page.get_by_role("button", name="Remove one (1).png").click()
    page.locator("#question").fill("what?")
    page.locator("#ask").click()
    assert page.inner_text("#status").startswith("Please choose a picture") and page.locator(".turn").count() == 0
    big = tmp_path / "big.png"
    big.write_bytes(b"x" * 3_000_000)
    page.locator("#file").set_input_files(str(big))
    assert page.inner_text("#status") == "big.png cannot be used: it has more than 2 MB."
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    page.locator("#file").set_input_files(str(broken))
    page.locator("#attached span").wait_for()
    page.locator("#ask").click()
    page.locator(".note.error").wait_for()
    assert page.inner_text("body").count("it is damaged or incomplete") == 1, "errors stand once"


def test_stop_stops_and_a_long_question_keeps_the_answer_in_sight(
    visit: Callable[..., Any], demo: Demo, slow: None
) -> None:
    page = visit()
    set_tokens(page, 1000)
    page.locator(".sample").first.click()
    page.locator(".mmspec .text span").nth(5).wait_for()
    page.locator("#stop").click()
    until(page, lambda: not demo.worker.is_busy)
    assert "Stopped." in page.locator(".turn").inner_text() and page.locator("#ask").is_visible()
    page.locator("#new").click()
    page.locator("#expert").evaluate("(one) => { one.open = false; }")
    take(page, EXAMPLES_FOLDER / "cart_rainbow.png")
    turn = ask(page, "why " * 900, 0, 8)
    assert turn.locator(".lanes").bounding_box()["y"] - turn.bounding_box()["y"] < 200


def test_a_second_visitor_waits_and_is_told(visit: Callable[..., Any], demo: Demo, slow: None) -> None:
    first, second = visit(), visit(390)
    set_tokens(first, 1000)
    set_tokens(second, 8)
    first.locator(".sample").first.click()
    first.locator(".mmspec .text span").nth(3).wait_for()
    second.locator(".sample").first.click()
    until(second, lambda: "1 question of others before yours" in second.locator(".note").inner_text())
    first.close()
    finished(second, 0)
    assert second.evaluate(WRONG_FIGURES) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@WIDTHS
def test_the_page_is_for_everybody(
    visit: Callable[..., Any], demo: Demo, width: int, theme: str, request: pytest.FixtureRequest
) -> None:
    """Contrast, names, the keyboard, nothing cut."""
    page = visit(width, theme)
    shots = request.config.getoption("--shots")
    if shots:
        page.screenshot(path=f"{shots}/start-{width}-{theme}.png")
    measured(page, demo, sample(page))
    page.locator("details").evaluate_all("(all) => { for (const one of all) one.open = true; }")
    if shots:
        page.screenshot(path=f"{shots}/answer-{width}-{theme}.png", full_page=True)
    assert [pair for pair in page.evaluate(TEXT_CONTRAST) if pair[1] < 4.5] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    unnamed = """() => [...document.querySelectorAll('button, input, select, textarea, summary, a')]
        .filter((one) => one.checkVisibility() && !(one.innerText?.trim() || one.ariaLabel || one.labels?.length))
        .map((one) => one.outerHTML)"""
    assert page.evaluate(unnamed) == []
    for _ in range(60):
        page.keyboard.press("Tab")
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        inside = page.evaluate("document.activeElement === document.body || document.activeElement.id === 'file'")
        assert inside or outline != "none", "the focus is seen"


@WIDTHS
def test_random_presses_leave_only_figures_of_their_own(visit: Callable[..., Any], demo: Demo, width: int) -> None:
    """Enabled controls at random, the same ones in each run as far as the timing allows: a minute for both widths."""
    page, chance = visit(width), random.Random(width)
    set_tokens(page, 40)
    end = time.monotonic() + float(os.environ.get("MMSPEC_PRESSES_S", "30"))
    for number in itertools.count():
        if time.monotonic() > end:
            break
        if chance.random() < 0.4:
            page.locator("#question").fill(f"question {number}")
        shown = page.locator(CONTROLS).all()
        if shown:
            try:
                one = chance.choice(shown)
                if one.evaluate("(one) => one.tagName") == "SELECT":
                    one.select_option(index=chance.randrange(one.locator("option").count()), timeout=500)
                else:
                    one.click(timeout=500)
            except Exception:  # it has gone meanwhile, or something is above it
                page.keyboard.press("Escape")
        page.wait_for_timeout(chance.choice((0, 20, 200)))
        if number % 5 == 0:
            assert page.evaluate(WRONG_FIGURES) == []
    page.locator("#expert").evaluate("(one) => { one.open = true; }")
    until(page, lambda: not page.locator("#stop").is_visible() and not page.locator(".replaying").count())
    assert page.evaluate(WRONG_FIGURES) == []
