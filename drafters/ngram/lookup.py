"""Prompt lookup: copies what followed the last few tokens where they occurred before, and follows a reference text.

Sources: prompt lookup decoding, CopySpec, and input-guided Aggressive Decoding for the reference. Every row has its own
`NgramIndex` over its reference, prompt and output, which is extended and never rebuilt. The module knows nothing of
trees or of the probability of a candidate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from mmspec.drafters.ngram.base import BARRIER, BestFirstDrafter, Candidate, Key, PromptText
from mmspec.interfaces import VerifyResult

MAX_MATCH = 8
"""Matches are counted up to this length."""
MAX_CONTINUATIONS = 3
"""Distinct continuations that are followed."""
MATCHES_PER_CONTINUATION = 2
"""Matches that are followed for each of them."""
MAX_SCANNED = 16
"""Earlier occurrences of the last n-gram that are compared, latest first."""
NGRAM_SIZES = (4, 2)
"""Indexed n-gram sizes: the shorter is the shortest match; the longer finds long matches behind many short ones."""
ALIGN_LENGTH = 3
"""Tokens compared when searching the position in the reference again."""

_MATCH_BUCKETS = (0, 1, 2, 3, 4, 4, 5, 5, 6)
"""Length of a match -> bucket."""
_PRIOR_PROBS = {"lookup": (0.1, 0.1, 0.15, 0.3, 0.5, 0.5, 0.6), "reference": (0.3, 0.2, 0.4, 0.5, 0.6, 0.6, 0.7)}
"""Source -> prior probability of its first candidate, per bucket."""


class Match(NamedTuple):
    """A position that the text may continue from.

    Attributes:
        position: index of the token that is read next.
        length: number of tokens before `position` that equal the end of the path.
        start: index at which reading began; it continues there after the last token, which the path then repeats.
    """

    position: int
    length: int
    start: int


class HashChain:
    """For each position of a growing text, the previous one with the same n-gram before it: LZ77's hash chains.

    Attributes:
        ngram_size: n.
        heads: n-gram -> its latest end.
        previous: `previous[end]` is the latest earlier end of the n-gram that ends there, 0 if there is none.
    """

    __slots__ = ("heads", "ngram_size", "previous")

    def __init__(self, ngram_size: int) -> None:
        self.ngram_size = ngram_size
        self.heads: dict[tuple[int, ...], int] = {}
        self.previous = [0]

    def extend(self, tokens: list[int], start: int, run_length: int) -> None:
        """Index the tokens from `start` on, before which `run_length` contain no barrier, as these do."""
        size, heads, previous = self.ngram_size, self.heads, self.previous
        for end in range(start + 1, len(tokens) + 1):
            if run_length + end - start < size:
                previous.append(0)
                continue
            ngram = tuple(tokens[end - size : end])
            previous.append(heads.get(ngram, 0))
            heads[ngram] = end


class NgramIndex:
    """The text of one row, its n-gram index, and its position in the reference.

    Attributes:
        tokens: reference, barrier, prompt and output.
        chains: one per n-gram size.
        run_length: number of tokens since the last barrier.
        reference_length: number of tokens of the reference.
        reference_index: token -> its indices in the reference.
        reference_cursor: index in the reference that is read next, None if it is lost.
        reference_match: number of tokens that agreed up to there.
        last_cursor: the last known cursor.
        has_mismatch: whether the last token was assumed to replace one of the reference.
    """

    __slots__ = (
        "chains",
        "has_mismatch",
        "last_cursor",
        "reference_cursor",
        "reference_index",
        "reference_length",
        "reference_match",
        "run_length",
        "tokens",
    )

    def __init__(self, reference_ids: list[int], prompt_ids: list[int]) -> None:
        self.tokens: list[int] = []
        self.chains = [HashChain(size) for size in NGRAM_SIZES]
        self.run_length = 0
        self.reference_length = len(reference_ids)
        self.reference_index: dict[int, list[int]] = {}
        for index, token in enumerate(reference_ids):
            self.reference_index.setdefault(token, []).append(index)
        self._extend_text([*reference_ids, BARRIER, *prompt_ids] if reference_ids else prompt_ids)
        self.reference_cursor: int | None = 0 if reference_ids else None
        self.reference_match = 0
        self.last_cursor = 0
        self.has_mismatch = False

    def extend(self, tokens: Sequence[int]) -> None:
        """Append the emitted tokens."""
        if not self.reference_length:
            self._extend_text(tokens)
            return
        for token in tokens:
            self._extend_text((token,))
            self._advance_reference(token)

    def _extend_text(self, added: Sequence[int]) -> None:
        """Append tokens, run by run: an n-gram contains no barrier."""
        for is_text, run in groupby(added, BARRIER.__ne__):
            start = len(self.tokens)
            self.tokens.extend(run)
            for chain in self.chains:
                chain.extend(self.tokens, start, self.run_length if is_text else -len(self.tokens))
            self.run_length = self.run_length + len(self.tokens) - start if is_text else 0

    def _advance_reference(self, token: int) -> None:
        """Move the reference cursor past `token`; where the reference differs, search the position again."""
        if self.reference_cursor is not None and self.tokens[self.reference_cursor] == token:
            self.last_cursor = self.reference_cursor + 1
            self.reference_match += 1
            self.has_mismatch = False
        elif (found := self._realign(token)) is not None:
            self.last_cursor, self.reference_match = found
            self.has_mismatch = False
        elif self.reference_cursor is not None and not self.has_mismatch:
            self.last_cursor = self.reference_cursor + 1  # assume that one token was replaced
            self.reference_match = 0
            self.has_mismatch = True
        else:
            self.reference_cursor = None
            return
        self.reference_cursor = self.last_cursor if self.last_cursor < self.reference_length else None

    def _realign(self, token: int) -> tuple[int, int] | None:
        """(index after a match of up to `ALIGN_LENGTH` last tokens, its length): longest, then ahead, then nearest."""
        best: tuple[int, bool, int] | None = None
        for index in self.reference_index.get(token, ()):
            length = self._match_length(index + 1, 1, ALIGN_LENGTH)
            rank = (length, index >= self.last_cursor, -abs(index - self.last_cursor))
            if best is None or rank > best:
                best, found = rank, (index + 1, length)
        return None if best is None else found

    def _match_length(self, end: int, known: int, max_length: int) -> int:
        """Number of tokens before `end` that equal the last ones: at least `known`, at most `max_length`."""
        tokens, length = self.tokens, known
        index, last = end - known - 1, len(self.tokens) - known - 1
        while length < max_length and index >= 0 and tokens[index] == tokens[last] != BARRIER:
            length, index, last = length + 1, index - 1, last - 1
        return length

    def find_matches(self) -> list[Match]:
        """Positions to continue from: longest match first, then latest.

        `MATCHES_PER_CONTINUATION` for each of `MAX_CONTINUATIONS` distinct tokens, and the reference cursor.
        """
        lengths: dict[int, int] = {}
        for chain in self.chains:
            end = chain.previous[-1]
            for _ in range(MAX_SCANNED):
                if not end:
                    break
                if end not in lengths:
                    lengths[end] = self._match_length(end, chain.ngram_size, MAX_MATCH)
                end = chain.previous[end]
        ends = sorted(((length, end) for end, length in lengths.items()), reverse=True)
        matches = self._select_matches(ends) if ends else []
        if self.reference_cursor is not None and all(match.position != self.reference_cursor for match in matches):
            matches.append(Match(self.reference_cursor, self.reference_match, self.reference_cursor))
            matches.sort(key=lambda match: -match.length)
        return matches

    def _select_matches(self, ends: list[tuple[int, int]]) -> list[Match]:
        counts: dict[int, int] = {}
        matches = []
        for length, end in ends:
            token = self.tokens[end]
            count = counts.get(token, 0)
            is_full = count == MATCHES_PER_CONTINUATION or (not count and len(counts) == MAX_CONTINUATIONS)
            if token == BARRIER or is_full:
                continue
            counts[token] = count + 1
            matches.append(Match(end, length, end))
        return matches


Cursor = tuple[NgramIndex, list[Match]]


def _key(source: str, rank: int, bucket: int, is_disputed: bool) -> Key:
    return (source, rank, bucket, is_disputed)


def _priors() -> dict[Key, float]:
    """First candidates as in `_PRIOR_PROBS`, less where several tokens are named; further candidates less again."""
    return {
        _key(source, rank, bucket, is_disputed): prob * (0.3 if rank else 0.7 if is_disputed else 1.0)
        for source, probs in _PRIOR_PROBS.items()
        for bucket, prob in enumerate(probs)
        for rank in range(3)
        for is_disputed in (False, True)
    }


class PromptLookup:
    """A `CandidateSource` that copies from the row's own text. A cursor is an index and the matches of the path."""

    top_k = 0
    vocab_size: int | None = None
    priors: Mapping[Key, float] = _priors()

    def start(self, prompt_text: PromptText) -> list[NgramIndex]:
        """Index each row's reference and prompt."""
        rows = zip(prompt_text.reference_ids, prompt_text.rows, strict=True)
        return [NgramIndex(reference_ids, prompt_ids) for reference_ids, prompt_ids in rows]

    def cursor(self, state: list[NgramIndex], row: int) -> Cursor | None:
        """Earlier occurrences of the row's last tokens, and its position in the reference."""
        matches = state[row].find_matches()
        return (state[row], matches) if matches else None

    def expand(self, cursor: Cursor) -> list[Candidate]:
        """The tokens at the matches, each once."""
        ngram_index, matches = cursor
        tokens, size = ngram_index.tokens, len(ngram_index.tokens)
        groups: dict[int, list[Match]] = {}
        for position, length, start in matches:
            token = tokens[position]
            if token != BARRIER:
                child = Match(position + 1 if position + 1 < size else start, length + 1, start)
                groups.setdefault(token, []).append(child)
        candidates: list[Candidate] = []
        is_disputed = len(groups) > 1
        for rank, (token, children) in enumerate(groups.items()):
            first = children[0]
            source = "reference" if first.start < ngram_index.reference_length else "lookup"
            bucket = _MATCH_BUCKETS[min(first.length - 1, MAX_MATCH)]
            candidates.append((token, _key(source, min(rank, 2), bucket, is_disputed), (ngram_index, children)))
        return candidates

    def enter(self, token: int) -> None:
        """None: a match that disagreed with the path is dropped."""

    def update(self, state: list[NgramIndex], result: VerifyResult) -> None:
        """Index the emitted tokens."""
        for ngram_index, emitted in zip(state, result.emitted_ids, strict=True):
            if emitted:
                ngram_index.extend(emitted)


def lookup() -> BestFirstDrafter:
    """The drafter over `PromptLookup` alone."""
    return BestFirstDrafter("lookup", [PromptLookup()])
