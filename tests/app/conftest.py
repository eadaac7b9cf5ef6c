"""Shared by the tests of commands and pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from caption_jobs import make_folder

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(autouse=True)
def _decoders(warm_decoders: None) -> None:
    """Commands of this process take the same decoders."""


@pytest.fixture(scope="module")  # while it is open, no other event loop runs in this thread
def browser() -> Iterator[Any]:
    """Chromium without a window, by Playwright. With MMSPEC_BROWSER=1 a missing one is a failure, no reason to skip."""
    if os.environ.get("MMSPEC_BROWSER") != "1":
        pytest.importorskip("playwright")
        if CHROMIUM is None:
            pytest.skip("no chromium here")
    import playwright.sync_api as api

    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def pictures_in_p(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with eight pictures in `p`: see `caption_jobs`."""
    return make_folder(tmp_path, monkeypatch)
