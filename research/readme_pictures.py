"""`python -m research.readme_pictures FOLDER`: pictures and the GIF of README, from the running app in Chromium.

Serves the bundled model, waits for the race that the page opens with, and records it frame by frame at a stated tempo,
which is printed: the caption in README states it. `--all` also keeps every tab at 1280 and 390 pixels in both themes,
for review, in another folder than `docs/images`. Needs playwright and Chromium.
"""

from __future__ import annotations

import argparse
import io
import shutil
import time
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from mmspec.app.ui.model_store import ModelStore
from mmspec.app.ui.server import serve

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TIMEOUT_MS = 240_000
TABS = ("compare", "inside", "batch", "learning")
README_TABS = ("inside", "batch")
GIF_SIZE, MIN_RACE_S, MAX_RACE_S, HOLD_MS = (800, 520), 6.5, 9.0, 3000


def open_page(browser: Browser, url: str, width: int = 1280, theme: str = "light") -> Any:
    """A page with the opening race played to its end."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.set_default_timeout(TIMEOUT_MS)
    page.goto(f"{url}?__theme={theme}")
    page.wait_for_selector(".mm-settled")
    page.wait_for_timeout(1500)
    return page


def record_race(page: Any, file: Path) -> str:
    """Play the race again, in `MIN_RACE_S` to `MAX_RACE_S` seconds, and write it as a GIF; returns the tempo."""
    times = page.evaluate("[...document.querySelectorAll('.mm-lane [data-t]')].map((token) => Number(token.dataset.t))")
    slower = max(MIN_RACE_S / max(times), 1.0) if max(times) < MAX_RACE_S else MAX_RACE_S / max(times)
    slower = float(f"{slower:.2g}")
    tempo = f"{slower:g} times slower than" if slower > 1 else f"{1 / slower:.2g} times faster than"
    tempo = "in real time" if slower == 1 else f"{tempo} recorded"
    page.evaluate(f"document.querySelector('#mm-status .mm-status').textContent = 'Played {tempo}.'")
    box = page.locator("#mm-race").bounding_box()
    top = page.locator("#mm-status").bounding_box()["y"] - 8
    clip = {"x": box["x"] - 8, "y": top, "width": box["width"] + 16, "height": box["y"] + box["height"] - top}
    frames: list[Any] = []
    stamps: list[float] = []
    page.evaluate(f"window.mmspecRace.play(document, {slower})")
    while not stamps or not page.locator(".mm-settled").count():
        frames.append(page.screenshot(clip=clip, type="png"))
        stamps.append(time.monotonic())
    page.wait_for_timeout(700)
    frames.append(page.screenshot(clip=clip, type="png"))
    images = [Image.open(io.BytesIO(frame)).convert("RGB") for frame in frames]
    for image in images:
        image.thumbnail(GIF_SIZE)
    palette = images[-1].quantize(128, dither=Image.Dither.NONE)
    paletted = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    gaps = [1000 * (after - before) for before, after in pairwise(stamps)]
    durations = [max(20, round(gap / 10) * 10) for gap in gaps] + [100, HOLD_MS]
    paletted[0].save(file, save_all=True, append_images=paletted[1:], duration=durations, loop=0, optimize=True)
    return tempo


def save_small(data: bytes, file: Path, width: int) -> None:
    """Save a screenshot in 64 colours, `width` pixels wide."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    image.thumbnail((width, 10_000))
    image.quantize(64, dither=Image.Dither.NONE).save(file, optimize=True)


def keep_tabs(page: Any, folder: Path, end: str, width: int, names: Collection[str] = TABS) -> None:
    """A picture of these tabs."""

    def keep(name: str) -> None:
        if name not in names:
            return
        page.wait_for_timeout(800)
        save_small(page.screenshot(full_page=True), folder / f"demo-{name}{end}.png", width)

    keep("compare")
    page.get_by_role("tab", name="Inside").click()
    page.wait_for_selector("#mm-inside svg")
    keep("inside")
    page.get_by_role("tab", name="Batch").click()
    page.locator("#mm-take-examples").click()
    page.wait_for_function("document.querySelector('#mm-files').innerText.includes('lion')")
    page.locator("#mm-start").click()
    page.wait_for_function("/9 of 9 done/.test(document.querySelector('#mm-batch-status').innerText)")
    page.wait_for_selector("#mm-curve svg")
    keep("batch")
    if "learning" not in names:
        return
    page.get_by_role("tab", name="Learning").click()
    page.locator("#mm-learn").click()
    page.wait_for_function("/^60 of 60/.test(document.querySelector('#mm-learning-status').innerText)")
    page.wait_for_selector("#mm-learning-curve svg")
    keep("learning")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--all", action="store_true", help="every tab at both widths and in both themes")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with serve(ModelStore(), port=0, record_opening=True) as site, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = open_page(browser, site.url)
        print(f"race.gif: played {record_race(page, args.folder / 'race.gif')}")
        keep_tabs(page, args.folder, "", 760, TABS if args.all else README_TABS)
        if args.all:
            for width, theme in ((390, "light"), (390, "dark"), (1280, "dark")):
                keep_tabs(open_page(browser, site.url, width, theme), args.folder, f"-{width}-{theme}", width)
        browser.close()


if __name__ == "__main__":
    main()
