"""Best-first drafting from host-side sources of guesses: the `CandidateSource` socket, its calibration, the drafter over both.

A guesser names possible successors and tells how it came by each (a key); what a key is worth is learned from what the
target went on to say. Knows nothing of where guesses come from, of models, caches, or how many nodes are worth scoring.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from mmspec.engine.tree import BUCKETS, DraftTree, Node, best_first, build_tree, root_only
from mmspec.interfaces import DrafterRequirements, Prompt, VerifyResult

BARRIER = -1
"""Stands in host texts for what is no text: visual tokens, pads, ids beyond V. Never matched, never copied."""

MIN_PROB = 0.02
"""Nodes that are reached with less are not proposed."""

_PAD = -2
_SIBLINGS = 0.98
"""Siblings exclude each other, so together they cannot be likelier than this."""

Key = Hashable
Candidate = tuple[int, Key, Any]
"""(token, how the guess was come by, cursor of the child)"""


@dataclass(frozen=True)
class PromptText:
    """What guessers read of a prompt, on the host, copied once.

    Attributes:
        rows: the text of each row, without the pads around it, every run of visual tokens shrunk to one `BARRIER`.
        references: texts that the answer may resemble, one per row, possibly empty.
        vocab_size: V, or 0 if unknown.
    """

    rows: list[list[int]]
    reference_ids: list[list[int]]
    vocab_size: int = 0

    @classmethod
    def from_prompt(cls, prompt: Prompt) -> PromptText:
        """The text of `prompt`."""
        ids = prompt.input_ids.masked_fill(prompt.visual_mask, BARRIER)
        if prompt.vocab_size:
            ids = ids.masked_fill(ids >= prompt.vocab_size, BARRIER)
        rows = ids.masked_fill(~prompt.attention_mask, _PAD).tolist()
        limit = prompt.vocab_size or torch.iinfo(torch.long).max
        references = [[BARRIER if not 0 <= token < limit else token for token in ids] for ids in prompt.reference_ids]
        references += [[] for _ in range(len(rows) - len(references))]
        return cls([_shrink(row) for row in rows], references, prompt.vocab_size)


def _shrink(row: list[int]) -> list[int]:
    """`row` without the pads at its end, every run of things that are no text shrunk to one barrier."""
    end = len(row)
    while end and row[end - 1] == _PAD:
        end -= 1
    text: list[int] = []
    for token in row[:end]:
        if token >= 0:
            text.append(token)
        elif text and text[-1] != BARRIER:
            text.append(BARRIER)
    return text


class CandidateSource(Protocol):
    """A source of guesses that is cheap enough to be asked node by node. One object serves any number of calls.

    Attributes:
        top_k: how many ids of the largest logits of each node it wants to learn from (`VerifyResult.top_ids`), 0 for none.
        vocab_size: V of the target that its knowledge belongs to, None if it has none yet or never will.
        priors: every key it uses -> what a guess with that key is worth before anything is known.
    """

    top_k: int
    vocab_size: int | None
    priors: Mapping[Key, float]

    def start(self, prompt_text: PromptText) -> Any:
        """The state of one call."""

    def cursor(self, state: Any, row: int) -> Any | None:
        """Where the row's last token stands, or None if nothing can be said about what follows."""

    def expand(self, cursor: Any) -> Iterable[Candidate]:
        """Its guesses at what follows `cursor`, each token once."""

    def enter(self, token: int) -> Any | None:
        """The cursor of a node that another guesser brought, or None."""

    def update(self, state: Any, result: VerifyResult) -> None:
        """Take in what was emitted."""


class Calibration:
    """How often guesses with a key came true. Shared by all calls of a drafter; old evidence fades.

    Args:
        priors: key -> its worth before anything is known. Unknown keys are worth `DEFAULT`.
        weight: how many observations the prior counts for.
        memory: what is left of the evidence for a key at each new observation of it.
    """

    DEFAULT = 0.1

    def __init__(self, priors: Mapping[Key, float], prior_weight: float = 2.0, decay: float = 0.99) -> None:
        self.prior_weight, self.decay = prior_weight, decay
        self.probs: dict[Key, float] = dict(priors)
        self._priors = dict(priors)
        self._counts: dict[Key, tuple[float, float]] = {}
        self._lock = threading.Lock()

    def prob(self, key: Key) -> float:
        """Probability that a guess with this key is right, given that its parent is reached."""
        return self.probs.get(key, self.DEFAULT)

    def update(self, outcomes: Iterable[tuple[Key, bool]]) -> None:
        """Count guesses that turned out right or wrong."""
        memory, weight, counts = self.decay, self.prior_weight, self._counts
        with self._lock:
            for key, right in outcomes:
                hits, total = counts.get(key, (0.0, 0.0))
                hits, total = hits * memory + right, total * memory + 1.0
                counts[key] = (hits, total)
                self.probs[key] = (hits + weight * self._priors.get(key, self.DEFAULT)) / (total + weight)

    def reset(self) -> None:
        """Forget all evidence."""
        with self._lock:
            self._counts.clear()
            self.probs.clear()
            self.probs.update(self._priors)

    def __deepcopy__(self, memo: dict[int, Any]) -> Calibration:
        copy = Calibration(self._priors, self.prior_weight, self.decay)
        with self._lock:
            copy._counts, copy.probs = dict(self._counts), dict(self.probs)
        memo[id(self)] = copy
        return copy


