"""Best-first drafting from candidate sources on the host: protocol, calibration and drafter.

A source names candidate successors of a token and a key that says how it found each. The probability of a key is
estimated from the tokens that the target went on to emit. The module knows nothing of models, caches or the number of
nodes worth scoring.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from mmspec.cpu.ngrams import CNgrams
from mmspec.economy.tables import Yields
from mmspec.engine.tree import BUCKETS, DraftTree, Node, best_first, build_tree, root_only
from mmspec.interfaces import Drafter, DrafterRequirements, Prompt, VerifyResult

BARRIER = -1
"""Replaces visual tokens, padding and ids beyond V in host text. Never matched, never copied."""

MIN_PROB = 0.02
"""Nodes with a lower probability are not proposed."""

_PAD = -2
MAX_PENDING_ROUNDS = 32
"""Rounds without a draft that are followed together: one at a time they would cost a percent of a large batch."""
MIN_BATCH_NODES = 4
"""In batches trees are grown to twice the size that was scored last, but to so many nodes at least."""
LIMIT_DECAY = 0.9
"""Factor by which that limit falls in each round with smaller trees."""
MAX_SIBLING_PROB = 0.98
"""Upper bound of the sum of the siblings' probabilities, as they exclude each other."""

Key = Hashable
Candidate = tuple[int, Key, Any]
"""(token, key, cursor of the child)."""


@dataclass(frozen=True)
class PromptText:
    """Host copy of a prompt's text.

    Attributes:
        rows: token ids of each row without the padding around them; each run of visual tokens is one `BARRIER`.
        reference_ids: texts that the output may resemble, one per row, possibly empty.
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
        reference_ids = [
            [BARRIER if not 0 <= token < limit else token for token in ids] for ids in prompt.reference_ids
        ]
        reference_ids += [[] for _ in range(len(rows) - len(reference_ids))]
        return cls([_strip(row) for row in rows], reference_ids, prompt.vocab_size)


def _strip(row: list[int]) -> list[int]:
    """`row` without padding at its ends, every run of other non-text ids replaced by one barrier."""
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
    """A source of candidates that is cheap enough to be queried per node. One object serves any number of calls.

    Attributes:
        top_k: number of ids of the largest logits of each node that it learns from (`VerifyResult.top_ids`); 0: none.
        vocab_size: V of the target that its state belongs to, None if it has no state.
        priors: every key that it uses -> the prior probability of a candidate with that key.
    """

    top_k: int
    vocab_size: int | None
    priors: Mapping[Key, float]

    def start(self, prompt_text: PromptText) -> Any:
        """The state of one call."""

    def cursor(self, state: Any, row: int) -> Any | None:
        """The cursor at the row's last token, or None if there are no candidates after it."""

    def expand(self, cursor: Any) -> Iterable[Candidate]:
        """The candidates after `cursor`, each token once."""

    def enter(self, token: int) -> Any | None:
        """The cursor of a node that another source proposed, or None."""

    def update(self, state: Any, result: VerifyResult) -> None:
        """Learn from the emitted tokens."""


@dataclass
class BestFirstState:
    """State of one call.

    Attributes:
        batch_size: B.
        banned_ids: ids that are never proposed.
        stop_ids: ids that end a row: nothing is proposed below them.
        source_states: state of each source.
        enabled: whether each source proposes; all learn from the emitted tokens.
        candidates: `candidates[b][i]` are the candidates at node i of row b in this round, proposed or not. Nodes are
            numbered as proposed, so the numbers stay valid when the caller trims the tree.
        pending: results of the last rounds, for which nothing was drafted, that the sources have not followed yet.
    """

    batch_size: int
    banned_ids: frozenset[int]
    stop_ids: frozenset[int]
    source_states: list[Any]
    enabled: list[bool]
    candidates: list[Sequence[list[Candidate]]] = field(default_factory=list)
    pending: list[VerifyResult] = field(default_factory=list)


TreeNode = tuple[int | None, list[Any]]
"""(token or None for the root, cursor per source or None where the source did not propose the node)."""


