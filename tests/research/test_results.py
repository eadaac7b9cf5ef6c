"""The files of research/results: each is made by a command of the page, which parses; the table is its file's."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mmspec.app.cli.main import build_parser
from research import readme_tables
from research.bench.overview import HEADS, OVERVIEW

pytestmark = pytest.mark.research

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "research" / "results" / "README.md"
PROGRAMS = ("mmspec", "python", "pytest")


class ParsedError(Exception):
    """The command line was accepted."""


def page_commands() -> Iterator[list[str]]:
    """The command lines of the page, in blocks and in backticks, without variables of the environment."""
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^ {4}(\S(?:.*\\\n)*.*)$", text, re.MULTILINE)
    inline = re.findall(r"`((?:\w+=\w+ )*(?:mmspec|python|pytest) [^`]+)`", text)
    for line in dict.fromkeys(one.replace("\\\n", " ") for one in (*blocks, *inline)):
        words = shlex.split(line)
        while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words.pop(0)
        was_named = words[:2] == ["mmspec", "bench"]  # by the provenance of a file that was written before
        if words[0] in PROGRAMS and len(words) > 2 + (words[1] == "-m") and not was_named:
            yield words


COMMANDS = list(page_commands())


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words)[:70])
def test_every_command_of_the_page_parses(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    program, *arguments = words
    if program == "mmspec":
        build_parser().parse_args(arguments)
        return
    if program == "pytest" or arguments[:2] == ["-m", "pytest"]:
        files = [word for word in arguments if word.endswith(".py")]
        assert files and all((ROOT / file).is_file() for file in files)
        return
    if arguments[0] == "-m":
        name, rest = arguments[1], arguments[2:]
    else:
        assert (ROOT / arguments[0]).is_file()
        name, rest = Path(arguments[0]).stem, arguments[1:]
    original = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, *args: Any, **options: Any) -> Any:
        original(self, *args, **options)
        raise ParsedError

    module = importlib.import_module("research.bench.command" if name == "research.bench" else name)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(sys, "argv", [name, *rest])
    with pytest.raises(ParsedError):
        module.main()


def test_every_result_file_is_written_by_a_command_of_the_page() -> None:
    written = {Path(words[words.index("--json") + 1]).name for words in COMMANDS if "--json" in words}
    files = {file.name for file in PAGE.parent.glob("*.json")}
    assert files and files <= written, f"no command writes {sorted(files - written)}"


@pytest.mark.parametrize("name", readme_tables.TABLES)
def test_the_tables_are_those_of_the_files(name: str) -> None:
    block = readme_tables.find_block(PAGE, name)
    assert block == readme_tables.expected_block(name), "python -m research.readme_tables writes it"
    assert re.search(r"\d{4}-\d\d-\d\d, commit [0-9a-f]{7}", block)


def test_the_speed_table_has_all_parts() -> None:
    block = readme_tables.find_block(PAGE, "speed.json")
    assert f"| {' | '.join(HEADS)} |" in block and all(f"| {one.title} |" in block for one in OVERVIEW)
    assert "bench --overview" in block
