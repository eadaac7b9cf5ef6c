"""Answers of models that think first: the thoughts are no part of a caption."""

from __future__ import annotations

import re
from typing import NamedTuple

TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("◁think▷", "◁/think▷"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
)
"""Texts before and after thoughts: Qwen3 and GLM, others, Kimi-VL, Mistral, Gemma 4. Often no special tokens."""


class Answer(NamedTuple):
    """An output without its thoughts.

    Attributes:
        text: what is outside of them.
        has_thoughts: whether there were any.
        is_cut: the output ended within one.
    """

    text: str
    has_thoughts: bool
    is_cut: bool


def opens_thoughts(prompt_end: str) -> bool:
    """Whether a prompt, of which the end is given with special tokens, lets the answer begin within thoughts."""
    return any(prompt_end.rstrip().endswith(start) for start, _ in TAGS)


def without_thoughts(text: str, begins_inside: bool = False) -> Answer:
    """The answer in an output, given with special tokens.

    Args:
        begins_inside: as `opens_thoughts` says of the prompt.
    """
    found = False
    for start, end in TAGS:
        before_end, has_end, _ = text.partition(end)
        if has_end and start not in before_end:  # opened by the prompt
            text = start + text
            begins_inside = False
        if start in text:
            found = True
            text = re.sub(f"{re.escape(start)}.*?{re.escape(end)}", "", text, flags=re.DOTALL)
            if start in text:
                return Answer(text.partition(start)[0], True, True)
    return Answer("", True, True) if begins_inside and not found else Answer(text, found, False)
