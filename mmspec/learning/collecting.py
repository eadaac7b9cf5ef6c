"""`CollectingDrafter`: a drafter of whose call examples are collected for online learning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mmspec.engine.recordings import Recordings
from mmspec.engine.tree import DraftTree
from mmspec.interfaces import Prompt, VerifyResult
from mmspec.interfaces.round import pass_recordings
from mmspec.learning.protocols import LearnableDrafter, LearningExample


class CollectingDrafter:
    """The drafter of one call; collects its examples and keeps its state until they are read."""

    def __init__(self, drafter: LearnableDrafter, with_examples: bool = True) -> None:
        """
        Args:
            drafter: what learns.
            with_examples: as for `LearnableDrafter.start_collecting`.
        """
        self.drafter = drafter
        self.with_examples = with_examples
        self.name = drafter.name
        self.requirements = drafter.requirements
        self.vocab_size = drafter.vocab_size
        self._state: Any = None

    def begin(self, prompt: Prompt) -> Any:
        self._state = self.drafter.begin(prompt)
        self.drafter.start_collecting(self._state, self.with_examples)
        return self._state

    def use_recordings(self, state: Any, recordings: Recordings) -> None:
        pass_recordings(self.drafter, state, recordings)

    def propose(self, state: Any, max_nodes: int, active: Sequence[bool]) -> DraftTree:
        return self.drafter.propose(state, max_nodes, active)

    def observe(self, state: Any, result: VerifyResult, hidden_states: Mapping[int, Tensor]) -> None:
        self.drafter.observe(state, result, hidden_states)

    def examples(self) -> Sequence[LearningExample]:
        """The examples of the call, which is over."""
        state, self._state = self._state, None
        return [] if state is None else self.drafter.collected_examples(state)
