"""The pages for everybody: legible, named, reached by the keyboard, silent in the console. What axe-core 4 has found.

At the width of a desk and of a phone, in both themes. Left out of `make test`; `make test-app` runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio")

from test_app_browser import ask, browser, finish, settings, site, text, type_number  # noqa: F401  (fixtures)
from test_app_visitor_browser import SCREENS, choose_example, visit  # noqa: F401  (fixtures)

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]
FAINT = """() => {
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
        .filter((part) => part.checkVisibility({visibilityProperty: true, opacityProperty: true}) &&
            !part.closest('svg, :disabled, script, style') &&
            [...part.childNodes].some((node) => node.nodeType == 3 && node.textContent.trim()))
        .map((part) => {
            const pair = [light(parts(getComputedStyle(part).color)), light(behind(part))].sort((a, b) => a - b);
            return [part.outerHTML.slice(0, 120), (pair[1] + 0.05) / (pair[0] + 0.05)];
        }).filter((pair) => pair[1] < 4.5);
}"""
"""[element, contrast] of all words with a contrast below that of WCAG AA."""
WRONG = """() => {
    const seen = (part) => part.checkVisibility({visibilityProperty: true});
    const all = (selector) => [...document.querySelectorAll(selector)].filter(seen);
    const words = (text) => text.toLowerCase().replace(/\\s+/g, ' ').trim();
    const levels = all('h1, h2, h3, h4').map((one) => Number(one.tagName[1]));
    return {
        nested: all('button, a[href]').filter((one) => !one.role &&
            [...one.querySelectorAll('button, a[href], [tabindex]')].some(seen)),
        list: all('dl > :not(dt, dd, div), dl > div > :not(dt, dd)'),
        named: all('button[aria-label]').filter((one) => /[a-z]{2}/i.test(one.innerText) &&
            !words(one.ariaLabel).includes(words(one.innerText))),
        unnamed: all('button, input:not([type=file]), textarea, [role=img]:not([aria-hidden=true])').filter((one) =>
            !(one.innerText || one.ariaLabel || one.title || one.labels?.length || one.placeholder)),
        key: all('[aria-label^="common."], [title^="common."]'),
        heading: levels.some((level, index) => level > (levels[index - 1] ?? 0) + 1) ? [document.body] : [],
    };
}"""
"""{rule: elements that break it}."""
UNREACHED = """(reached) => [...document.querySelectorAll(
        'button, a[href], input:not([type=file]), textarea, summary, [role=tab], .mm-canvas')]
    .filter((one) => one.checkVisibility({visibilityProperty: true}) && !one.disabled && !one.dataset.reached
        && !one.closest('[aria-hidden=true], .visually-hidden') && one.role != 'group'
        && !(one.type == 'radio' && document.querySelector(`[name="${one.name}"][data-reached]`))
        && one.getClientRects().length && !(one.classList.contains('mm-canvas') && one.scrollWidth <= one.clientWidth))
    .map((one) => one.outerHTML.slice(0, 160))"""


def check(page: Any) -> None:
    """All of the rules, for what is seen of the page now."""
    assert page.evaluate(FAINT) == []
    wrong = page.evaluate(
        f"Object.entries(({WRONG})()).map(([rule, all]) => [rule, all.map((one) => one.outerHTML.slice(0, 160))])"
    )
    wrong = [(rule, found) for rule, found in wrong if found]
    assert wrong == [], wrong
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    page.evaluate("document.querySelectorAll('[data-reached]').forEach((one) => delete one.dataset.reached)")
    ends = 0
    for _ in range(250):  # from where the keyboard is to the end of the page, and through all of it
        page.keyboard.press("Tab")
        ends += page.evaluate(
            "(document.activeElement.dataset.reached = 1, document.activeElement == document.body ? 1 : 0)"
        )
        if ends == 3:
            break
    unreached = page.evaluate(UNREACHED)
    assert unreached == [], unreached


@pytest.mark.parametrize("screen", SCREENS)
def test_every_tab_is_for_everybody(visit: Callable[..., Any], screen: tuple[int, int, str], tmp_path: Path) -> None:  # noqa: F811
    page = visit(*screen)
    said = list[str]()
    page.on("console", lambda one: said.append(one.text) if one.type in ("warning", "error") else None)
    choose_example(page)
    settings(page, tokens=16, Drafter="recycling", Tree_size="8")
    ask(page, "what is it?")
    finish(page)
    check(page)
    page.get_by_role("tab", name="Inside").click()
    page.wait_for_selector("#mm-inside svg")
    check(page)
    page.get_by_role("tab", name="Batch").click()
    check(page)
    page.locator("#mm-take-examples").click()
    page.wait_for_function("document.querySelector('#mm-files').innerText.includes('lion')")
    page.locator("#mm-start").click()
    page.wait_for_function("document.querySelector('#mm-batch-status').innerText.includes('speed of plain generate')")
    page.wait_for_selector("#mm-curve .mm-chart")
    check(page)
    page.get_by_role("tab", name="Learning").click()
    page.wait_for_function("document.querySelectorAll('#mm-learning-numbers .mm-samples img').length > 3")
    check(page)
    type_number(page, "Pictures", 4)
    page.wait_for_function("document.querySelector('#mm-learning-status').innerText.includes('describes 4 pictures')")
    page.locator("#mm-learn").click()
    page.wait_for_function("/^4 of 4 pictures/.test(document.querySelector('#mm-learning-status').innerText)")
    page.wait_for_selector("#mm-learning-curve .mm-chart")
    assert page.locator("#mm-learning-numbers .mm-described img").count() == 1, "the picture that is described"
    check(page)
    assert said == []
