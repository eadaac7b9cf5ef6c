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
MAX_SUCCESSORS = 32
"""Successors of a context; beyond, those that were seen least are dropped."""
MIN_CANDIDATE_PROB = 0.02
"""Less likely successors are not proposed."""
HEAD_POWER, NGRAM_POWER = 0.6, 0.6
"""Exponents of both distributions in their product."""
NUM_BUCKETS = 12
"""Probabilities are calibrated in so many classes."""

SlotProbs = Mapping[int, float]
"""Probabilities of the likeliest tokens of one position, raised to `HEAD_POWER`; the smallest is that of all others."""


class NgramCounts:
    """How often tokens followed the up to `MAX_CONTEXT` tokens before them. Shared by threads; bounded memory."""

    def __init__(self) -> None:
        self._successors: dict[tuple[int, ...], dict[int, int]] = {}
        self._unigrams: dict[int, int] = {}
        self._num_tokens = 0
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
                self._unigrams[token] = self._unigrams.get(token, 0) + 1
                for start in range(max(0, end - MAX_CONTEXT), end):
                    counts = self._successors.setdefault(history[start:end], {})
                    counts[token] = counts.get(token, 0) + 1
                    if len(counts) > MAX_SUCCESSORS:
                        kept = sorted(counts.items(), key=lambda item: -item[1])[: MAX_SUCCESSORS // 2]
                        self._successors[history[start:end]] = dict(kept)
            self._num_tokens += len(tokens)
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
                if not counts:
                    continue
                scale = rest / (sum(counts.values()) + len(counts))
                for token, count in counts.items():
                    probs[token] = probs.get(token, 0.0) + scale * count
                rest = scale * len(counts)
                if rest < MIN_CANDIDATE_PROB:
                    break
        return probs, rest

    def unigram_prob(self, token: int) -> float:
        """Share of a token among all, with half a count more for each."""
        return (self._unigrams.get(token, 0) + 0.5) / (self._num_tokens + 1)

    def __deepcopy__(self, memo: dict[int, Any]) -> NgramCounts:
        copied = NgramCounts()
        with self._lock:
            copied._successors = {context: dict(counts) for context, counts in self._successors.items()}
            copied._unigrams, copied._num_tokens = dict(self._unigrams), self._num_tokens
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


@dataclass(frozen=True, slots=True)
class OutputCursor:
    """A node: the tokens before its children, its depth, and the distributions of the heads at its row."""

    context: tuple[int, ...]
    depth: int = 0
    slots: Sequence[SlotProbs] = ()


def _key(has_head: bool, prob: float) -> Key:
    return ("output", has_head, min(NUM_BUCKETS - 1, int(prob * NUM_BUCKETS)))


class OutputNgrams:
    """A `CandidateSource` over `NgramCounts` and, where they are given (`OutputState.slots`), instant heads."""

    top_k = 0
    vocab_size: int | None = None
    priors: Mapping[Key, float] = {
        _key(has_head, (bucket + 0.5) / NUM_BUCKETS): 0.9 * (bucket + 0.5) / NUM_BUCKETS
        for bucket in range(NUM_BUCKETS)
        for has_head in (False, True)
    }

    def __init__(self) -> None:
        self.counts = NgramCounts()

    def start(self, prompt_text: PromptText) -> OutputState:
        """Begin after the prompts."""
        return OutputState([tuple(row[-MAX_CONTEXT:]) for row in prompt_text.rows])

    def cursor(self, state: OutputState, row: int) -> OutputCursor:
        """The row's last tokens."""
        return OutputCursor(state.contexts[row], 0, () if state.slots is None else state.slots[row])

    def expand(self, cursor: OutputCursor) -> list[Candidate]:
        """The likely next tokens."""
        probs, rest = self.counts.probs(cursor.context)
        has_head = cursor.depth < len(cursor.slots)
        if has_head:
            probs = self._combine(probs, rest, cursor.slots[cursor.depth])
        tail, depth, slots = cursor.context[1 - MAX_CONTEXT :], cursor.depth + 1, cursor.slots
        return [
            (token, _key(has_head, prob), OutputCursor((*tail, token), depth, slots))
            for token, prob in probs.items()
            if prob >= MIN_CANDIDATE_PROB
        ]

    def _combine(self, probs: Mapping[int, float], rest: float, slot: SlotProbs) -> dict[int, float]:
        """The normalised product of both distributions, over the tokens that either names."""
        others = min(slot.values())
        unigram_prob = self.counts.unigram_prob
        products = {
            token: power * (probs.get(token, 0.0) + rest * unigram_prob(token)) ** NGRAM_POWER
            for token, power in slot.items()
        }
        products.update((token, others * prob**NGRAM_POWER) for token, prob in probs.items() if token not in slot)
        scale = 1 / max(1e-30, sum(products.values()))
        return {token: product * scale for token, product in products.items()}

    def enter(self, token: int) -> OutputCursor:
        """A node of another source, of which only the token is known."""
        return OutputCursor((token,))

    def update(self, state: OutputState, result: VerifyResult) -> None:
        """Follow the emitted tokens, and count them if the call is learned from."""
        for row, emitted in enumerate(result.emitted_ids):
            if emitted:
                context = state.contexts[row]
                if state.records:
                    self.counts.add(context, emitted)
                state.contexts[row] = (*context, *emitted)[-MAX_CONTEXT:]
        state.slots = None


__all__ = ["HEAD_POWER", "NgramCounts", "OutputNgrams", "OutputState", "SlotProbs"]
