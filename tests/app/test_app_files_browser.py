"""The report of a suite as an HTML file, opened from the disk in a browser without a network. Both themes, on a desk
and on a phone. See `test_app_demo_browser.py` for how these tests are run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from research.bench.peers.base import MEDIA, PeerRun
from research.bench.suite.config import SuiteConfig
from research.bench.suite.html import format_html
from research.bench.suite.runner import CallRecord
from research.bench.suite.session import SuiteResult
from research.bench.suite.summary import SuiteRow

pytestmark = pytest.mark.pages

LOOKS = [(width, scheme) for width in (390, 1280) for scheme in ("light", "dark")]
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


def check_page(browser: Any, file: Path, width: int, scheme: str, shots: str | None) -> Any:
    """Open a file and check what holds for all: no request, nothing cut, everything legible. Returns the page."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    requests: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(file.as_uri())
    assert [url for url in requests if not url.startswith("data:")] == [file.as_uri()] and errors == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    contrasts = page.evaluate(TEXT_CONTRAST)
    assert len(contrasts) > 10 and [pair for pair in contrasts if pair[1] < 4.5] == []
    is_dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert is_dark == (scheme == "dark")
    if shots is not None:
        page.screenshot(path=f"{shots}/{file.stem}-{width}-{scheme}.png", full_page=True)
    return page


def build_suite_result() -> SuiteResult:
    """A result with a peer that failed, a long name and two batch sizes."""
    peers = {"hf": 1.0, "hf-again": 1.02, "none": 1.6, "flash": 3.2, "a-peer-with-a-rather-long-name": 2.1}
    rows, calls = [], []
    for batch in (1, 4):
        for peer, speed in peers.items():
            limits = [speed * 0.9, speed * 1.1]
            for category in ("all", "describe", "short"):
                figures = {"tau": speed, "ms_per_token": 2.5 / speed, "tokens_per_s": 400 * speed}
                speeds = {"speedup_decode": speed, "speedup_decode_ci": limits, "speedup_whole": speed}
                rows.append(
                    SuiteRow(
                        peer,
                        MEDIA,
                        batch,
                        category,
                        8,
                        0,
                        None,
                        8,
                        **figures,
                        **speeds,
                        speedup_whole_ci=limits,
                        latency_s={50: 0.4 / speed, 90: 0.5 / speed, 99: 0.6 / speed},
                        memory_mib=12.0,
                    )
                )
            for number in range(8):
                run = PeerRun([[1, 2]], (0.3 + 0.03 * number) / speed, 0.1, 0.2, 2)
                calls.append(CallRecord(peer, MEDIA, batch, "describe", str(number), 0, None, run, 2.5, 0.4, True))
        error = "ValueError: Image features and image tokens do not match, tokens: 25, features: 1024"
        rows.append(SuiteRow("hf-lookup", MEDIA, batch, "all", 0, 8, error, 0))
    provenance = {
        "dtype": "float32",
        "device": "cpu",
        "threads": 2,
        "command": "python -m research.bench --suite scenes",
        "date": "2026-11-25",
        "processor": "a processor",
        "commit": "0000000",
    }
    provenance |= dict.fromkeys(("mmspec", "torch", "transformers"), "1.0")
    return SuiteResult(
        SuiteConfig(
            "scenes",
            "auto",
            "auto",
            ("none", "flash"),
            None,
            "scenes",
            None,
            (),
            None,
            0,
            (1, 4),
            160,
            (),
            (),
            None,
            None,
        ),
        provenance,
        rows,
        calls,
        problems={"7": "no image b.png"},
    )


@pytest.mark.browser
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_the_report_of_a_suite(
    browser: Any, tmp_path: Path, width: int, scheme: str, request: pytest.FixtureRequest
) -> None:
    file = tmp_path / "report.html"
    file.write_text(format_html(build_suite_result()), encoding="utf-8")
    page = check_page(browser, file, width, scheme, request.config.getoption("--shots"))
    assert page.locator("svg[role=img][aria-label]").count() == 4
    size = "Math.min(...[...document.querySelectorAll('svg text')].map((one) => one.getBoundingClientRect().height))"
    assert page.evaluate(size) > 9, "texts of the plots are legible"
    # Every text of a plot lies within it.
    cut = """[...document.querySelectorAll('svg')].flatMap((svg) => {
        const frame = svg.getBoundingClientRect();
        return [...svg.querySelectorAll('text')].filter((one) => {
            const box = one.getBoundingClientRect();
            return box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1;
        }).map((one) => one.textContent);
    })"""
    assert page.evaluate(cut) == []
    page.close()
