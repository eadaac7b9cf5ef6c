"""Relative links and file paths in the documentation refer to files of the repository."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / name
    for name in (
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "CODE_OF_CONDUCT.md",
        "examples/README.md",
        "research/README.md",
        "research/benchmarking.md",
    )
] + sorted((ROOT / "docs").glob("*.md"))
"""Not the log and CHANGELOG.md: they describe former states of the tree."""

FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
FILE_PATH = re.compile(r"(?:[\w.-]+/)+[\w.-]*\.(?:py|md|toml|json|yml|yaml|txt|jinja|sh|png|mp4|cpp|html|js|css)")
PATH_ROOTS = ("app", "docs", "drafters", "examples", "mmspec", "research", "tests", "vision", ".github")
"""Python files and paths into these folders are checked; other paths in backticks name files of the reader."""


def relative_links(text: str) -> Iterator[str]:
    """Yield the targets of Markdown links without anchors, except URLs and links within the document."""
    for match in LINK.finditer(FENCE.sub("", text)):
        target = (match[1] or match[2]).split("#")[0]
        if target and not re.match(r"[a-z][a-z0-9+.-]*:", target):
            yield target


def code_paths(text: str) -> Iterator[str]:
    """Yield the file paths in inline code that must exist; of `path::name` and `path:line` the path."""
    for match in CODE.finditer(FENCE.sub("", text)):
        path = match[1].split(":")[0].strip()
        if FILE_PATH.fullmatch(path) and (path.endswith(".py") or path.split("/")[0] in PATH_ROOTS):
            yield path


def read_document(document: Path) -> str:
    """Return the text of a document; a missing one is a failure."""
    assert document.is_file(), f"{document.relative_to(ROOT)} is missing"
    return document.read_text(encoding="utf-8")


def resolves(path: str, document: Path) -> bool:
    """Whether a path exists below the root, `mmspec/` or the document's folder; `mmspec/app` also means `app`."""
    candidates = [ROOT / path, ROOT / "mmspec" / path, document.parent / path]
    if path.startswith("mmspec/"):
        candidates.append(ROOT / path.removeprefix("mmspec/"))
    return any(candidate.exists() for candidate in candidates)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_resolve(document: Path) -> None:
    text = read_document(document)
    missing = [link for link in relative_links(text) if not (document.parent / link).exists()]
    assert not missing, f"{document.relative_to(ROOT)} links to missing files: {missing}"


def headings(document: Path) -> set[str]:
    """The anchors of a document, as GitHub and MkDocs make them of its headings."""
    lines = re.findall(r"^#+ (.*)$", FENCE.sub("", read_document(document)), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", line.lower()).strip().replace(" ", "-") for line in lines}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_anchors_of_links_are_headings(document: Path) -> None:
    text = FENCE.sub("", read_document(document))
    found = re.findall(r"\]\(([^)\s#:]*)#([^)\s]+)\)", text)
    pages = [(document.parent / name if name else document, name, anchor) for name, anchor in found]
    missing = [f"{name}#{anchor}" for page, name, anchor in pages if anchor not in headings(page)]
    assert not missing, f"{document.relative_to(ROOT)} links to missing headings: {missing}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_file_paths_in_backticks_exist(document: Path) -> None:
    text = read_document(document)
    missing = [path for path in code_paths(text) if not resolves(path, document)]
    assert not missing, f"{document.relative_to(ROOT)} names missing files: {missing}"


def test_the_map_names_every_folder() -> None:
    """That of CONTRIBUTING.md, in which a line is a folder, and `name/` after it one below."""
    lines = read_document(ROOT / "CONTRIBUTING.md").partition("## Map")[2].split("```")[1].strip().splitlines()
    named, top = set(), ""
    for line in lines:
        indent, first, rest = re.fullmatch(r"( *)(?:(\w+)/)? *(.*)", line).groups()  # type: ignore[union-attr]
        top = first if first and not indent else top
        named |= {f"{top}/{first}"} if first and indent else {top}
        named |= {f"{top}/{name}" for name in re.findall(r"\b(\w+)/(?!\w)", rest)}
    missing = [name for name in named if not (ROOT / name).is_dir()]
    packages = {f"mmspec/{file.parent.name}" for file in (ROOT / "mmspec").glob("*/__init__.py")}
    assert not missing and packages <= named and len(lines) <= 25


@pytest.mark.parametrize("folder", ["docs/images", "research/results"])
def test_every_image_and_result_is_named_by_a_document(folder: str) -> None:
    files = {file.name for file in (ROOT / folder).iterdir()} - {"README.md"}
    documents = [*DOCUMENTS, ROOT / "research" / "results" / "README.md"]
    text = "\n".join(read_document(document) for document in documents)
    assert files and not {name for name in files if name not in text} and len(files) <= 15


def test_extraction_of_links_and_paths() -> None:
    text = "[a](b/c.md#top) ![i](<d.png>) [u](https://x.org/y.md) [here](#s)\n[r]: e.md\n```\n[no](f.md)\n```\n"
    assert list(relative_links(text)) == ["b/c.md", "d.png", "e.md"]
    code = "`app/x.py` `tests/t.py::test_a` `mmspec/y.py:12` `out/z.jsonl` `folder/own.json` `a / b`"
    assert list(code_paths(code)) == ["app/x.py", "tests/t.py", "mmspec/y.py"]


def reading_steps() -> Iterator[tuple[Path, list[str]]]:
    """Yield each file of the routes through the code, and the names that are to be read in it."""
    text = read_document(ROOT / "docs" / "how-it-works.md").partition("## To read the code")[2]
    for step in re.split(r"\n\n|\n(?=\d+\. )", text):
        spans = CODE.findall(step)
        places = [index for index, span in enumerate(spans) if re.search(r"/.*\.(py|c|h)$", span)]
        for begin, end in pairwise([*places, len(spans)]):
            names = [name for span in spans[begin + 1 : end] for name in span.split(".")]
            yield ROOT / spans[begin], [name for name in names if name.isidentifier()]


def test_the_routes_name_what_is_in_their_files() -> None:
    steps = list(reading_steps())
    assert len(steps) >= 25
    for file, names in steps:
        source = file.read_text(encoding="utf-8")
        missing = [name for name in names if not re.search(rf"\b{name}\b", source)]
        assert not missing, f"{file.relative_to(ROOT)} has no {missing}"
