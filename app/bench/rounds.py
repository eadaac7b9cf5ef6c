"""What happened in every round: the tree that was scored, the path that was kept, the tokens that came out.

As plain data, of a single row. `mmspec.app.bench.recorder` notes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ACCEPTED, CORRECTED, PLAIN = "accepted", "corrected", "plain"


@dataclass(frozen=True)
class Round:
    """One forward of the target, or, as the first, the prompt's.

    Attributes:
        start: number of the first token it emitted, counted from 0.
        tokens: of the scored nodes; node 0 is the token before `start`. parents: of each node, -1 for node 0.
        reached: how likely the drafter thought each node, or None where it does not say.
        walked: the nodes that were kept, node 0 first. emitted: tokens; `emitted[i]` was picked at `walked[i]`.
        proposed: nodes that the drafter guessed, before the budget chose; None if it was not asked.
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
        """Scored nodes but node 0."""
        return len(self.tokens) - 1

    @property
    def num_accepted_tokens(self) -> int:
        """Guesses that were right."""
        return max(0, len(self.emitted) - 1)

    @property
    def token_kinds(self) -> tuple[str, ...]:
        """Of each emitted token: guessed and kept, said instead of what was guessed, or said where nothing was."""
        if not self.emitted:
            return ()
        last = CORRECTED if self.accepted_nodes[len(self.emitted) - 1] in self.parents else PLAIN
        return (ACCEPTED,) * self.num_accepted_tokens + (last,)


def classify_tokens(rounds: Sequence[Round], count: int) -> list[str]:
    """The kind of each of the first `count` tokens; plain where no round tells."""
    kinds = [kind for one in rounds for kind in one.token_kinds][:count]
    return kinds + [PLAIN] * (count - len(kinds))


__all__ = ["ACCEPTED", "CORRECTED", "PLAIN", "Round", "classify_tokens"]
