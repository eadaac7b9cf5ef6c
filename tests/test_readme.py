"""The README is short, its quickstart runs, its commands parse; the docs stay readable in an afternoon."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from mmspec.app.cli.main import build_parser

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
MAX_WORDS = 25_000


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) <= 100


def test_the_quickstart_without_a_download_runs(capsys: Any) -> None:
    exec(compile(BLOCKS[0], "README.md", "exec"), {"__name__": "quickstart"})
    printed = capsys.readouterr().out
    assert "A big lizard sits at the top" in printed and "tau" in printed


def test_what_is_not_run_says_so_and_compiles() -> None:
    assert len(BLOCKS) == 2
    assert "not run by the tests" in BLOCKS[1] and compile(BLOCKS[1], "README.md", "exec")


def test_its_commands_parse() -> None:
    commands = re.findall(r"^ {4}mmspec (.*)$", TEXT, re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        build_parser().parse_args(shlex.split(command, comments=True))


def test_figures_are_those_of_the_results() -> None:
    """Every interval of the table stands in research/results, so does what `x llama.cpp` is the ratio of."""
    results = (ROOT / "research" / "results" / "README.md").read_text(encoding="utf-8")
    rows = [line for line in TEXT.splitlines() if line.startswith("|") and re.search(r"\[\d", line)]
    assert 1 <= len(rows) <= 5
    for row in rows:
        (interval,) = re.findall(r"\[\d[^]]*\]", row)
        drafter = re.search(r"`\w+`", row)
        assert drafter is not None
        assert [line for line in results.splitlines() if drafter[0] in line and interval in line], row


def test_the_docs_are_not_too_long() -> None:
    assert (
        sum(len(page.read_text(encoding="utf-8").split()) for page in (ROOT / "docs").glob("*.md")) < MAX_WORDS
    )  # as `wc -w` counts
