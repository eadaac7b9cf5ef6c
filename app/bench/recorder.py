"""`RecordingDrafter`: wraps a drafter and stores the verification results of its rounds.

Nothing is copied to the host while it runs; `rounds` does that afterwards. For a single row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from mmspec.app.bench.rounds import Round
from mmspec.engine.recordings import Recordings
from mmspec.engine.tree import DraftTree
from mmspec.interfaces import CompressingDrafter, Drafter, Prompt, TrainedDrafter, VerifyResult, VisualGrid
from mmspec.interfaces.drafter import modules_of
from mmspec.interfaces.round import pass_recordings


class RecordingDrafter:
    """Delegates to another drafter and stores the result of every round."""

    def __init__(self, inner: Drafter, on_emitted: Callable[[list[int]], None] | None = None) -> None:
        """
        Args:
            inner: drafts.
            on_emitted: called once per round with the ids that the row emitted.
        """
        self.inner = inner
        self._on_emitted = on_emitted
        self.name, self.requirements, self.vocab_size = inner.name, inner.requirements, inner.vocab_size
        self.compressor = inner.compressor if isinstance(inner, CompressingDrafter) else None
        if isinstance(inner, TrainedDrafter):  # then this is one, too
            self.bundled_compressor = None  # `compressor` is built already
            self.compresses_visual_tokens = inner.compresses_visual_tokens
            self.compressor_hidden_size = inner.compressor_hidden_size
        self._results: list[tuple[VerifyResult, int | None]] = []
        self._num_proposed: int | None = None
        self.grids: tuple[VisualGrid, ...] = ()
        self._visual: Tensor | None = None
        self.modules = modules_of(inner)

    def begin(self, prompt: Prompt) -> Any:
        self.grids, self._visual = prompt.grids, prompt.visual_mask[:1]
        return self.inner.begin(prompt)

    def use_recordings(self, state: Any, recordings: Recordings) -> None:
        pass_recordings(self.inner, state, recordings)

    def propose(self, state: Any, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        tree = self.inner.propose(state, max_nodes, active)
        self._num_proposed = tree.num_nodes
        return tree

    def observe(self, state: Any, result: VerifyResult, hidden_states: Mapping[int, Tensor]) -> None:
        if self._on_emitted is not None:
            self._on_emitted(result.emitted_ids[0])
        self._results.append((result, self._num_proposed))
        self._num_proposed = None
        self.inner.observe(state, result, hidden_states)

    @property
    def num_visual_tokens(self) -> int:
        """Visual tokens of the prompt."""
        return 0 if self._visual is None else int(self._visual.sum())

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
