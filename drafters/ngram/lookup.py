"""Copies what followed when the last few tokens stood in the text before (CopySpec, prompt lookup), and follows a
reference text (input-guided Aggressive Decoding).

Every row has its own `History`: its reference, its prompt and its output, indexed as they grow and never rebuilt.
Knows nothing of trees or of what a guess is worth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from mmspec.drafters.ngram.base import BARRIER, BestFirst, Key, Offer, Text
from mmspec.interfaces import VerifyResult

LONGEST = 8
"""Matches are counted up to this length."""
CONTINUATIONS = 3
"""Distinct continuations that are followed."""
SUPPORT = 2
"""Places that are followed for each of them."""
SCAN = 16
"""Places looked at, latest first, among those where the last four (two) tokens stood before."""
ORDERS = (4, 2)
"""Lengths that are indexed: the short one is the shortest match; the long one finds long matches behind many short."""
ALIGN = 3
"""Tokens compared when looking for the place in the reference again."""

_BUCKETS = (0, 1, 2, 3, 4, 4, 5, 5, 6)
"""Number of tokens that matched -> bucket."""
_WORTH = {
    "lookup": (0.1, 0.1, 0.15, 0.3, 0.5, 0.5, 0.6),
    "reference": (0.3, 0.2, 0.4, 0.5, 0.6, 0.6, 0.7),
}
"""Source -> what the best guess is worth before anything is known, for each bucket."""


class Pointer(NamedTuple):
    """A place that the text may go on from: `at` is read next, `matched` tokens before it stand at the end of the path,
    and `start` is where reading began, and goes on after the last token of the text (which the path then repeats)."""

    at: int
    matched: int
    start: int


class Chain:
    """For each place in a growing text, the place before where the same `order` tokens stood: LZ77's hash chains.

    `links[end]` is the latest earlier end of the `order` tokens that end there, 0 if there is none.
    """

    __slots__ = ("heads", "links", "order")

    def __init__(self, order: int) -> None:
        self.order = order
        self.heads: dict[tuple[int, ...], int] = {}
        self.links = [0]

    def add(self, text: list[int], run: int) -> None:
        """Take in the last token of `text`, of which the last `run` tokens hold no barrier."""
        if run < self.order:
            self.links.append(0)
            return
        gram = tuple(text[-self.order :])
        self.links.append(self.heads.get(gram, 0))
        self.heads[gram] = len(text)


class History:
    """The text of one row, with its index and its place in the reference."""

    __slots__ = ("chains", "place", "pointer", "reference", "run", "slipped", "text", "unbroken", "where")

    def __init__(self, reference: list[int], prompt: list[int]) -> None:
        self.text: list[int] = []
        self.chains = [Chain(order) for order in ORDERS]
        self.unbroken = 0
        self.reference = len(reference)
        self.where: dict[int, list[int]] = {}
        for index, token in enumerate(reference):
            self.where.setdefault(token, []).append(index)
        for token in (*reference, BARRIER, *prompt) if reference else prompt:
            self._append(token)
        # The place in the reference that is read next, None if it is lost; how many tokens agreed; where it was last.
        self.pointer: int | None = 0 if reference else None
        self.run = 0
        self.place = 0
        self.slipped = False

    def _append(self, token: int) -> None:
        self.text.append(token)
        self.unbroken = 0 if token == BARRIER else self.unbroken + 1
        for chain in self.chains:
            chain.add(self.text, self.unbroken)

    def extend(self, tokens: Iterable[int]) -> None:
        """Take in what was emitted."""
        for token in tokens:
            self._append(token)
            if self.reference:
                self._follow(token)

    def _follow(self, token: int) -> None:
        """Move on in the reference; if it said otherwise, look for the place again."""
        if self.pointer is not None and self.text[self.pointer] == token:
            self.place, self.run, self.slipped = self.pointer + 1, self.run + 1, False
        elif (found := self._align(token)) is not None:
            self.place, self.run = found
            self.slipped = False
        elif self.pointer is not None and not self.slipped:
            self.place, self.run, self.slipped = self.pointer + 1, 0, True  # suppose that one word was replaced
        else:
            self.pointer = None
            return
        self.pointer = self.place if self.place < self.reference else None

    def _align(self, token: int) -> tuple[int, int] | None:
        """(place after the last 1 to `ALIGN` tokens, how many): longest first, then ahead of us, then nearest."""
        best: tuple[int, bool, int] | None = None
        for index in self.where.get(token, ()):
            length = self._matched(index + 1, 1, ALIGN)
            rank = (length, index >= self.place, -abs(index - self.place))
            if best is None or rank > best:
                best, found = rank, (index + 1, length)
        return None if best is None else found

    def _matched(self, end: int, known: int, longest: int) -> int:
        """How many tokens before `end` equal the last ones, at least `known` of them, at most `longest`."""
        text, length = self.text, known
        back, last = end - known - 1, len(self.text) - known - 1
        while length < longest and back >= 0 and text[back] == text[last] != BARRIER:
            length, back, last = length + 1, back - 1, last - 1
        return length

    def pointers(self) -> list[Pointer]:
        """Places to go on from: longest match first, then latest; `SUPPORT` each of `CONTINUATIONS` distinct tokens."""
        found: dict[int, int] = {}
        for chain in self.chains:
            end = chain.links[-1]
            for _ in range(SCAN):
                if not end:
                    break
                if end not in found:
                    found[end] = self._matched(end, chain.order, LONGEST)
                end = chain.links[end]
        places = sorted(((matched, end) for end, matched in found.items()), reverse=True)
        chosen = self._choose(places) if places else []
        if self.pointer is not None and all(pointer.at != self.pointer for pointer in chosen):
            chosen.append(Pointer(self.pointer, self.run, self.pointer))
            chosen.sort(key=lambda pointer: -pointer.matched)
        return chosen

    def _choose(self, places: list[tuple[int, int]]) -> list[Pointer]:
        followed: dict[int, int] = {}
        chosen = []
        for matched, end in places:
            token = self.text[end]
            count = followed.get(token, 0)
            if token == BARRIER or count == SUPPORT or (not count and len(followed) == CONTINUATIONS):
                continue
            followed[token] = count + 1
            chosen.append(Pointer(end, matched, end))
        return chosen


Cursor = tuple[History, list[Pointer]]


def _key(source: str, rank: int, bucket: int, split: bool) -> Key:
    return (source, rank, bucket, split)


def _priors() -> dict[Key, float]:
    """Best guesses as in `_WORTH`, a bit less when they are disputed; the others share what is left."""
    return {
        _key(source, rank, bucket, split): worth * (0.3 if rank else 0.7 if split else 1.0)
        for source, worths in _WORTH.items()
        for bucket, worth in enumerate(worths)
        for rank in range(3)
        for split in (False, True)
    }


class CopyGuesser:
    """Guesses by copying from the row's own text. A cursor is a history and the places that the path agrees with."""

    top_k = 0
    vocab_size: int | None = None
    priors: Mapping[Key, float] = _priors()

    def start(self, text: Text) -> list[History]:
        """Index each row's reference and prompt."""
        return [History(reference, row) for reference, row in zip(text.references, text.rows, strict=True)]

    def cursor(self, state: list[History], row: int) -> Cursor | None:
        """The places where the row's last tokens stood before, and its place in the reference."""
        pointers = state[row].pointers()
        return (state[row], pointers) if pointers else None

    def expand(self, cursor: Cursor) -> list[Offer]:
        """What stands there, each token once."""
        history, pointers = cursor
        text, size = history.text, len(history.text)
        groups: dict[int, list[Pointer]] = {}
        for at, matched, start in pointers:
            token = text[at]
            if token != BARRIER:
                after = Pointer(at + 1 if at + 1 < size else start, matched + 1, start)
                groups.setdefault(token, []).append(after)
        offers: list[Offer] = []
        split = len(groups) > 1
        for rank, (token, places) in enumerate(groups.items()):
            first = places[0]
            source = "reference" if first.start < history.reference else "lookup"
            bucket = _BUCKETS[min(first.matched - 1, LONGEST)]
            offers.append((token, _key(source, min(rank, 2), bucket, split), (history, places)))
        return offers

    def enter(self, token: int) -> None:
        """Nothing: a place that disagreed with the path is left."""

    def learn(self, state: list[History], verdict: VerifyResult) -> None:
        """Add what was emitted to the index."""
        for history, emitted in zip(state, verdict.emitted_ids, strict=True):
            if emitted:
                history.extend(emitted)


def lookup() -> BestFirst:
    """The drafter that only copies."""
    return BestFirst("lookup", [CopyGuesser()])


__all__ = ["CopyGuesser", "History", "lookup"]
