"""The types of the values of `mmspec caption`'s options, for argparse and files of options."""

from __future__ import annotations

import argparse
import json
from typing import Any

from mmspec.app.cli.arguments import real_number
from mmspec.app.io.text import find_fault, read_text
from mmspec.app.modeling.prompt_format import RESERVED

MAX_LINES_BYTES = 1 << 20
"""Size of a file of prompts or words."""
MAX_LINES = 1000


def read_prompts(path: str) -> tuple[str, ...]:
    """The lines of a file of prompts.

    Raises:
        argparse.ArgumentTypeError: it cannot be read, is too large, or has an empty or a repeated line.
    """
    return _read_lines(path, "a prompt", ": --num-captions asks again")


def read_words(path: str) -> tuple[str, ...]:
    """The lines of a file of words; errors as of `read_prompts`."""
    return _read_lines(path, "a word", "")


def _read_lines(path: str, what: str, advice: str) -> tuple[str, ...]:
    try:
        lines = read_text(path, MAX_LINES_BYTES).splitlines()
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}: name a file with {what} a line") from error
    if not 1 <= len(lines) <= MAX_LINES:
        raise argparse.ArgumentTypeError(f"{path} must have 1 to {MAX_LINES} lines, {what} each; got {len(lines)}")
    first: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise argparse.ArgumentTypeError(f"{path} line {number} is empty: each line is {what}")
        if fault := find_fault(line):
            raise argparse.ArgumentTypeError(f"{path} line {number} {fault}")
        if line in first:
            raise argparse.ArgumentTypeError(f"{path} line {number} is that of line {first[line]}{advice}")
        first[line] = number
    return tuple(lines)


def parse_template_kwargs(text: str) -> dict[str, Any]:
    """A JSON object of variables of a chat template."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(
            f"must be a JSON object, as in '{{\"enable_thinking\": false}}', got {text!r:.80}"
        )
    if taken := sorted(RESERVED & found.keys()):
        raise argparse.ArgumentTypeError(
            f"cannot set {', '.join(taken)}: mmspec sets it; name variables of the template"
        )
    return found


parse_top_p = real_number("a probability above 0 and at most 1", lambda value: 0 < value <= 1)
parse_penalty = real_number("a factor above 0, as in 1.1", lambda value: value > 0)
parse_fps = real_number("frames per second, a number above 0", lambda value: value > 0)


def parse_shard(text: str) -> tuple[int, int]:
    """ "1/4": the second of four."""
    first, _, count = text.partition("/")
    if not (first.isdecimal() and count.isdecimal() and int(first) < int(count)):
        raise argparse.ArgumentTypeError(f"must be I/N with I from 0 to N-1, as in 0/4, got {text!r}")
    return int(first), int(count)


def parse_compare(text: str) -> int:
    """A number of files; "all" is -1, every one."""
    if text == "all":
        return -1
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"takes a number, got {text!r} (put paths before it, or write --compare all)")
    return int(text)
