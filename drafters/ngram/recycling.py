"""Token Recycling (arXiv 2408.08696): the ids of the largest logits after each token, from its last scored occurrence.

The table is shared by all rows and calls. Rejected nodes update it like accepted ones. The module
knows nothing of trees or of the probability of a candidate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from mmspec.drafters.ngram.base import BARRIER, BestFirstDrafter, Candidate, Key, PromptText
from mmspec.drafters.ngram.lookup import PromptLookup
from mmspec.forks import Locked
from mmspec.interfaces import VerifyResult

TOP_K = 8
"""Successors stored for each token."""
MAX_STABLE = 3
"""Consecutive updates with the same first successor are counted up to this number."""

_KEYS: tuple[tuple[Key, ...], ...] = tuple(
    tuple(("table", rank, num_stable) for rank in range(TOP_K)) for num_stable in range(MAX_STABLE + 1)
)

Entry = tuple[int, tuple[int, ...]]
"""(number of consecutive updates with the same first successor, up to `MAX_STABLE`; successors, most likely first)."""


def _priors() -> dict[Key, float]:
    """Pessimistic, so that an unpredictable target is not drafted for: 0.1, more if stable, less for later ranks."""
    return {
        key: max(0.02, 0.1 * (1 + num_stable) if rank == 0 else 0.1 * 0.7**rank)
        for num_stable, keys in enumerate(_KEYS)
        for rank, key in enumerate(keys)
    }


class SuccessorTable(Locked):
    """A `CandidateSource` over a table of successors. A cursor is a token.

    Entries are replaced, never changed, so readers need no lock; writers take it. The table belongs to one target: a
    call with another vocabulary size empties it.
    """

    top_k = TOP_K
    priors: Mapping[Key, float] = _priors()

    def __init__(self, vocab_size: int | None = None) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self._entries: dict[int, Entry] = {}

    def successors(self, token: int) -> tuple[int, ...]:
        """Successors of a token, most likely first."""
        return self._entries.get(token, (0, ()))[1]

    def start(self, prompt_text: PromptText) -> list[int]:
        """Update the table with the prompt's bigrams. The state is the last token of each row."""
        with self.lock:
            self._set_vocab_size(prompt_text.vocab_size)
            for row in prompt_text.rows:
                for token, successor in pairwise(row):
                    if token != BARRIER and successor != BARRIER:
                        self._promote(token, successor)
        return [row[-1] if row else BARRIER for row in prompt_text.rows]

    def _set_vocab_size(self, vocab_size: int) -> None:
        if not vocab_size or self.vocab_size is None:
            self.vocab_size = vocab_size or self.vocab_size
        elif self.vocab_size != vocab_size:  # the target's embeddings were resized
            self._entries, self.vocab_size = {}, vocab_size

    def cursor(self, state: list[int], row: int) -> int | None:
        """The row's last token."""
        return self.enter(state[row])

    def expand(self, cursor: int) -> Iterable[Candidate]:
        """Its successors."""
        entry = self._entries.get(cursor)
        if entry is None:
            return ()
        return zip(entry[1], _KEYS[entry[0]], entry[1], strict=False)

    def enter(self, token: int) -> int | None:
        """The token, if it has successors."""
        return token if token in self._entries else None

    def update(self, state: list[int], result: VerifyResult) -> None:
        """Store the successors of every scored node, the accepted nodes last, so that theirs remain."""
        with self.lock:
            if result.top_ids is None:
                self._update_emitted(state, result)
            else:
                self._update_scored(state, result, result.top_ids)
        for row, emitted in enumerate(result.emitted_ids):
            if emitted:
                state[row] = emitted[-1]

    def _update_scored(
        self, state: list[int], result: VerifyResult, top_ids: Sequence[Sequence[Sequence[int]]]
    ) -> None:
        active = [row for row, emitted in enumerate(result.emitted_ids) if emitted]
        if result.scored_ids is not None and result.tree.num_nodes > 1:
            for row in active:
                accepted = set(result.accepted_nodes[row])
                for node, (token, ids) in enumerate(zip(result.scored_ids[row], top_ids[row], strict=True)):
                    if node not in accepted:
                        self._store(token, ids)  # absent nodes are -1, which `_store` ignores
        for row in active:
            # The token of an accepted node is the one emitted at the node before it.
            for token, node in zip((state[row], *result.emitted_ids[row]), result.accepted_nodes[row], strict=False):
                self._store(token, top_ids[row][node])

    def _update_emitted(self, state: list[int], result: VerifyResult) -> None:
        for last, emitted in zip(state, result.emitted_ids, strict=True):
            for token, successor in zip((last, *emitted), emitted, strict=False):
                self._promote(token, successor)

    def _store(self, token: int, ids: Sequence[int]) -> None:
        limit = self.vocab_size or float("inf")
        if not ids or not 0 <= token < limit:
            return
        if min(ids) < 0 or max(ids) >= limit:
            ids = [i for i in ids if 0 <= i < limit]
            if not ids:
                return
        self._entries[token] = (self._stable_updates(token, ids[0]), tuple(ids[:TOP_K]))

    def _promote(self, token: int, successor: int) -> None:
        """Store `successor` as the first of `token`'s."""
        old = self._entries.get(token)
        if old is not None and old[1][0] == successor:
            if old[0] < MAX_STABLE:
                self._entries[token] = (old[0] + 1, old[1])
            return
        others = [i for i in self.successors(token) if i != successor]
        self._store(token, (successor, *others))

    def _stable_updates(self, token: int, first: int) -> int:
        old = self._entries.get(token)
        return min(old[0] + 1, MAX_STABLE) if old is not None and old[1][0] == first else 0


def recycling() -> BestFirstDrafter:
    """The drafter over a `SuccessorTable` alone."""
    return BestFirstDrafter("recycling", [SuccessorTable()])


def hybrid() -> BestFirstDrafter:
    """Drafter `hybrid`: the union of prompt lookup and token recycling under one node budget."""
    return BestFirstDrafter("hybrid", [PromptLookup(), SuccessorTable()])
