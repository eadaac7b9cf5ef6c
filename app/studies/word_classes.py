"""Accepted draft tokens by class of word, with bootstrap intervals over requests.

A token counts as guessed if it was drafted and accepted, so that it cost no target forward of its own. Words in
capitals are text on signs. Depends on no drafter and no command.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmspec.app.bench.measure import bootstrap_interval
from mmspec.app.bench.rounds import ACCEPTED, CORRECTED, Round
from mmspec.app.scenes.objects import KIND_BY_NAME
from mmspec.app.scenes.world import BACKGROUND_COLOURS, BACKGROUND_TEXTURES, SIZE_CLASSES

POSITION_WORDS = frozenset(("upper", "lower", "left", "right", "top", "bottom", "center", "above", "below"))
ATTRIBUTE_WORDS = frozenset(
    (
        *BACKGROUND_COLOURS,
        *BACKGROUND_TEXTURES,
        *SIZE_CLASSES,
        "little",
        "middling",
        "big",
        "largest",
        "smallest",
        "larger",
        "smaller",
    )
)
_JOINING = """
a an the and of to from in on at with before against beside front it is are there that where all other no does not
"""
FUNCTION_WORDS = frozenset(_JOINING.split())
"""Of the grammar's words, those that only join others."""
CLASSES = ("names", "places", "looks", "function", "other")


def classify_word(word: str) -> str:
    """The class of a word."""
    low = word.lower()
    if len(word) > 1 and word.isupper():
        return "other"
    if low in KIND_BY_NAME:
        return "names"
    if low in POSITION_WORDS:
        return "places"
    if low in ATTRIBUTE_WORDS:
        return "looks"
    return "function" if low in FUNCTION_WORDS else "other"


def word_class_per_token(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The class of the word that each token belongs to; a word may be several tokens."""
    classes, text = [], ""
    ends = []
    for number in range(len(ids)):
        text = tokenizer.decode(ids[: number + 1])
        ends.append(len(text))
    words = [(m.start(), m.end(), classify_word(m.group())) for m in re.finditer(r"[A-Za-z]+", text)]
    start = 0
    for end in ends:
        inside = [kind for first, last, kind in words if first < end and last > start]
        classes.append(inside[0] if inside else "other")
        start = end
    return classes


@dataclass
class AnswerCounts:
    """Counts of one answer: tokens after the first, target forwards after the prefill.

    Attributes:
        total: tokens per class. guessed: accepted drafts per class. corrected: tokens emitted after a rejected draft.
    """

    tokens: int
    forwards: int
    total: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    guessed: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    corrected: dict[str, int] = field(default_factory=lambda: defaultdict(int))


def count_answer(rounds: Sequence[Round], tokenizer: Any, ends: Sequence[int]) -> AnswerCounts:
    """Count one answer from its rounds, the first of which is the prompt's; end tokens belong to no class."""
    classes = word_class_per_token(tokenizer, [token for one in rounds for token in one.emitted])
    later = [one for one in rounds[1:] if one.emitted]
    made, place = AnswerCounts(sum(len(one.emitted) for one in later), len(later)), len(rounds[0].emitted)
    for one in later:
        for token, how in zip(one.emitted, one.token_kinds, strict=True):
            if token not in ends:
                made.total[classes[place]] += 1
                made.guessed[classes[place]] += how == ACCEPTED
                made.corrected[classes[place]] += how == CORRECTED
            place += 1
    return made


Value = Callable[[Sequence[AnswerCounts]], float]


def _sum(answers: Sequence[AnswerCounts], what: str, kind: str) -> int:
    return sum(getattr(answer, what).get(kind, 0) for answer in answers)


def _tau(answers: Sequence[AnswerCounts]) -> float:
    return sum(answer.tokens for answer in answers) / max(1, sum(answer.forwards for answer in answers))


def _share(kind: str) -> Value:
    """Guessed tokens among all of a class."""
    return lambda answers: _sum(answers, "guessed", kind) / max(1, _sum(answers, "total", kind))


def _accepted(kind: str) -> Value:
    """Guessed tokens among those of a class where something was guessed."""

    def value(answers: Sequence[AnswerCounts]) -> float:
        kept = _sum(answers, "guessed", kind)
        return kept / max(1, kept + _sum(answers, "corrected", kind))

    return value


def _tau_of(kind: str) -> Value:
    """Tokens of a class for each forward that one of them cost."""

    def value(answers: Sequence[AnswerCounts]) -> float:
        total = _sum(answers, "total", kind)
        return total / max(1, total - _sum(answers, "guessed", kind))

    return value


METRICS: dict[str, Value] = {
    "tau": _tau,
    **{kind: _share(kind) for kind in CLASSES},
    **{f"{kind}_accepted": _accepted(kind) for kind in CLASSES},
    **{f"{kind}_tau": _tau_of(kind) for kind in CLASSES},
}
"""Metrics of answers: tau, and per class the guessed share, the acceptance rate and tau."""


def metric_interval(
    answers: Sequence[AnswerCounts], name: str, over: Sequence[AnswerCounts] | None = None
) -> tuple[float, float, float]:
    """(value, low, high) of one of `VALUES`, 95% over requests.

    Args:
        over: answers to the same requests; the difference to theirs, paired by request.
    """
    value = METRICS[name]

    def resampled(indices: Sequence[int]) -> float:
        mine = value([answers[index] for index in indices])
        return mine if over is None else mine - value([over[index] for index in indices])

    return bootstrap_interval(resampled, len(answers))


def metric_ratio_interval(
    answers: Sequence[AnswerCounts], name: str, of: Sequence[AnswerCounts]
) -> tuple[float, float, float]:
    """(value, low, high): how many times the value of other answers to the same requests, request paired with request.

    1 where theirs is 0, which of tau it is only if there was nothing to guess.
    """
    value = METRICS[name]

    def resampled(indices: Sequence[int]) -> float:
        theirs = value([of[index] for index in indices])
        return value([answers[index] for index in indices]) / theirs if theirs else 1.0

    return bootstrap_interval(resampled, len(answers))


__all__ = [
    "CLASSES",
    "METRICS",
    "AnswerCounts",
    "classify_word",
    "count_answer",
    "metric_interval",
    "metric_ratio_interval",
    "word_class_per_token",
]
