"""Rounds of one row as plain data: the scored tree, the accepted path, the emitted tokens.

`mmspec.app.ui.recorder` collects them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ACCEPTED, CORRECTED, NOT_DRAFTED = "accepted", "corrected", "plain"


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
    """

    start: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    scores: tuple[float, ...] | None
    accepted_nodes: tuple[int, ...]
    emitted: tuple[int, ...]
    num_proposed: int | None = None

    @property
    def num_draft_tokens(self) -> int:
        """Scored nodes other than node 0."""
        return len(self.tokens) - 1

    @property
    def num_accepted_tokens(self) -> int:
        """Draft tokens that were accepted."""
        return max(0, len(self.emitted) - 1)

    @property
    def token_kinds(self) -> tuple[str, ...]:
        """Of each emitted token: an accepted draft, a correction of rejected drafts, or plain (no draft)."""
        if not self.emitted:
            return ()
        last = CORRECTED if self.accepted_nodes[len(self.emitted) - 1] in self.parents else NOT_DRAFTED
        return (ACCEPTED,) * self.num_accepted_tokens + (last,)


def classify_tokens(rounds: Sequence[Round], count: int) -> list[str]:
    """The kind of each of the first `count` tokens; plain where no round covers it."""
    kinds = [kind for one in rounds for kind in one.token_kinds][:count]
    return kinds + [NOT_DRAFTED] * (count - len(kinds))
