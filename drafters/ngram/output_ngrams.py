"""An n-gram model of all outputs so far, and its combination with the distributions of instant heads.

In a job the outputs resemble each other: what followed the last tokens in an earlier output often follows them again
(SuffixDecoding, arXiv 2411.04975, keeps the outputs in a suffix tree; here they are counts, which need bounded memory).
Instant heads depend on the picture and not on the drafted tokens, an n-gram model the other way round; the product of
both, raised to a power, is better than either. The module knows neither the target nor how heads are learned.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmspec.drafters.ngram.base import Candidate, Key, PromptText
from mmspec.interfaces import VerifyResult

MAX_CONTEXT = 3
"""Tokens before the predicted one that are counted: n-grams of up to four tokens."""
MAX_CONTEXTS = 1 << 17
"""Distinct contexts in memory; beyond, those that were seen once are dropped, then the older half."""
MAX_SUCCESSORS = 24
"""Successors of a context; beyond, those that were seen least are dropped."""
MIN_CANDIDATE_PROB = 0.02
"""Less likely successors are not proposed."""
HEAD_POWER, NGRAM_POWER = 0.6, 0.6
"""Exponents of both distributions in their product."""
NUM_BUCKETS = 12
"""Probabilities are calibrated in so many classes."""

SlotProbs = Mapping[int, tuple[float, float]]
"""Of the likeliest tokens of one position: the head's probability to the power of `HEAD_POWER`, and this times the
token's overall frequency to the power of `NGRAM_POWER`."""
MIN_UNSEEN_PROB = 0.05
"""Shorter contexts are not consulted for less than this probability."""


class NgramCounts:
    """How often tokens followed the up to `MAX_CONTEXT` tokens before them. Shared by threads; bounded memory."""

    def __init__(self) -> None:
        self._successors: dict[tuple[int, ...], dict[int, int]] = {}
        self._lock = threading.Lock()

    @property
    def num_contexts(self) -> int:
        """Distinct contexts in memory."""
        return len(self._successors)

    def add(self, context: tuple[int, ...], tokens: Sequence[int]) -> None:
        """Count tokens that followed a context."""
        history = (*context, *tokens)
        with self._lock:
            for end in range(len(context), len(history)):
                token = history[end]
                for start in range(max(0, end - MAX_CONTEXT), end):
                    counts = self._successors.setdefault(history[start:end], {})
                    counts[token] = counts.get(token, 0) + 1
                    if len(counts) > MAX_SUCCESSORS:
                        frequent = sorted(counts.items(), key=lambda item: -item[1])[: MAX_SUCCESSORS // 2]
                        self._successors[history[start:end]] = dict(frequent)
            if len(self._successors) > MAX_CONTEXTS:
                self._prune()

    def _prune(self) -> None:
        entries = [item for item in self._successors.items() if sum(item[1].values()) > 1]
        self._successors = dict(entries[max(0, len(entries) - MAX_CONTEXTS // 2) :])

    def probs(self, context: tuple[int, ...]) -> tuple[dict[int, float], float]:
        """Witten-Bell estimates of the tokens after a context, and the probability of all others together.

        Each shorter context gets d / (n + d) of the probability, where the longer one occurred n times with d
        distinct successors.
        """
        probs: dict[int, float] = {}
        rest = 1.0
        with self._lock:
            for start in range(len(context)):
                counts = self._successors.get(context[start:])
                if counts:
                    distinct = len(counts)
                    scale = rest / (sum(counts.values()) + distinct)
                    if probs:
                        for token, count in counts.items():
                            probs[token] = probs.get(token, 0.0) + scale * count
                    else:
                        probs = {token: scale * count for token, count in counts.items()}
                    rest = scale * distinct
                    if rest < MIN_UNSEEN_PROB:
                        break
        return probs, rest

    def __deepcopy__(self, memo: dict[int, Any]) -> NgramCounts:
        copied = NgramCounts()
        with self._lock:
            copied._successors = {context: dict(counts) for context, counts in self._successors.items()}
        return copied


@dataclass
class OutputState:
    """State of one call.

    Attributes:
        contexts: the last tokens of each row.
        slots: of each row the distributions of the next positions by instant heads; None without.
        records: whether the call's output is counted.
    """

    contexts: list[tuple[int, ...]]
    slots: list[list[SlotProbs]] | None = None
    records: bool = False


OutputCursor = tuple[tuple[int, ...], int | None, int, Sequence[SlotProbs]]
"""A node: the tokens before it, its own (None at the root, where it is one of these), its depth, and the distributions
of the heads at its row."""

_KEYS: tuple[tuple[Key, ...], ...] = tuple(
    tuple(("output", has_head, bucket) for bucket in range(NUM_BUCKETS + 1)) for has_head in (False, True)
)


class OutputNgrams:
    """A `CandidateSource` over `NgramCounts` and, where they are given (`OutputState.slots`), instant heads."""

    top_k = 0
    vocab_size: int | None = None
    priors: Mapping[Key, float] = {
        key: 0.9 * min(0.98, (bucket + 0.5) / NUM_BUCKETS) for keys in _KEYS for bucket, key in enumerate(keys)
    }

    def __init__(self) -> None:
        self.counts = NgramCounts()

    def start(self, prompt_text: PromptText) -> OutputState:
        """Begin after the prompts."""
        return OutputState([tuple(row[-MAX_CONTEXT:]) for row in prompt_text.rows])

    def cursor(self, state: OutputState, row: int) -> OutputCursor:
        """The row's last tokens."""
        return state.contexts[row], None, 0, () if state.slots is None else state.slots[row]

    def expand(self, cursor: OutputCursor) -> list[Candidate]:
        """The likely next tokens."""
        context, last, depth, slots = cursor
        if last is not None:
            context = (*context[1 - MAX_CONTEXT :], last)
        probs, rest = self.counts.probs(context)
        has_head = depth < len(slots)
        if has_head:
            probs = _combine(probs, rest, slots[depth])
        keys, depth = _KEYS[has_head], depth + 1
        return [
            (token, keys[int(prob * NUM_BUCKETS)], (context, token, depth, slots))
            for token, prob in probs.items()
            if prob >= MIN_CANDIDATE_PROB
        ]

    def enter(self, token: int) -> OutputCursor:
        """A node of another source, of which only the token is known."""
        return (), token, 0, ()

    def update(self, state: OutputState, result: VerifyResult) -> None:
        """Follow the emitted tokens, and count them if the call is learned from."""
        for row, emitted in enumerate(result.emitted_ids):
            if emitted:
                context = state.contexts[row]
                if state.records:
                    self.counts.add(context, emitted)
                state.contexts[row] = (*context, *emitted)[-MAX_CONTEXT:]
        state.slots = None


def _combine(probs: Mapping[int, float], rest: float, slot: SlotProbs) -> dict[int, float]:
    """The normalised product of the distributions of n-grams and of a head, over the tokens that either names."""
    unseen = rest**NGRAM_POWER
    products = {
        token: power * probs[token] ** NGRAM_POWER if token in probs else times_frequency * unseen
        for token, (power, times_frequency) in slot.items()
    }
    others = min(slot.values())[0]
    products.update((token, others * prob**NGRAM_POWER) for token, prob in probs.items() if token not in slot)
    scale = 1 / max(1e-30, sum(products.values()))
    return {token: product * scale for token, product in products.items()}


__all__ = ["HEAD_POWER", "NGRAM_POWER", "NgramCounts", "OutputNgrams", "OutputState", "SlotProbs"]