@dataclass
class BestFirstState:
    """One call: each guesser's own state, the ids never to propose, and what was offered at each node in this round.

    `offers[b][i]` are the guesses considered at node i of row b, taken into the tree or not. Nodes are numbered as they
    were proposed, so they keep their numbers when the caller trims the tree.
    """

    batch_size: int
    banned_ids: frozenset[int]
    source_states: list[Any]
    candidates: list[list[list[Candidate]]] = field(default_factory=list)


TreeNode = tuple[int | None, list[Any]]
"""A node: its token (None for the root), and the cursor of each guesser that brought it, else None."""


class BestFirstDrafter:
    """Drafts the likeliest tree below each row's last token, from the union of what its guessers say.

    A token that several guessers name counts as much as the most trusted of them. Every guess at a node that was walked
    turns out right or wrong, also when it was not scored, so learning what guesses are worth needs no drafting at all.
    """

    def __init__(self, name: str, sources: Sequence[CandidateSource], calibration: Calibration | None = None) -> None:
        self.name = name
        self.sources = list(sources)
        self.requirements = DrafterRequirements(top_k=max((guesser.top_k for guesser in self.sources), default=0))
        priors = {key: prior for guesser in self.sources for key, prior in guesser.priors.items()}
        self.calibration = calibration or Calibration(priors)
        self.vocab_size: int | None = self._known_vocab_size()

    def _known_vocab_size(self) -> int | None:
        return next((guesser.vocab_size for guesser in self.sources if guesser.vocab_size is not None), None)

    def begin(self, prompt: Prompt) -> BestFirstState:
        """Read the prompt's text."""
        text = PromptText.from_prompt(prompt)
        sources = [guesser.start(text) for guesser in self.sources]
        self.vocab_size = self._known_vocab_size()
        return BestFirstState(len(text.rows), prompt.banned_ids, sources)

    def propose(self, state: BestFirstState, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        """The likeliest trees of at most `budget` nodes, padded to a bucket; bare roots if no guess is worth a node."""
        max_nodes = min(max_nodes, BUCKETS[-1])
        state.candidates = [[] for _ in range(state.batch_size)]
        rows = [self._propose_row(state, row, max_nodes) if alive else [] for row, alive in enumerate(active)]
        return build_tree(rows) if any(rows) else root_only(state.batch_size)

    def _propose_row(self, state: BestFirstState, row: int, max_nodes: int) -> list[Node]:
        """The nodes of one row. With a budget of 1 there are none, but the root's guesses are still taken note of."""
        cursors = [
            guesser.cursor(source, row) for guesser, source in zip(self.sources, state.source_states, strict=True)
        ]
        if all(cursor is None for cursor in cursors):
            return []
        offers = state.candidates[row]

        def expand(place: TreeNode) -> Iterable[tuple[int, float, TreeNode]]:
            # `grow` expands the root, then each node as it is taken: so offers[i] belongs to node i.
            offered, children = self._expand(place, state.banned_ids)
            offers.append(offered)
            return children

        return best_first((None, cursors), expand, max_nodes, MIN_PROB)

    def _expand(
        self, place: TreeNode, banned: frozenset[int]
    ) -> tuple[list[Candidate], list[tuple[int, float, TreeNode]]]:
        """All guesses at one node, and the distinct tokens among them that are worth a node."""
        rates, default = self.calibration.probs, Calibration.DEFAULT
        offered: list[Candidate] = []
        hits: dict[int, float] = {}
        cursors: dict[int, list[Any]] = {}
        for which, guesser in enumerate(self.sources):
            for offer in self._source_candidates(guesser, place[1][which], place[0]):
                token, key, child = offer
                if token in banned:
                    continue
                offered.append(offer)
                rate = rates.get(key, default)
                if rate < MIN_PROB:
                    continue
                if rate > hits.get(token, 0.0):
                    hits[token] = rate
                if token not in cursors:
                    cursors[token] = [None] * len(self.sources)
                cursors[token][which] = child
        total = sum(hits.values())
        scale = _SIBLINGS / total if total > _SIBLINGS else 1.0
        return offered, [(token, hit * scale, (token, cursors[token])) for token, hit in hits.items()]

    @staticmethod
    def _source_candidates(guesser: CandidateSource, cursor: Any | None, token: int | None) -> Iterable[Candidate]:
        """One guesser's guesses at a node, also at one that only others brought."""
        if cursor is None and token is not None:
            cursor = guesser.enter(token)
        return () if cursor is None else guesser.expand(cursor)

    def observe(self, state: BestFirstState, result: VerifyResult, hidden_states: Mapping[int, Tensor]) -> None:
        """Score the guesses at the walked nodes, and let the guessers learn."""
        outcomes = [
            (key, token == picked)
            for offers, walked, emitted in zip(
                state.candidates, result.accepted_nodes, result.emitted_ids, strict=False
            )
            for node, picked in zip(walked, emitted, strict=False)
            if node < len(offers)
            for token, key, _ in offers[node]
        ]
        state.candidates = []
        if outcomes:
            self.calibration.update(outcomes)
        for guesser, source in zip(self.sources, state.source_states, strict=True):
            guesser.update(source, result)
