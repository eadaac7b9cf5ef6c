"""`Collection`: the examples of one call, for online learning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmspec.interfaces import ObservedRound
from mmspec.learning.protocols import LearnableDrafter, LearningExample


class Collection:
    """An observer of one call that lets its drafter collect examples, and keeps its state until they are read."""

    def __init__(self, drafter: LearnableDrafter, with_examples: bool = True) -> None:
        """
        Args:
            drafter: what learns.
            with_examples: as for `LearnableDrafter.start_collecting`.
        """
        self.drafter = drafter
        self.with_examples = with_examples
        self._state: Any = None

    def __call__(self, one: ObservedRound) -> None:
        if self._state is None and one.state is not None:  # None: the drafter has failed
            self._state = one.state
            self.drafter.start_collecting(self._state, self.with_examples)

    def examples(self) -> Sequence[LearningExample]:
        """The examples of the call, which is over."""
        state, self._state = self._state, None
        return [] if state is None else self.drafter.collected_examples(state)
