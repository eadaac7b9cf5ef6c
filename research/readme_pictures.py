"""`python -m research.readme_pictures FOLDER`: the picture of README, from the running demo in Chromium.

Serves the bundled model, asks the first sample pair, and keeps the page with both answers and the card of one token.
Prints the figures of the page, and the seconds from the click to the first word. Needs playwright and Chromium.
"""

from __future__ import annotations

import argparse
import io
import shutil
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from mmspec.app.ui.model import DemoModel
from mmspec.app.ui.server import serve

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TIMEOUT_MS = 240_000
SIZE, WIDTH, COLOURS = (1000, 880), 800, 256
BRANCHED = 7
"""Nodes of a draft tree that is worth a picture."""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with serve(DemoModel(), port=0) as demo, sync_playwright() as playwright:
        while demo.model.phase != "ready":
            time.sleep(0.2)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": SIZE[0], "height": SIZE[1]}, color_scheme="light")
        page.set_default_timeout(TIMEOUT_MS)
        page.goto(demo.url)
        began = time.perf_counter()
        page.locator(".sample").first.click()
        page.locator(".mmspec .text span").first.wait_for()
        first_word_s = time.perf_counter() - began
        page.locator(".headline").wait_for()
        while demo.worker.is_busy:
            time.sleep(0.1)
        page.wait_for_timeout(300)
        report = next(reversed(demo.reports.values()))
        tokens, rounds = report["lanes"][0]["tokens"], report["rounds"]
        drafted = [index for index, token in enumerate(tokens) if token[2] == "drafted"]
        branched = [index for index in drafted if len(rounds[tokens[index][3]]["labels"]) > BRANCHED]
        page.locator(".mmspec .text span").nth((branched + drafted)[0]).dispatch_event("click")  # above the headline
        page.wait_for_timeout(200)
        image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        image.thumbnail((WIDTH, 10_000))
        image.quantize(COLOURS, dither=Image.Dither.NONE).save(args.folder / "demo.png", optimize=True)
        prefill_s = report["encode_s"] + report["stats"]["ttft_s"]
        print(f"first word {first_word_s:.2f} s after the click, {first_word_s - prefill_s:.2f} s beyond the prefill")
        print(page.locator(".headline").inner_text(), page.locator(".second").inner_text(), report["description"])
        browser.close()


if __name__ == "__main__":
    main()
