"""An n-gram model of all outputs so far, and its combination with the distributions of instant heads.

In a job the outputs resemble each other: what followed the last tokens in an earlier output often follows them again
(SuffixDecoding, arXiv 2411.04975, keeps the outputs in a suffix tree; here they are counts, which need bounded memory).
Instant heads depend on the picture and not on the drafted tokens, an n-gram model the other way round; the product of
both, raised to a power, is better than either. Where the kernel of `mmspec.cpu` can be had, counts and trees are in
C (`mmspec.cpu.ngrams`); the classes here compute the same in Python. The module knows neither the target nor how
heads are learned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from mmspec.cpu.c_kernel import load_kernel
from mmspec.cpu.ngram_types import NUM_LIKELY, HeadDistributions, NgramRequest, NgramRule, NodeCandidates
from mmspec.cpu.ngrams import CNgrams
from mmspec.drafters.ngram.base import (
    BARRIER,
    MAX_SIBLING_PROB,
    MIN_PROB,
    BestFirstDrafter,
    Calibration,
    Candidate,
    Key,
    PromptText,
)
from mmspec.engine.tree import DraftTree
from mmspec.forks import new_lock
from mmspec.interfaces import VerifyResult

MAX_CONTEXT = 3
"""Tokens before the predicted one that are counted: n-grams of up to four tokens."""
MAX_CONTEXTS = 1 << 17
"""Distinct contexts in memory; beyond, all counts are halved, and those of 1 are dropped."""
MAX_SUCCESSORS = 24
"""Successors of a context; a further one replaces the rarest."""
MIN_CANDIDATE_PROB = 0.02
"""Less likely successors are not proposed."""
HEAD_POWER, NGRAM_POWER = 0.6, 0.6
"""Exponents of both distributions in their product."""
PRIOR_POWER = 0.3
"""Frequencies to this power are divided out of the product, since both distributions contain them."""
NUM_BUCKETS = 12
"""Probabilities are calibrated in so many classes."""
MAX_HEAD_SLOTS = 4
"""Positions of heads whose probabilities are calibrated apart."""
MIN_UNSEEN_PROB = 0.05
"""Shorter contexts are not consulted for less than this probability."""
RULE = NgramRule(NGRAM_POWER, NUM_BUCKETS, MIN_CANDIDATE_PROB, MIN_PROB, MAX_SIBLING_PROB, MIN_UNSEEN_PROB)

_KEYS: tuple[Key, ...] = tuple(
    ("output", slot, bucket) for slot in range(1 + MAX_HEAD_SLOTS) for bucket in range(NUM_BUCKETS + 1)
)
"""Classes of probabilities: without heads, then of each position of the heads."""


class NgramCounts:
    """How often tokens followed the up to `MAX_CONTEXT` tokens before them. Shared by threads; bounded memory."""

    def __init__(self) -> None:
        self._successors: dict[tuple[int, ...], dict[int, int]] = {}
        self._lock = new_lock()

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
        with self._lock:
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

    def __deepcopy__(self, memo: dict[int, Any]) -> NgramCounts:
        copied = NgramCounts()
        with self._lock:
            copied._successors = {context: dict(counts) for context, counts in self._successors.items()}
        return copied


def new_counts() -> NgramCounts | CNgrams:
    """Empty counts, in C where that is possible."""
    kernel = load_kernel()
    return NgramCounts() if kernel is None else CNgrams(kernel, MAX_CONTEXT, MAX_SUCCESSORS, MAX_CONTEXTS)


class HeadSlot:
    """The distribution of one position of one row, for the search in Python.

    Attributes:
        powers, weights: by place, as in `HeadDistributions`.
        total, floor: as there.
        likely: (token, weight) of the `NUM_LIKELY` largest weights above 0, falling.
        index: place of each token.
    """

    def __init__(self, heads: HeadDistributions, row: int, slot: int) -> None:
        self.powers, self.weights = heads.powers[row, slot].numpy(), heads.weights[row, slot].numpy()
        self.total, self.floor = float(heads.totals[row, slot]), float(heads.floors[row, slot])
        found = heads.weights[row, slot].topk(min(NUM_LIKELY, len(heads.ids)))
        tokens = heads.ids[found.indices].tolist()
        self.likely = [
            (token, weight) for token, weight in zip(tokens, found.values.tolist(), strict=True) if weight > 0
        ]
        self.index = heads.index.numpy()

    def combine(self, probs: Mapping[int, float], rest: float) -> dict[int, float]:
        """The normalised product with the distribution of n-grams, over the tokens that either names."""
        unseen = rest**NGRAM_POWER
        others, total, products = self.total, 0.0, dict[int, float]()
        for token, prob in probs.items():
            place = int(self.index[token]) if token < len(self.index) else -1
            power = self.floor
            if place >= 0:
                others -= float(self.weights[place])
                power = max(power, float(self.powers[place]))
            products[token] = power * prob**NGRAM_POWER
            total += products[token]
        if others > 0:
            total += others * unseen
        for token, weight in self.likely:
            if token not in probs:
                products[token] = weight * unseen
        scale = 1 / total if total > 0 else 0.0
        return {token: product * scale for token, product in products.items()}


@dataclass
class OutputState:
    """State of one call.

    Attributes:
        contexts: the last tokens of each row.
        token_flags: as in `NgramRequest`.
        heads: distributions of the next positions by instant heads; None without.
        records: whether the call's output is counted.
        slots: of each row the positions of `heads`, for the search in Python.
    """

    contexts: list[tuple[int, ...]]
    token_flags: Tensor
    heads: HeadDistributions | None = None
    records: bool = False
    slots: list[list[HeadSlot]] = field(default_factory=list)

    def flag(self, banned_ids: Iterable[int], stop_ids: Iterable[int]) -> None:
        """Set `token_flags`."""
        for bit, ids in ((1, banned_ids), (2, stop_ids)):
            known = [token for token in ids if 0 <= token < len(self.token_flags)]
            if known:
                self.token_flags[torch.tensor(known, device="cpu")] |= bit


OutputCursor = tuple[tuple[int, ...], int | None, int, Sequence[HeadSlot]]
"""A node: the tokens before it, its own (None at the root, where it is one of these), its depth, and the distributions
of the heads at its row."""


class OutputNgrams:
    """A `CandidateSource` over counts of n-grams and, where they are given (`OutputState.heads`), instant heads."""

    top_k = 0
    vocab_size: int | None = None
    priors: Mapping[Key, float] = {
        ("output", slot, bucket): 0.9 * min(0.98, (bucket + 0.5) / NUM_BUCKETS)
        for slot in range(1 + MAX_HEAD_SLOTS)
        for bucket in range(NUM_BUCKETS + 1)
    }

    def __init__(self, records: bool = False) -> None:
        """
        Args:
            records: whether every call is counted, its prompt too; else only outputs of calls that are learned from.
        """
        self.counts = new_counts()
        self.records = records

    def start(self, prompt_text: PromptText) -> OutputState:
        """Begin after the prompts."""
        if self.records:
            for row in prompt_text.rows:
                for is_text, tokens in groupby(row, BARRIER.__ne__):
                    if is_text:
                        self.counts.add((), list(tokens))
        contexts = [tuple(row[-MAX_CONTEXT:]) for row in prompt_text.rows]
        flags = torch.zeros(prompt_text.vocab_size, dtype=torch.uint8, device="cpu")
        return OutputState(contexts, flags, records=self.records)

    def draft(
        self, state: OutputState, max_nodes: int, active: Sequence[bool], calibration: Calibration
    ) -> tuple[DraftTree, list[Sequence[list[Candidate]]]] | None:
        """The trees that `BestFirstDrafter` grows from this source alone, in C; None if there is none."""
        if not isinstance(self.counts, CNgrams):
            return None
        calibrated = [calibration.prob(key) for key in _KEYS]
        request = NgramRequest(state.contexts, active, max_nodes, state.heads, calibrated, state.token_flags)
        tree, found = self.counts.draft(request, RULE)
        return tree, [RowCandidates(found, row) for row in range(len(active))]

    def cursor(self, state: OutputState, row: int) -> OutputCursor:
        """The row's last tokens."""
        heads = state.heads
        if heads is not None and not state.slots:
            batch, num_slots, _ = heads.powers.shape
            state.slots = [[HeadSlot(heads, one, slot) for slot in range(num_slots)] for one in range(batch)]
        return state.contexts[row], None, 0, state.slots[row] if state.slots else ()

    def expand(self, cursor: OutputCursor) -> list[Candidate]:
        """The likely next tokens."""
        context, last, depth, slots = cursor
        if last is not None:
            context = (*context, last)[-MAX_CONTEXT:]
        probs, rest = self.counts.probs(context, MIN_UNSEEN_PROB)
        first_key = 0
        if depth < len(slots):
            probs, first_key = slots[depth].combine(probs, rest), (1 + depth) * (NUM_BUCKETS + 1)
        depth += 1
        return [
            (token, _KEYS[first_key + int(min(prob, 1.0) * NUM_BUCKETS)], (context, token, depth, slots))
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
        state.heads, state.slots = None, []

    def mark(self, state: OutputState) -> list[tuple[int, ...]]:
        """The last tokens."""
        return list(state.contexts)

    def follow(self, state: OutputState, row: int, tokens: Sequence[int]) -> None:
        """Move behind the tokens."""
        state.contexts[row] = (*state.contexts[row], *tokens)[-MAX_CONTEXT:]

    def rewind(self, state: OutputState, mark: list[tuple[int, ...]]) -> None:
        """Move back."""
        state.contexts[:] = mark


def text_ngrams() -> BestFirstDrafter:
    """Counts of all prompts and outputs, which draft for a model that drafts."""
    return BestFirstDrafter("ngrams", [OutputNgrams(records=True)])


class RowCandidates(Sequence[list[Candidate]]):
    """The candidates at the nodes of one row of `NodeCandidates`, read node by node, since few nodes are accepted."""

    def __init__(self, found: NodeCandidates, row: int) -> None:
        self._found = found
        self._row = row

    def __len__(self) -> int:
        return self._found.num_nodes

    def __getitem__(self, node: Any) -> Any:
        return [(token, _KEYS[number], None) for token, number in self._found.at(self._row, node)]
