"""The documentation as pages: `python docs/site/build.py FOLDER`, or `make docs`.

The Markdown files keep their places in the repository, so that every link works there and on the pages. What they link
to besides (scripts, result files) is copied beside them. The reference is made from docstrings (mkdocstrings) and from
the parsers of the command line. The build is strict: a dead link or anchor, or a page that the menu lacks, is an error.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "build" / "pages"
FOLDERS = ("docs", "examples", "research")
FROZEN = "research/changelog-before-0.1.0.md"
FILES = ("README.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md", "CHANGELOG.md")
LINK = re.compile(r"\]\(\s*([^)\s#]+)[^)]*\)")
PYTHON = {
    "Calls": (
        "patching.patch",
        "patching.unpatch",
        "patching.is_patched",
        "patching.disabled",
        "patching.stats",
        "comparison.compare",
        "engine.constraints.register_prefix_processor",
        "targets.registry.supported",
    ),
    "What they return": ("metrics.stats.Stats", "comparison.Comparison", "targets.registry.UnsupportedModelError"),
    "Protocols": (
        "interfaces.drafter.Drafter",
        "interfaces.drafter.DrafterRequirements",
        "interfaces.drafter.Prompt",
        "interfaces.target.VerifyResult",
        "interfaces.compressor.Compressor",
    ),
    "Pictures, clips and Ray": ("vision.video.frames.read_frames", "app.caption.ray_actor.CaptionActor"),
}
"""Headings of the reference and the objects below them, where `mmspec` defines them."""


def python_page() -> str:
    """The page of the Python interface, for mkdocstrings."""
    parts = ["# Python\n"]
    for heading, names in PYTHON.items():
        parts += [f"## {heading}\n", *(f"::: mmspec.{name}\n" for name in names)]
    return "\n".join(parts)


def sub_commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The sub-commands of a parser by name."""
    choices = (action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {name: command for found in choices for name, command in found.items()}


def commands_page() -> str:
    """The page of the command line: the help of each command."""
    from mmspec.app.cli.main import build_parser

    top = build_parser()
    parts = ["# Command line\n", f"```text\n{top.format_help()}```\n"]
    for name, command in sub_commands(top).items():
        parts += [f"## mmspec {name}\n", f"```text\n{command.format_help()}```\n"]
    return "\n".join(parts)


def linked_files(page: Path) -> Iterator[Path]:
    """Files of the repository that a page links to : pages, scripts, result files."""
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        file = (page.parent / target).resolve()
        if not re.match(r"[a-z]+:", target) and file.is_file() and file.is_relative_to(ROOT):
            yield file


def without_dead_links(page: Path) -> str:
    """The text of a page about former states of the tree, which is not edited: what it links to may be gone."""

    def link(found: re.Match[str]) -> str:
        target = found[2]
        return found[0] if re.match(r"[a-z]+:", target) or (page.parent / target).exists() else found[1]

    return re.sub(r"\[([^\]]*)\]\(([^)\s#]+)[^)]*\)", link, page.read_text(encoding="utf-8"))


def lay_out(pages: Path) -> None:
    """Copy and generate all pages into an empty folder."""
    shutil.rmtree(pages, ignore_errors=True)
    pages.mkdir(parents=True)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, pages / name, ignore=shutil.ignore_patterns("site", "__pycache__", "*.py"))
    for name in FILES:
        shutil.copy(ROOT / name, pages / name)
    for page in list(pages.rglob("*.md")):
        for file in linked_files(ROOT / page.relative_to(pages)):
            target = pages / file.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                shutil.copy(file, target)
    (pages / FROZEN).write_text(without_dead_links(ROOT / FROZEN), encoding="utf-8")
    (pages / "reference").mkdir()
    (pages / "reference" / "python.md").write_text(python_page(), encoding="utf-8")
    (pages / "reference" / "commands.md").write_text(commands_page(), encoding="utf-8")


def main() -> int:
    """Build the site; returns the exit code of MkDocs."""
    lay_out(PAGES)
    sys.path.append(str(ROOT / "tests"))
    from typecheck import link_tree

    link_tree()  # where mkdocstrings reads the sources under the names that they are imported by
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(Path(sys.argv[1]).resolve())]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
