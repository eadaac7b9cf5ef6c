"""Accepted draft tokens by class of word, with bootstrap intervals over requests.

An accepted draft token costs no target forward of its own. Words in capitals are text on signs. Depends on no drafter
and no command.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from mmspec.app.scenes.world import BACKGROUND_COLOURS, BACKGROUND_TEXTURES, SIZE_CLASSES
from mmspec.app.ui.rounds import CORRECTED, DRAFTED, Round
from research.bench.measure import bootstrap_interval
from research.scenes.names import KIND_BY_NAME

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
_FUNCTION_WORDS = """
a an the and of to from in on at with before against beside front it is are there that where all other no does not
"""
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())
"""The function words of the grammar."""
CLASSES = ("names", "positions", "attributes", "function", "other")


def classify_word(word: str) -> str:
    """The class of a word."""
    low = word.lower()
    if len(word) > 1 and word.isupper():
        return "other"
    if low in KIND_BY_NAME:
        return "names"
    if low in POSITION_WORDS:
        return "positions"
    if low in ATTRIBUTE_WORDS:
        return "attributes"
    return "function" if low in FUNCTION_WORDS else "other"


def word_class_per_token(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """The class of the word that each token belongs to; a word may be several tokens."""
    classes: list[str] = []
    ends: list[int] = []
    text = ""
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
        total: tokens per class. accepted: of them, accepted draft tokens. corrected: tokens after a rejected draft.
    """

    tokens: int
    forwards: int
    total: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    accepted: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    corrected: dict[str, int] = field(default_factory=lambda: defaultdict(int))


def count_answer(rounds: Sequence[Round], tokenizer: PreTrainedTokenizerBase, eos_ids: Sequence[int]) -> AnswerCounts:
    """Count one answer from its rounds, the first of which is the prefill's; end tokens belong to no class."""
    classes = word_class_per_token(tokenizer, [token for one in rounds for token in one.emitted])
    later = [one for one in rounds[1:] if one.emitted]
    counts = AnswerCounts(sum(len(one.emitted) for one in later), len(later))
    position = len(rounds[0].emitted)
    for one in later:
        for token, kind in zip(one.emitted, one.token_kinds, strict=True):
            if token not in eos_ids:
                counts.total[classes[position]] += 1
                counts.accepted[classes[position]] += kind == DRAFTED
                counts.corrected[classes[position]] += kind == CORRECTED
            position += 1
    return counts


Metric: TypeAlias = Callable[[Sequence[AnswerCounts]], float]


def _sum(answers: Sequence[AnswerCounts], what: str, kind: str) -> int:
    return sum(getattr(answer, what).get(kind, 0) for answer in answers)


def _tau(answers: Sequence[AnswerCounts]) -> float:
    return sum(answer.tokens for answer in answers) / max(1, sum(answer.forwards for answer in answers))


def _share(kind: str) -> Metric:
    """Accepted draft tokens among all of a class."""
    return lambda answers: _sum(answers, "accepted", kind) / max(1, _sum(answers, "total", kind))


def _accepted(kind: str) -> Metric:
    """Accepted draft tokens among those of a class for which something was drafted."""

    def value(answers: Sequence[AnswerCounts]) -> float:
        accepted = _sum(answers, "accepted", kind)
        return accepted / max(1, accepted + _sum(answers, "corrected", kind))

    return value


def _tau_of(kind: str) -> Metric:
    """Tokens of a class for each forward that one of them cost."""

    def value(answers: Sequence[AnswerCounts]) -> float:
        total = _sum(answers, "total", kind)
        return total / max(1, total - _sum(answers, "accepted", kind))

    return value


METRICS: dict[str, Metric] = {
    "tau": _tau,
    **{kind: _share(kind) for kind in CLASSES},
    **{f"{kind}_accepted": _accepted(kind) for kind in CLASSES},
    **{f"{kind}_tau": _tau_of(kind) for kind in CLASSES},
}
"""Metrics of answers: tau, and per class the accepted share, the acceptance rate and tau."""


def metric_interval(
    answers: Sequence[AnswerCounts], name: str, over: Sequence[AnswerCounts] | None = None
) -> tuple[float, float, float]:
    """(value, low, high) of one of `METRICS`, 95% over requests.

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
    """(value, low, high) of the ratio to other answers to the same requests, request paired with request.

    1 if theirs is 0: tau is 0 only if every answer is a single token.
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
