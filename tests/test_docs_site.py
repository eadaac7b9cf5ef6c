"""The documentation as pages: every page is in the menu, the reference is complete, the strict build passes (slow)."""

from __future__ import annotations

import importlib.util
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import mmspec
from mmspec.app.cli.main import build_parser

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "docs" / "site" / "build.py"


@pytest.fixture(scope="module")
def site() -> ModuleType:
    """The script that builds the pages."""
    spec = importlib.util.spec_from_file_location("build_site", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def menu_pages(entry: Any) -> Iterator[str]:
    """The pages of a part of the menu."""
    if isinstance(entry, str):
        yield entry
        return
    for part in entry.values() if isinstance(entry, dict) else entry:
        yield from menu_pages(part)


def test_every_page_is_in_the_menu_and_what_is_linked_is_there(site: ModuleType, tmp_path: Path) -> None:
    site.lay_out(tmp_path / "pages")
    pages = {str(page.relative_to(tmp_path / "pages")) for page in (tmp_path / "pages").rglob("*.md")}
    menu = list(menu_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    linked_only = {"app/scenes/weights/README.md"}
    assert len(set(menu)) == len(menu) and pages - linked_only == set(menu)
    assert (tmp_path / "pages" / "examples" / "script.py").is_file()
    assert (tmp_path / "pages" / "docs" / "images" / "demo.png").is_file()


def test_the_reference_has_every_public_name_and_command(site: ModuleType) -> None:
    names = [name for names in site.PYTHON.values() for name in names]
    objects = [pkgutil.resolve_name(f"mmspec.{name.rpartition('.')[0]}:{name.rpartition('.')[2]}") for name in names]
    assert all(one.__doc__ for one in objects)
    assert {getattr(mmspec, name) for name in mmspec._MODULE_OF} <= set(objects)
    page = site.commands_page()
    for name, command in site.sub_commands(build_parser()).items():
        assert f"\n## mmspec {name}\n" in page and command.format_help() in page


@pytest.mark.slow
def test_the_strict_build_passes(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason="optional: the extra `docs`")
    command = [sys.executable, str(SCRIPT), str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Make <code>model.generate</code> speculative" in (
        tmp_path / "site" / "reference" / "python" / "index.html"
    ).read_text(encoding="utf-8")
