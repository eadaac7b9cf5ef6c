"""Rounds of one row as plain data, and the observer that collects them.

Nothing is copied to the host while a call runs; `RoundRecorder.rounds` does that when it is asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmspec.interfaces import ObservedRound, Prompt, VerifyResult

DRAFTED, CORRECTED, OWN, UNDRAFTED = "drafted", "corrected", "own", "undrafted"
"""Kinds of tokens: a draft that was accepted; the model's token where all drafts were rejected; its own token after an
accepted draft; the token of a round without a draft."""


@dataclass(frozen=True)
class Round:
    """One forward of the target, or, as the first, the prompt's.

    Attributes:
        start: index of its first emitted token in the answer.
        tokens: ids of the scored nodes; node 0 is the token before `start`.
        parents: parent index of each node, -1 for node 0.
        scores: the drafter's probability of each node's path, or None where it gives none.
        accepted_nodes: nodes of the accepted path, node 0 first.
        emitted: ids; `emitted[i]` was sampled at `accepted_nodes[i]`.
        num_proposed: nodes that the drafter proposed, before the controller chose a size; None if it was not called.
        end_s: `time.perf_counter()` when it ended.
    """

    start: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    scores: tuple[float, ...] | None
    accepted_nodes: tuple[int, ...]
    emitted: tuple[int, ...]
    num_proposed: int | None = None
    end_s: float = 0.0

    @property
    def num_draft_tokens(self) -> int:
        """Scored nodes other than node 0."""
        return len(self.tokens) - 1

    @property
    def num_accepted_tokens(self) -> int:
        """Draft tokens that were accepted."""
        return self.token_kinds.count(DRAFTED)

    @property
    def token_kinds(self) -> tuple[str, ...]:
        """Of each emitted token."""
        if not self.num_draft_tokens:
            return (UNDRAFTED,) * len(self.emitted)
        return tuple(map(self._kind, self.accepted_nodes, self.emitted))

    def _kind(self, node: int, token: int) -> str:
        children = [self.tokens[child] for child, parent in enumerate(self.parents) if parent == node]
        return OWN if not children else DRAFTED if token in children else CORRECTED


class RoundRecorder:
    """Listens to a call of one row and stores the results of its rounds.

    Attributes:
        prompt: of the call; None before it.
    """

    def __init__(self, on_emitted: Callable[[list[int]], None] | None = None) -> None:
        """`on_emitted` is called once a round with the ids that the row emitted."""
        self.prompt: Prompt | None = None
        self._on_emitted = on_emitted
        self._results: list[tuple[VerifyResult, int | None, float]] = []
        self._rounds: list[Round] = []
        self._num_read = 0

    def __call__(self, one: ObservedRound) -> None:
        self.prompt = one.prompt
        if self._on_emitted is not None:
            self._on_emitted(one.result.emitted_ids[0])
        self._results.append((one.result, one.num_proposed, time.perf_counter()))

    def rounds(self) -> list[Round]:
        """All rounds so far that emitted tokens, that of the prefill first. For one thread at a time."""
        for result, proposed, end_s in self._results[self._num_read :]:
            self._num_read += 1
            if result.emitted_ids[0]:
                start = self._rounds[-1].start + len(self._rounds[-1].emitted) if self._rounds else 0
                self._rounds.append(_round(result, start, proposed, end_s))
        return list(self._rounds)


def classify_tokens(rounds: Sequence[Round], count: int) -> list[str]:
    """The kind of each of the first `count` tokens; without a draft where no round covers it."""
    kinds = [kind for one in rounds for kind in one.token_kinds][:count]
    return kinds + [UNDRAFTED] * (count - len(kinds))


def _round(result: VerifyResult, start: int, proposed: int | None, end_s: float) -> Round:
    """The valid nodes of the scored tree, renumbered without gaps."""
    tree = result.tree
    node_mask = tree.node_mask[0].tolist()
    nodes = [node for node, on in enumerate(node_mask) if on]
    number = {node: index for index, node in enumerate(nodes)} | {-1: -1}
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    scores = None if tree.scores is None else tree.scores[0].tolist()
    return Round(
        start=start,
        tokens=tuple(tokens[node] for node in nodes),
        parents=tuple(number[parents[node]] for node in nodes),
        scores=None if scores is None or len(nodes) == 1 else tuple(scores[node] for node in nodes),
        accepted_nodes=tuple(number[node] for node in result.accepted_nodes[0]),
        emitted=tuple(result.emitted_ids[0]),
        num_proposed=proposed,
        end_s=end_s,
    )