class BestFirstDrafter(Drafter):
    """Drafts the most likely tree below each row's last token, from the union of the candidates of its sources.

    A token that several sources name counts as much as the most trusted of them. Every candidate at an accepted node
    turns out right or wrong, also when it was not scored, so the calibration improves without any drafting.

    Attributes:
        name: of the drafter.
        sources: the candidate sources.
        calibration: probabilities of their keys.
    """

    def __init__(self, name: str, sources: Sequence[CandidateSource]) -> None:
        self.name = name
        self.sources = list(sources)
        self.requirements = DrafterRequirements(top_k=max((source.top_k for source in self.sources), default=0))
        priors = {key: prior for source in self.sources for key, prior in source.priors.items()}
        self.calibration = Yields(priors)
        self.vocab_size: int | None = self._known_vocab_size()
        self._node_limits: dict[int, float] = {}  # by batch size

    def counts(self, state: BestFirstState) -> CNgrams | None:
        self.catch_up(state)
        found = (getattr(source, "counts", None) for source in self.sources)
        return next((one for one in found if isinstance(one, CNgrams)), None)

    def _known_vocab_size(self) -> int | None:
        return next((source.vocab_size for source in self.sources if source.vocab_size is not None), None)

    def begin(self, prompt: Prompt) -> BestFirstState:
        """Copy the prompt's text to the host and start every source."""
        prompt_text = PromptText.from_prompt(prompt)
        source_states = [source.start(prompt_text) for source in self.sources]
        self.vocab_size = self._known_vocab_size()
        enabled = [True] * len(source_states)
        return BestFirstState(len(prompt_text.rows), prompt.banned_ids, prompt.stop_ids, source_states, enabled)

    def propose(self, state: BestFirstState, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        """Trees of at most `max_nodes` nodes, padded to a bucket; roots only if no candidate is likely enough."""
        self.catch_up(state)
        max_nodes = min(self.limit_nodes(state, max_nodes), BUCKETS[-1])
        state.candidates = [[] for _ in range(state.batch_size)]
        rows = [self._propose_row(state, row, max_nodes) if is_active else [] for row, is_active in enumerate(active)]
        return build_tree(rows) if any(rows) else root_only(state.batch_size)

    def _propose_row(self, state: BestFirstState, row: int, max_nodes: int) -> list[Node]:
        """The nodes of one row. With one node there are none, but the candidates at the root are recorded."""
        sources = zip(self.sources, state.source_states, state.enabled, strict=True)
        cursors = [source.cursor(one, row) if enabled else None for source, one, enabled in sources]
        if all(cursor is None for cursor in cursors):
            return []
        recorded: list[list[Candidate]] = []
        state.candidates[row] = recorded

        def expand(node: TreeNode) -> Iterable[tuple[int, float, TreeNode]]:
            # `best_first` expands the root, then each node when it is taken: so recorded[i] belongs to node i.
            candidates, children = self._expand(node, state)
            recorded.append(candidates)
            return children

        return best_first((None, cursors), expand, max_nodes, MIN_PROB)

    def _expand(
        self, node: TreeNode, state: BestFirstState
    ) -> tuple[list[Candidate], list[tuple[int, float, TreeNode]]]:
        """All candidates at one node, and as (token, probability, node) the distinct ones that are likely enough."""
        probs, default = self.calibration.rates, Yields.DEFAULT
        parent_token, parent_cursors = node
        if parent_token in state.stop_ids:
            return [], []
        candidates: list[Candidate] = []
        token_probs: dict[int, float] = {}
        cursors: dict[int, list[Any]] = {}
        for index, source in enumerate(self.sources):
            if not state.enabled[index]:
                continue
            cursor = parent_cursors[index]
            if cursor is None and parent_token is not None:  # a node that only others proposed
                cursor = source.enter(parent_token)
            for candidate in () if cursor is None else source.expand(cursor):
                token, key, child = candidate
                if token in state.banned_ids:
                    continue
                candidates.append(candidate)
                prob = probs.get(key, default)
                if prob < MIN_PROB:
                    continue
                if prob > token_probs.get(token, 0.0):
                    token_probs[token] = prob
                if token not in cursors:
                    cursors[token] = [None] * len(self.sources)
                cursors[token][index] = child
        total = sum(token_probs.values())
        scale = MAX_SIBLING_PROB / total if total > MAX_SIBLING_PROB else 1.0
        return candidates, [(token, prob * scale, (token, cursors[token])) for token, prob in token_probs.items()]

    def observe(self, state: BestFirstState, result: VerifyResult, hidden_states: Mapping[int, Tensor]) -> None:
        """Update the calibration with the candidates at the accepted nodes, and the sources with the emitted tokens.

        After a round without a draft the sources may follow later (`catch_up`).
        """
        if not state.candidates and result.top_ids is None:
            state.pending.append(result)
            if len(state.pending) == MAX_PENDING_ROUNDS:
                self.catch_up(state)
            return
        self.catch_up(state)
        if state.candidates and state.batch_size > 1:
            limit = LIMIT_DECAY * self._node_limits.get(state.batch_size, BUCKETS[-1])
            self._node_limits[state.batch_size] = max(limit, 2 * result.tree.num_nodes)
        self._calibrate(state, result)
        self._update_sources(state, result)

    def _calibrate(self, state: BestFirstState, result: VerifyResult) -> None:
        """Update the calibration with the candidates at the accepted nodes."""
        outcomes = [
            (key, float(token == emitted_id), 1.0)
            for candidates, accepted, emitted in zip(
                state.candidates, result.accepted_nodes, result.emitted_ids, strict=False
            )
            for node, emitted_id in zip(accepted, emitted, strict=False)
            if node < len(candidates)
            for token, key, _ in candidates[node]
        ]
        state.candidates = []
        if outcomes:
            self.calibration.add(outcomes)

    def limit_nodes(self, state: BestFirstState, max_nodes: int) -> int:
        """The size up to which trees are grown: large ones are hardly ever scored in batches, and take time."""
        if state.batch_size == 1:
            return max_nodes
        return min(max_nodes, max(MIN_BATCH_NODES, int(self._node_limits.get(state.batch_size, BUCKETS[-1]))))

    def catch_up(self, state: BestFirstState) -> None:
        """Let the sources follow the rounds that they have not followed yet."""
        pending, state.pending = state.pending, []
        if len(pending) > 1:
            rows = zip(*(result.emitted_ids for result in pending), strict=True)
            emitted_ids = [[token for emitted in row for token in emitted] for row in rows]
            self._update_sources(state, replace(pending[-1], emitted_ids=emitted_ids))
        elif pending:
            self._update_sources(state, pending[0])

    def _update_sources(self, state: BestFirstState, result: VerifyResult) -> None:
        for source, source_state in zip(self.sources, state.source_states, strict=True):
            source.update(source_state, result)
