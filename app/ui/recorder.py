"""`RoundRecorder`: listens to a call and stores the results of its rounds.

Nothing is copied to the host while it runs; `rounds` does that afterwards. For a single row.
"""

from __future__ import annotations

from collections.abc import Callable

from mmspec.app.ui.rounds import Round
from mmspec.interfaces import ObservedRound, Prompt, VerifyResult, VisualGrid


class RoundRecorder:
    """An observer of one call: `generate(..., mmspec={"observers": [recorder]})`.

    Attributes:
        prompt: of the call; None before it.
    """

    def __init__(self, on_emitted: Callable[[list[int]], None] | None = None) -> None:
        """`on_emitted` is called once a round with the ids that the row emitted."""
        self.prompt: Prompt | None = None
        self._on_emitted = on_emitted
        self._results: list[tuple[VerifyResult, int | None]] = []

    def __call__(self, one: ObservedRound) -> None:
        self.prompt = one.prompt
        if self._on_emitted is not None:
            self._on_emitted(one.result.emitted_ids[0])
        self._results.append((one.result, one.num_proposed))

    @property
    def grids(self) -> tuple[VisualGrid, ...]:
        """Of the pictures in the prompt."""
        return () if self.prompt is None else self.prompt.grids

    @property
    def num_visual_tokens(self) -> int:
        """Visual tokens of the prompt."""
        return 0 if self.prompt is None else int(self.prompt.visual_mask[:1].sum())

    def rounds(self) -> list[Round]:
        """All rounds so far that emitted tokens, that of the prefill first."""
        rounds: list[Round] = []
        for result, proposed in list(self._results):
            if result.emitted_ids[0]:
                start = rounds[-1].start + len(rounds[-1].emitted) if rounds else 0
                rounds.append(_round(result, start, proposed))
        return rounds


def _round(result: VerifyResult, start: int, proposed: int | None) -> Round:
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
    )
