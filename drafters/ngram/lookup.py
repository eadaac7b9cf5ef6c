"""Copies what followed when the last few tokens stood in the text before (CopySpec, prompt lookup), and follows a
reference text (input-guided Aggressive Decoding).

Every row has its own `History`: its reference, its prompt and its output, indexed as they grow and never rebuilt.
Knows nothing of trees or of what a guess is worth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from mmspec.drafters.ngram.base import BARRIER, BestFirstDrafter, Key, Candidate, PromptText
from mmspec.interfaces import VerifyResult

MAX_MATCH = 8
"""Matches are counted up to this length."""
MAX_CONTINUATIONS = 3
"""Distinct continuations that are followed."""
MATCHES_PER_CONTINUATION = 2
"""Places that are followed for each of them."""
MAX_SCANNED = 16
"""Places looked at, latest first, among those where the last four (two) tokens stood before."""
NGRAM_SIZES = (4, 2)
"""Lengths that are indexed: the short one is the shortest match; the long one finds long matches behind many short."""
ALIGN_LENGTH = 3
"""Tokens compared when looking for the place in the reference again."""

_MATCH_BUCKETS = (0, 1, 2, 3, 4, 4, 5, 5, 6)
"""Number of tokens that matched -> bucket."""
_PRIOR_PROBS = {
    "lookup": (0.1, 0.1, 0.15, 0.3, 0.5, 0.5, 0.6),
    "reference": (0.3, 0.2, 0.4, 0.5, 0.6, 0.6, 0.7),
}
"""Source -> what the best guess is worth before anything is known, for each bucket."""


class Match(NamedTuple):
    """A place that the text may go on from: `at` is read next, `matched` tokens before it stand at the end of the path,
    and `start` is where reading began, and goes on after the last token of the text (which the path then repeats)."""

    index: int
    length: int
    start: int


class HashChain:
    """For each place in a growing text, the place before where the same `order` tokens stood: LZ77's hash chains.

    `links[end]` is the latest earlier end of the `order` tokens that end there, 0 if there is none.
    """

    __slots__ = ("heads", "previous", "ngram_size")

    def __init__(self, order: int) -> None:
        self.ngram_size = order
        self.heads: dict[tuple[int, ...], int] = {}
        self.previous = [0]

    def add(self, text: list[int], run: int) -> None:
        """Take in the last token of `text`, of which the last `run` tokens hold no barrier."""
        if run < self.ngram_size:
            self.previous.append(0)
            return
        gram = tuple(text[-self.ngram_size :])
        self.previous.append(self.heads.get(gram, 0))
        self.heads[gram] = len(text)


class NgramIndex:
    """The text of one row, with its index and its place in the reference."""

    __slots__ = (
        "chains",
        "last_cursor",
        "reference_cursor",
        "reference_length",
        "reference_match",
        "has_mismatch",
        "tokens",
        "run_length",
        "reference_index",
    )

    def __init__(self, reference: list[int], prompt: list[int]) -> None:
        self.tokens: list[int] = []
        self.chains = [HashChain(order) for order in NGRAM_SIZES]
        self.run_length = 0
        self.reference_length = len(reference)
        self.reference_index: dict[int, list[int]] = {}
        for index, token in enumerate(reference):
            self.reference_index.setdefault(token, []).append(index)
        for token in (*reference, BARRIER, *prompt) if reference else prompt:
            self._append(token)
        # The place in the reference that is read next, None if it is lost; how many tokens agreed; where it was last.
        self.reference_cursor: int | None = 0 if reference else None
        self.reference_match = 0
        self.last_cursor = 0
        self.has_mismatch = False

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        self.run_length = 0 if token == BARRIER else self.run_length + 1
        for chain in self.chains:
            chain.add(self.tokens, self.run_length)

    def extend(self, tokens: Iterable[int]) -> None:
        """Take in what was emitted."""
        for token in tokens:
            self._append(token)
            if self.reference_length:
                self._advance_reference(token)

    def _advance_reference(self, token: int) -> None:
        """Move on in the reference; if it said otherwise, look for the place again."""
        if self.reference_cursor is not None and self.tokens[self.reference_cursor] == token:
            self.last_cursor, self.reference_match, self.has_mismatch = (
                self.reference_cursor + 1,
                self.reference_match + 1,
                False,
            )
        elif (found := self._realign(token)) is not None:
            self.last_cursor, self.reference_match = found
            self.has_mismatch = False
        elif self.reference_cursor is not None and not self.has_mismatch:
            self.last_cursor, self.reference_match, self.has_mismatch = (
                self.reference_cursor + 1,
                0,
                True,
            )  # suppose that one word was replaced
        else:
            self.reference_cursor = None
            return
        self.reference_cursor = self.last_cursor if self.last_cursor < self.reference_length else None

    def _realign(self, token: int) -> tuple[int, int] | None:
        """(place after the last 1 to `ALIGN` tokens, how many): longest first, then ahead of us, then nearest."""
        best: tuple[int, bool, int] | None = None
        for index in self.reference_index.get(token, ()):
            length = self._match_length(index + 1, 1, ALIGN_LENGTH)
            rank = (length, index >= self.last_cursor, -abs(index - self.last_cursor))
            if best is None or rank > best:
                best, found = rank, (index + 1, length)
        return None if best is None else found

    def _match_length(self, end: int, known: int, longest: int) -> int:
        """How many tokens before `end` equal the last ones, at least `known` of them, at most `longest`."""
        text, length = self.tokens, known
        back, last = end - known - 1, len(self.tokens) - known - 1
        while length < longest and back >= 0 and text[back] == text[last] != BARRIER:
            length, back, last = length + 1, back - 1, last - 1
        return length

    def find_matches(self) -> list[Match]:
        """Places to go on from: longest match first, then latest; `SUPPORT` each of `CONTINUATIONS` distinct tokens."""
        found: dict[int, int] = {}
        for chain in self.chains:
            end = chain.previous[-1]
            for _ in range(MAX_SCANNED):
                if not end:
                    break
                if end not in found:
                    found[end] = self._match_length(end, chain.ngram_size, MAX_MATCH)
                end = chain.previous[end]
        places = sorted(((matched, end) for end, matched in found.items()), reverse=True)
        chosen = self._select_matches(places) if places else []
        if self.reference_cursor is not None and all(pointer.index != self.reference_cursor for pointer in chosen):
            chosen.append(Match(self.reference_cursor, self.reference_match, self.reference_cursor))
            chosen.sort(key=lambda pointer: -pointer.length)
        return chosen

    def _select_matches(self, places: list[tuple[int, int]]) -> list[Match]:
        followed: dict[int, int] = {}
        chosen = []
        for matched, end in places:
            token = self.tokens[end]
            count = followed.get(token, 0)
            if (
                token == BARRIER
                or count == MATCHES_PER_CONTINUATION
                or (not count and len(followed) == MAX_CONTINUATIONS)
            ):
                continue
            followed[token] = count + 1
            chosen.append(Match(end, matched, end))
        return chosen


Cursor = tuple[NgramIndex, list[Match]]


def _key(source: str, rank: int, bucket: int, split: bool) -> Key:
    return (source, rank, bucket, split)


def _priors() -> dict[Key, float]:
    """Best guesses as in `_WORTH`, a bit less when they are disputed; the others share what is left."""
    return {
        _key(source, rank, bucket, split): worth * (0.3 if rank else 0.7 if split else 1.0)
        for source, worths in _PRIOR_PROBS.items()
        for bucket, worth in enumerate(worths)
        for rank in range(3)
        for split in (False, True)
    }


class PromptLookup:
    """Guesses by copying from the row's own text. A cursor is a history and the places that the path agrees with."""

    top_k = 0
    vocab_size: int | None = None
    priors: Mapping[Key, float] = _priors()

    def start(self, prompt_text: PromptText) -> list[NgramIndex]:
        """Index each row's reference and prompt."""
        return [
            NgramIndex(reference, row)
            for reference, row in zip(prompt_text.reference_ids, prompt_text.rows, strict=True)
        ]

    def cursor(self, state: list[NgramIndex], row: int) -> Cursor | None:
        """The places where the row's last tokens stood before, and its place in the reference."""
        pointers = state[row].find_matches()
        return (state[row], pointers) if pointers else None

    def expand(self, cursor: Cursor) -> list[Candidate]:
        """What stands there, each token once."""
        history, pointers = cursor
        text, size = history.tokens, len(history.tokens)
        groups: dict[int, list[Match]] = {}
        for at, matched, start in pointers:
            token = text[at]
            if token != BARRIER:
                after = Match(at + 1 if at + 1 < size else start, matched + 1, start)
                groups.setdefault(token, []).append(after)
        offers: list[Candidate] = []
        split = len(groups) > 1
        for rank, (token, places) in enumerate(groups.items()):
            first = places[0]
            source = "reference" if first.start < history.reference_length else "lookup"
            bucket = _MATCH_BUCKETS[min(first.length - 1, MAX_MATCH)]
            offers.append((token, _key(source, min(rank, 2), bucket, split), (history, places)))
        return offers

    def enter(self, token: int) -> None:
        """Nothing: a place that disagreed with the path is left."""

    def update(self, state: list[NgramIndex], result: VerifyResult) -> None:
        """Add what was emitted to the index."""
        for history, emitted in zip(state, result.emitted_ids, strict=True):
            if emitted:
                history.extend(emitted)


def lookup() -> BestFirstDrafter:
    """The drafter that only copies."""
    return BestFirstDrafter("lookup", [PromptLookup()])


__all__ = ["CopyGuesser", "NgramIndex", "lookup"]
