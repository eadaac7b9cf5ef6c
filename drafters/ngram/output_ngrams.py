"""An n-gram model of all prompts and outputs so far.

In a job the outputs resemble each other: what followed the last tokens in an earlier output often follows them again
(SuffixDecoding, arXiv 2411.04975, keeps the outputs in a suffix tree; here they are counts, which need bounded memory).
Where the kernel of `mmspec.cpu` can be had, the counts are in C (`mmspec.cpu.ngrams`); `NgramCounts` computes the same
in Python. The module does not know the target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from mmspec.cpu.c_kernel import load_kernel
from mmspec.cpu.ngrams import CNgrams
from mmspec.drafters.ngram.base import BARRIER, BestFirstDrafter, Candidate, Key, PromptText
from mmspec.forks import Locked
from mmspec.interfaces import VerifyResult

MAX_CONTEXT = 3
"""Tokens before the predicted one that are counted: n-grams of up to four tokens."""
MAX_CONTEXTS = 1 << 17
"""Distinct contexts in memory; beyond, all counts are halved, and those of 1 are dropped."""
MAX_SUCCESSORS = 24
"""Successors of a context; a further one replaces the rarest."""
MIN_CANDIDATE_PROB = 0.02
"""Less likely successors are not proposed."""
NUM_BUCKETS = 12
"""Probabilities are calibrated in so many classes."""
MIN_UNSEEN_PROB = 0.05
"""Shorter contexts are not consulted for less than this probability."""

_KEYS: tuple[Key, ...] = tuple(("output", bucket) for bucket in range(NUM_BUCKETS + 1))
"""Classes of probabilities."""


class NgramCounts(Locked):
    """How often tokens followed the up to `MAX_CONTEXT` tokens before them. Shared by threads; bounded memory."""

    def __init__(self) -> None:
        super().__init__()
        self._successors: dict[tuple[int, ...], dict[int, int]] = {}

    @property
    def num_contexts(self) -> int:
        """Distinct contexts in memory."""
        return len(self._successors)

    def add(self, context: tuple[int, ...], tokens: Sequence[int]) -> None:
        """Count tokens that followed a context."""
        history = (*context, *tokens)
        with self.lock:
            for end in range(len(context), len(history)):
                token = history[end]
                for start in range(max(0, end - MAX_CONTEXT), end):
                    counts = self._successors.setdefault(history[start:end], {})
                    if token not in counts and len(counts) == MAX_SUCCESSORS:
                        del counts[min(counts, key=counts.__getitem__)]
                    counts[token] = counts.get(token, 0) + 1
            if len(self._successors) > MAX_CONTEXTS:
                self._prune()

    def _prune(self) -> None:
        while len(self._successors) > MAX_CONTEXTS // 2:
            halved = {
                context: {token: count // 2 for token, count in counts.items() if count > 1}
                for context, counts in self._successors.items()
            }
            self._successors = {context: counts for context, counts in halved.items() if counts}

    def probs(self, context: tuple[int, ...], min_unseen: float) -> tuple[dict[int, float], float]:
        """Witten-Bell estimates of the tokens after a context, and the probability of all others together.

        Each shorter context gets d / (n + d) of the probability, where the longer one occurred n times with d
        distinct successors.

        Args:
            context: the last tokens.
            min_unseen: shorter contexts are not consulted for less than this probability.
        """
        probs: dict[int, float] = {}
        rest = 1.0
        with self.lock:
            for start in range(max(0, len(context) - MAX_CONTEXT), len(context)):
                counts = self._successors.get(context[start:])
                if counts:
                    distinct = len(counts)
                    scale = rest / (sum(counts.values()) + distinct)
                    for token, count in counts.items():
                        probs[token] = probs.get(token, 0.0) + scale * count
                    rest = scale * distinct
                    if rest < min_unseen:
                        break
        return probs, rest


def new_counts() -> NgramCounts | CNgrams:
    """Empty counts, in C where that is possible."""
    kernel = load_kernel()
    return NgramCounts() if kernel is None else CNgrams(kernel, MAX_CONTEXT, MAX_SUCCESSORS, MAX_CONTEXTS)


@dataclass
class OutputState:
    """State of one call.

    Attributes:
        contexts: the last tokens of each row.
    """

    contexts: list[tuple[int, ...]]


OutputCursor = tuple[tuple[int, ...], int | None]
"""A node: the tokens before it, and its own (None at the root, where it is one of these)."""


class OutputNgrams:
    """A `CandidateSource` over counts of n-grams of all calls, their prompts too."""

    top_k = 0
    vocab_size: int | None = None
    priors: Mapping[Key, float] = {
        ("output", bucket): 0.9 * min(0.98, (bucket + 0.5) / NUM_BUCKETS) for bucket in range(NUM_BUCKETS + 1)
    }

    def __init__(self) -> None:
        self.counts = new_counts()

    def start(self, prompt_text: PromptText) -> OutputState:
        """Begin after the prompts."""
        for row in prompt_text.rows:
            for is_text, tokens in groupby(row, BARRIER.__ne__):
                if is_text:
                    self.counts.add((), list(tokens))
        return OutputState([tuple(row[-MAX_CONTEXT:]) for row in prompt_text.rows])

    def cursor(self, state: OutputState, row: int) -> OutputCursor:
        """The row's last tokens."""
        return state.contexts[row], None

    def expand(self, cursor: OutputCursor) -> list[Candidate]:
        """The likely next tokens."""
        context, last = cursor
        if last is not None:
            context = (*context, last)[-MAX_CONTEXT:]
        probs, _ = self.counts.probs(context, MIN_UNSEEN_PROB)
        return [
            (token, _KEYS[int(min(prob, 1.0) * NUM_BUCKETS)], (context, token))
            for token, prob in probs.items()
            if prob >= MIN_CANDIDATE_PROB
        ]

    def enter(self, token: int) -> OutputCursor:
        """A node of another source, of which only the token is known."""
        return (), token

    def update(self, state: OutputState, result: VerifyResult) -> None:
        """Follow the emitted tokens, and count them."""
        for row, emitted in enumerate(result.emitted_ids):
            if emitted:
                context = state.contexts[row]
                self.counts.add(context, emitted)
                state.contexts[row] = (*context, *emitted)[-MAX_CONTEXT:]


def text_ngrams() -> BestFirstDrafter:
    """Counts of all prompts and outputs, which draft for a model that drafts."""
    return BestFirstDrafter("ngrams", [OutputNgrams()])
