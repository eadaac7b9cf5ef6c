"""The tables "input -> what happens" of docs/jobs.md: each line is a test, which names it with `@line`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent.parent
F = TypeVar("F", bound=Callable[..., Any])


def line(*inputs: str) -> Callable[[F], F]:
    """Says which lines of the tables a test checks, by their first column."""
    assert inputs
    return lambda test: test


def documented() -> list[str]:
    """The first column of the tables."""
    text = (ROOT / "docs" / "jobs.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| input \| what happens \|\n\|---\|---\|\n(.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    return [re.split(r"(?<!\\) \| ", row)[0].removeprefix("| ") for table in tables for row in table.splitlines()]


def tested() -> set[str]:
    """The lines that tests name."""
    found: set[str] = set()
    for file in (ROOT / "tests").glob("*/test_*.py"):
        for call in re.findall(r"^@line\((.*?)\)$", file.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            found |= set(re.findall(r'"((?:[^"\\]|\\.)*)"', call))
    return found


__all__ = ["documented", "line", "tested"]
